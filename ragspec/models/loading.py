"""Weights into memory: device, dtype, several GPUs, safetensors only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragspec.errors import ConfigError, ModelError, flat
from ragspec.models.mending import mend
from ragspec.models.resolve import ModelSource
from ragspec.models.weights import IncompleteError, refuse_incomplete, refuse_noise


def pick_device(asked: str, num_gpus: int | None) -> str:
    """Return the torch device to run on; "auto" prefers CUDA, then MPS, then the CPU."""
    import torch

    if asked != "auto":
        return asked
    if num_gpus == 0:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(asked: str) -> None:
    """Raise ConfigError if there is no such device here."""
    import torch

    try:
        kind = "cpu" if asked == "auto" else torch.device(asked).type
    except RuntimeError:
        raise ConfigError(f'runner_args.device: "{asked}" is not known; use auto, cpu, cuda, cuda:1 or mps') from None
    here: dict[str, Callable[[], bool]] = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if kind in here and not here[kind]():
        raise ConfigError(f'runner_args.device: "{asked}" is not on this machine; use auto or cpu')


def load_model(
    source: ModelSource,
    *,
    device: str,
    dtype: str,
    num_gpus: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    extra: dict[str, Any] | None = None,
    args_key: str = "runner_args.model_args",
) -> Any:
    """Return the causal model of `source`, ready to generate. Raises ModelError.

    dtype "auto" is float32 on a CPU and the model's own elsewhere. extra: further from_pretrained arguments, which are
    under `args_key` in a config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    extra = extra or {}
    if dtype == "auto" and device == "cpu":
        dtype = "float32"  # bfloat16 is emulated on CPUs without AVX-512
    placement: dict[str, Any] = {}
    if (num_gpus or 0) > 1 and torch.cuda.device_count() > 1:
        gpus = range(min(num_gpus or 0, torch.cuda.device_count()))
        placement = {"device_map": "auto", "max_memory": {i: torch.cuda.mem_get_info(i)[0] for i in gpus}}
    kwargs = {
        "dtype": dtype,
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
        **placement,
        **extra,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refused below, in one line
    }
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source.path, **kwargs)
        refuse_incomplete(model, info)
        model = mend((model if "device_map" in kwargs else model.to(device)).eval())
        refuse_noise(model)
        return model
    except IncompleteError as error:
        raise ModelError(f'"{source.name}": {error}') from None
    except ImportError as error:
        raise ModelError(
            f'"{source.name}" needs a package that is not here: {flat(error, 300)}; install it, or choose a checkpoint '
            "that is not quantised"
        ) from error
    except Exception as error:  # whatever a model's own code raises while loading, it could not start
        text = flat(error, 300)
        if isinstance(error, OSError) and "use_safetensors" not in extra:
            text += f"; to load pickled weights anyway, set {args_key}.use_safetensors: false"
        raise ModelError(f'"{source.name}" could not be loaded: {type(error).__name__}: {text}') from error
