"""Load weights, with workarounds for transformers and with PEFT adapters merged.

    >>> model = load_model(resolve("demo"), device="cpu", dtype="auto")

Only safetensors are loaded, unless a config asks for pickled weights. An adapter (such as LoRA) is merged into its base
model once, in the user's cache, so that both runners, all kernels and checks see plain weights; this needs
peft. Limit: adapters that cannot be merged (prompt tuning and the like) or are for other tasks are refused.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from ragspec.errors import ConfigError, ModelError, RagspecError, flat
from ragspec.models.checks import PICKLED, IncompleteError, check_weights, refuse_incomplete, refuse_noise
from ragspec.models.resolve import ModelSource, made_once, read_model_config, resolve

CAP = "attn_logit_softcapping"


def apply_workarounds(model: Any) -> Any:
    """Work around bugs of transformers 5.19, in place, and return `model`.

    Its default attention (sdpa) drops the cap on attention scores that Gemma 2 and its relatives are trained with.
    Phi-3 and its relatives recompute a text that outgrows the short frequencies, but generate() then passes only the
    last token, and all tokens before it are lost.
    """
    from ragspec.models.compat import length_dependent

    if getattr(model.config.get_text_config(), CAP, None) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    if any("longrope" in str(module.rope_type) for module in length_dependent(model)):
        model.prepare_inputs_for_generation = MethodType(_with_all_tokens, model)
    return model


def _with_all_tokens(model: Any, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
    """Prepare a forward as the model does, with all tokens if it drops its cache."""
    from ragspec.models.compat import cache_argument

    prepare = type(model).prepare_inputs_for_generation
    word = cache_argument(prepare)
    inputs: dict[str, Any] = prepare(model, input_ids, **kwargs)
    if kwargs.get(word) is not None and inputs.get(word) is None:
        inputs = prepare(model, input_ids, **kwargs | {word: None, "next_sequence_length": None, "position_ids": None})
    return inputs


# -- weights ---------------------------------------------------------------------------------------


def pick_device(requested: str, num_gpus: int | None) -> str:
    """Return the torch device to run on; "auto" prefers CUDA, then MPS, then the CPU."""
    import torch

    if requested != "auto":
        return requested
    if num_gpus == 0:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(requested: str) -> None:
    """Raise ConfigError if this machine has no such device."""
    import torch

    try:
        kind = "cpu" if requested == "auto" else torch.device(requested).type
    except RuntimeError:
        raise ConfigError(
            f'runner_args.device: "{requested}" is not known; use auto, cpu, cuda, cuda:1 or mps'
        ) from None
    here: dict[str, Callable[[], bool]] = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if kind in here and not here[kind]():
        raise ConfigError(f'runner_args.device: "{requested}" is not on this machine; use auto or cpu')


def load_model(
    source: ModelSource,
    *,
    device: str,
    dtype: str,
    num_gpus: int | None = None,
    trust_remote_code: bool = False,
    extra: dict[str, Any] | None = None,
    args_key: str = "runner_args.model_args",
) -> Any:
    """Return the causal language model of `source`, ready to generate.

    Args:
        source: the model.
        device: a torch device.
        dtype: "auto" is float32 on a CPU, and the model's own elsewhere.
        num_gpus: GPUs to spread the model over, if more than one.
        trust_remote_code: the model's own code may run.
        extra: further from_pretrained arguments.
        args_key: the config key of `extra`, for messages.

    Raises:
        ModelError: the model cannot be loaded.
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
        "revision": source.revision or "main",
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
        **placement,
        **extra,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refuse_incomplete reports them in one line
    }
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source.path, **kwargs)
        refuse_incomplete(model, info)
        model = apply_workarounds((model if "device_map" in kwargs else model.to(device)).eval())
        refuse_noise(model)
        return model
    except IncompleteError as error:
        raise ModelError(f'"{source.name}": {error}') from None
    except ImportError as error:
        raise ModelError(
            f'"{source.name}" needs a package that is not installed: {flat(error, 300)}; install it, or choose a '
            "checkpoint that is not quantised"
        ) from error
    except Exception as error:  # a model's own code may raise anything
        text = flat(error, 300)
        if isinstance(error, OSError) and "use_safetensors" not in extra:
            text += f"; to load pickled weights anyway, set {args_key}.use_safetensors: false"
        raise ModelError(f'"{source.name}" could not be loaded: {type(error).__name__}: {text}') from error


# -- PEFT adapters ---------------------------------------------------------------------------------

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
TASK = "CAUSAL_LM"
PARTS = (".safetensors", ".json", ".jinja", ".model", ".txt")


def is_adapter(path: Path, what: str) -> bool:
    """Return whether a folder is an adapter. what: begins messages. Raises ConfigError if it is also a model."""
    if not (path / CONFIG).is_file():
        return False
    if any(path.glob("model*.safetensors")) or any((path / name).is_file() for name in PICKLED):
        raise ConfigError(
            f"{what}: the folder has the weights of a model and a PEFT adapter ({CONFIG}), and it is unclear which "
            "one is meant; move the adapter to a separate folder (it is then merged into its base model), or delete it"
        )
    return True


def merged(path: Path, what: str) -> Path:
    """Return the folder of the base model with the adapter merged, created on first use. Raises ConfigError."""
    config = _read(path, what)
    base = _base(config, path, what)
    file = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{what}: is a PEFT adapter without weights ({WEIGHTS[0]}); download all of its files")
    if file.suffix == ".bin":
        raise ConfigError(f"{what}: the adapter's weights are pickled ({file.name}), and loading them can run code")
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f'{what}: is a PEFT adapter for "{base}"; merging it needs another package: pip install "ragspec[peft]"'
        )
    revision = config.get("revision")
    source = resolve(base, revision, key=f"{what}: base_model_name_or_path")
    files = _parts(path) + (_parts(Path(source.path)) if Path(source.path).is_dir() else [])
    return made_once(path.resolve().name, files, partial(_merge, path, base, revision, what))


def _parts(folder: Path) -> list[Path]:
    """Return the files that the merged model depends on: weights, configs, tokenizer and chat template."""
    return sorted(file for file in folder.iterdir() if file.suffix in PARTS and file.is_file())


def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {CONFIG} cannot be read ({flat(error, 100)})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{what}: {CONFIG} is not a JSON object")
    if config.get("task_type") not in (None, TASK):
        raise ConfigError(f"{what}: is a PEFT adapter for {config['task_type']}, which does not generate text")
    return config


def _base(config: dict[str, Any], path: Path, what: str) -> str:
    """Return the base model's name or folder, which may be relative to the adapter's folder."""
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{what}: {CONFIG} does not name the base model (base_model_name_or_path); add it")
    relative = path / base
    return str(relative) if not Path(base).is_absolute() and not Path(base).exists() and relative.is_dir() else base


def _merge(path: Path, base: str, revision: str | None, what: str, folder: Path) -> None:
    """Write the merged model to `folder`. Raises ConfigError."""
    from ragspec.host.quiet import quiet

    quiet()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = resolve(base, revision)
    check_weights(source, read_model_config(source), key=f"{what}: its base")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.path, revision=source.revision or "main", dtype="auto", use_safetensors=True
        )
        if (rows := _rows(path)) is not None and rows != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted: Any = PeftModel.from_pretrained(model, str(path))
        lost = next((str(each.message) for each in caught if "missing adapter keys" in str(each.message)), "")
        if lost:
            raise ConfigError(f"{what}: the adapter is incomplete: {flat(Exception(lost), 200)}")
        if adapted.active_peft_config.is_prompt_learning:
            raise ConfigError(f"{what}: a {adapted.active_peft_config.peft_type} adapter cannot be merged into a model")
        unexpected = adapted.load_adapter(str(path), adapter_name="default").unexpected_keys  # loaded again to get them
        _refuse_unused(unexpected, what)
        _untie(adapted.get_base_model())
        whole = adapted.merge_and_unload()
        own, whole.generation_config = whole.generation_config, GenerationConfig()
        whole.save_pretrained(folder)
        own.to_json_file(folder / "generation_config.json")  # save_pretrained refuses some configs that load
        here = (path / "tokenizer_config.json").is_file()
        place = {} if here else {"revision": source.revision or "main"}
        AutoTokenizer.from_pretrained(str(path) if here else source.path, **place).save_pretrained(folder)
    except RagspecError:
        raise
    except Exception as error:  # libraries raise anything for files that do not fit together
        raise ConfigError(
            f'{what}: the adapter cannot be merged into "{base}" ({type(error).__name__}: {flat(error, 300)})'
        ) from error


def _refuse_unused(unused: list[str], what: str) -> None:
    """Raise ConfigError for adapter weights that its config leaves out, which would be merged only in part."""
    unused = [name for name in unused if ".modules_to_save." not in name]  # peft writes those twice
    if unused:
        raise ConfigError(
            f"{what}: {len(unused)} tensors of the adapter ({unused[0]}, ...) are for layers that its {CONFIG} does "
            "not name (target_modules, layers_to_transform); use the config that it was trained with"
        )


def _untie(model: Any) -> None:
    """Give the output layer its own weights if it shares them and only one of the two layers is adapted.

    A merge would change both, and apply what the adapter learnt for one of them twice.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.nn import Parameter

    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    adapted = [isinstance(layer, BaseTunerLayer) for layer in layers]
    if not any(adapted):
        return
    into, out = (layer.get_base_layer() if each else layer for layer, each in zip(layers, adapted, strict=True))
    if out is not None and out.weight is into.weight:
        out.weight = Parameter(out.weight.detach().clone())
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _rows(path: Path) -> int | None:
    """Return how many tokens the adapter's own embeddings have, None without any."""
    from safetensors import safe_open

    with safe_open(path / WEIGHTS[0], framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(EMBEDDINGS)]  # noqa: SIM118 (not a dictionary)
        return int(file.get_slice(names[0]).get_shape()[0]) if names else None
