"""A draft cut from its target: a few of its layers, evenly spread, with its own embeddings, norms and head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ragspec.errors import ConfigError
from ragspec.models.draft import width_of


def spread(layers: int, count: int) -> list[int]:
    """Return `count` of the numbers below `layers`, the first and the last among them.

    >>> spread(30, 3)
    [0, 14, 29]
    """
    return [0] if count == 1 else [i * (layers - 1) // (count - 1) for i in range(count)]


def cut_from(target: Any, count: int) -> Any:
    """Return a model of `count` layers of `target`, a loaded causal model, with copies of its weights.

    Raises ConfigError where the model's layers cannot be told apart.
    """
    from transformers import AutoModelForCausalLM

    own = target.config.get_text_config()
    layers = own.num_hidden_layers
    if not 0 < count < layers:
        raise ConfigError(f"--layers: must be between 1 and {layers - 1}, fewer than the target has")
    kept = spread(layers, count)
    config = type(target.config).from_dict(target.config.to_dict())
    text = config.get_text_config()
    text.num_hidden_layers = count
    for key, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(text, key, [value[i] for i in kept])
    try:
        pupil = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = _renumbered(target.state_dict(), kept, layers)
        missing = pupil.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(f"train-draft: {type(target).__name__} cannot be cut to fewer layers ({error})") from error
    tied = set(getattr(pupil, "_tied_weights_keys", None) or ())
    if missing.unexpected_keys or set(missing.missing_keys) - tied:
        raise ConfigError(f"train-draft: {type(target).__name__} cannot be cut to fewer layers: its weights do not fit")
    pupil.generation_config = target.generation_config
    assert width_of(pupil.config) == width_of(target.config)
    return pupil.to(target.device)


def _renumbered(weights: Mapping[str, torch.Tensor], kept: list[int], layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of the layers that are kept, under their new numbers, and of everything else."""
    found = re.compile(r"^(?P<before>.*\.(?:layers|h|blocks)\.)(?P<number>\d+)(?P<after>\..*)$")
    new: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        match = found.match(name)
        if match is None:
            new[name] = value
        elif int(match["number"]) in kept and int(match["number"]) < layers:
            new[f"{match['before']}{kept.index(int(match['number']))}{match['after']}"] = value
    return new
