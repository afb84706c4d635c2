"""Checks of a model before it answers: its files, its task, its end tokens and its generation_config.

    >>> check_weights(resolve("my-model"), config)    # raises ConfigError: which tensors are missing

transformers fills missing tensors with random values, and vLLM keeps whatever is in memory: both would answer with
noise that looks like text. Only file headers are read; transformers builds its class without memory ("meta"), so that
names, shapes, renamings and tied weights are its own. Limit: quantised checkpoints are checked on loading.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.models.draft import width_of
from ragspec.models.resolve import ModelSource
from ragspec.models.tokenizer import HFTokenizer

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
WRITES_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
OTHER_FILES = ("variant", "subfolder", "gguf_file", "state_dict")  # arguments that select other files
PLACEMENT = ("device_map", "max_memory", "offload_folder", "tp_plan", "attn_implementation", "quantization_config")
SHOWN = 4  # names in a message
LFS = b"version https://git-lfs"


def check_weights(
    source: ModelSource,
    config: Any,
    *,
    key: str = "model",
    args_key: str = "runner_args.model_args",
    trust_remote_code: bool = False,
    extra: Mapping[str, Any] | None = None,
    by_transformers: bool = True,
) -> list[str]:
    """Return notes on a checkpoint.

    Args:
        source: the model. One on the hub is checked as far as it is in the cache.
        config: its transformers config.
        key: the config key that named the model, for messages.
        args_key: the config key of its from_pretrained arguments.
        trust_remote_code: the model's own code may run.
        extra: its from_pretrained arguments.
        by_transformers: transformers loads it; otherwise only models that it has a class for are checked.

    Raises:
        ConfigError: the checkpoint is incomplete or not a causal language model.
    """
    extra, folder = extra or {}, Path(source.path)
    _generation_config(source, key)  # transformers reads it with the weights, and its message names no file
    try:
        check_task(config)
        if not by_transformers and not any((folder / name).is_file() for name in (ONE, INDEX)):
            return []  # vLLM also reads other formats
        if folder.is_dir() and not any(word in extra for word in OTHER_FILES):
            check_files(
                folder,
                args_key,
                safetensors=extra.get("use_safetensors", True) is not False,
                indexed=not by_transformers or not (folder / ONE).is_file(),
            )
        can_check = by_transformers or _has_class(config, trust_remote_code)
        if can_check and getattr(config, "quantization_config", None) is None:
            return check_tensors(source, config, trust_remote_code=trust_remote_code, extra=extra)
        return []
    except IncompleteError as error:
        raise ConfigError(f'{key}: "{source.name}": {error}') from None


def _has_class(config: Any, trust_remote_code: bool) -> bool:
    """Return whether transformers has a class for the model, which knows the required tensors."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or own_code


class IncompleteError(Exception):
    """A checkpoint cannot be used; the message is the end of the user's."""


def check_task(config: Any) -> None:
    """Raise IncompleteError for a model of another task. A classifier without its head would still generate."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    named = getattr(config, "architectures", None) or []
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    others = [name for name in named if "For" in name and name not in known and not name.endswith(WRITES_TEXT)]
    if named and others == list(named):
        raise IncompleteError(f"is a {others[0]}, which does not generate text; choose a causal language model")


def check_files(folder: Path, args_key: str, *, safetensors: bool = True, indexed: bool = True) -> None:
    """Raise IncompleteError for missing or truncated weight files.

    indexed: use an index file if there is one. transformers ignores it beside a single weight file.
    """
    if not safetensors:
        return  # torch reads pickled files and reports errors itself
    if indexed and (folder / INDEX).is_file():
        names = sorted(set(_shards(folder / INDEX)))
        if lost := [name for name in names if not (folder / name).is_file()]:
            raise IncompleteError(f"{_some(lost)}, listed in {INDEX}, is missing; download all files of the model")
    elif (folder / ONE).is_file():
        names = [ONE]
    elif any((folder / name).is_file() for name in PICKLED):
        raise IncompleteError(
            f"has pickled weights only ({PICKLED[0]}), and loading them can run code; if you trust their authors, set "
            f"{args_key}.use_safetensors: false"
        )
    elif parts := sorted(folder.glob("*.safetensors")):
        raise IncompleteError(f"has {_some([part.name for part in parts])}, but no {ONE} and no {INDEX}")
    else:
        raise IncompleteError(f"the folder has no weights ({ONE}, or {INDEX} and the files it names)")
    for name in names:
        _check_header(folder / name)


def _shards(index: Path) -> list[str]:
    try:
        return [str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteError(f"{index.name} cannot be read ({flat(error, 100)}); download it again") from None


def _check_header(file: Path) -> None:
    """Raise IncompleteError for a truncated file: its header states its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            begin = opened.read(len(LFS))
        if begin == LFS:
            raise IncompleteError(f"{file.name} is a Git LFS pointer, not the weights; run `git lfs pull`") from None
        size = file.stat().st_size
        raise IncompleteError(
            f"{file.name} ({size:,} bytes) is damaged or cut off ({flat(error, 100)}); download it again"
        ) from None


def check_tensors(source: ModelSource, config: Any, *, trust_remote_code: bool, extra: Mapping[str, Any]) -> list[str]:
    """Return notes on tensors that transformers' class does not use. No tensor is read.

    Raises IncompleteError for tensors that the class needs and the files lack.
    """
    from transformers import AutoModelForCausalLM

    if not _has_class(config, trust_remote_code):
        raise IncompleteError(f"transformers has no causal language model of type {config.model_type}")
    here = Path(source.path).is_dir()
    given = {
        "revision": source.revision or "main",
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
        **{word: value for word, value in extra.items() if word not in PLACEMENT},
        "device_map": "meta",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "local_files_only": not here,
    }
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source.path, **given)
    except Exception as error:  # a model's own code may raise anything
        if not here and isinstance(error, OSError):
            return []  # not in the cache yet: checked again on loading
        raise IncompleteError(f"cannot be loaded ({type(error).__name__}: {flat(error, 300)})") from error
    refuse_incomplete(model, info)
    unused = sorted(info.get("unexpected_keys") or ())  # without those that the class ignores on purpose
    if not unused:
        return []
    return [
        f"{len(unused)} tensors of the model's files are not used ({_some(unused)}): {type(model).__name__} does "
        "not have them, according to its config.json"
    ]


def refuse_incomplete(model: Any, info: Mapping[str, Any]) -> None:
    """Raise IncompleteError if a model was loaded from incomplete files.

    info: from_pretrained's loading info. A tensor tied to a loaded one is not missing.
    """
    named = model.state_dict(keep_vars=True)  # tied tensors appear under each of their names
    missing = sorted(info.get("missing_keys") or ())
    there = {id(tensor) for name, tensor in named.items() if name not in missing}
    missing = [name for name in missing if id(named.get(name)) not in there]
    kind, total = type(model).__name__, len(named)
    if missing:
        raise IncompleteError(
            f"its weights lack {len(missing)} of the {total} tensors that {kind} needs ({_some(missing)}); the files "
            "are incomplete, or belong to another kind of model"
        )
    if mismatched := sorted(str(each[0]) for each in info.get("mismatched_keys") or ()):
        raise IncompleteError(
            f"the shapes of {len(mismatched)} of its tensors do not match config.json ({_some(mismatched)}); the "
            "files belong to different models"
        )


def refuse_noise(model: Any) -> None:
    """Raise IncompleteError for a model whose logits are NaN or the same for every token."""
    import torch

    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([[1, 2, 3]], device=model.device)).logits[0, -1].float()
    if scores.isnan().any():
        raise IncompleteError(
            f"its scores are not numbers in {str(model.dtype).removeprefix('torch.')}: the weights are damaged, or "
            "need a wider runner_args.dtype"
        )
    if scores.min() == scores.max():
        raise IncompleteError("gives every token the same score: the weights are empty, or damaged")


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# -- notes on a model ------------------------------------------------------------------------------

GENERATION = "generation_config.json"
PROBE = "ragspec answers"  # a text that no template contains


def model_notes(
    source: ModelSource,
    config: Any,
    tokenizer: HFTokenizer,
    generate_args: Mapping[str, Any] | None = None,
    *,
    stops: Collection[int | None] = (),
) -> list[str]:
    """Return notes on a model, a line each; nothing is loaded.

        >>> model_notes(source, config, tokenizer)
        ['the model has no end token: answers end at max_new_tokens, or with a stop string']

    Args:
        source: the model.
        config: its transformers config.
        tokenizer: its tokenizer.
        generate_args: settings that override the model's generation_config.
        stops: tokens that end answers in addition to the model's own.

    Raises:
        ConfigError: the model's end tokens are invalid.
    """
    notes = []
    own, damage = _generation_config(source)
    if damage:
        notes.append(f"the model's {GENERATION} cannot be read ({damage}): its settings are ignored")
    eos = [(generate_args or {}).get("eos_token_id"), own.get("eos_token_id"), config.get_text_config().eos_token_id]
    found = next((each for each in (*eos, tokenizer.inner.eos_token_id) if each is not None), None)
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ends):
        raise ConfigError(f"model: eos_token_id must be a token's id or a list of ids, not {json.dumps(found)[:60]}")
    width = width_of(config)
    if not ends:
        notes.append("the model has no end token: answers end at max_new_tokens, or with a stop string")
    elif not any(0 <= token < width for token in ends):
        notes.append(
            f"the model cannot generate its end token ({ends[0]}; it has {width}): answers end at max_new_tokens"
        )
    elif (turn := _turn_end(tokenizer)) is not None and turn not in {*ends, *stops}:
        notes.append(
            f'the chat template ends an answer with "{tokenizer.piece(turn)}", which is not an end token of the model: '
            f"answers may continue with another turn; set sampling.stop_token_ids: [{turn}] to end them there"
        )
    if tokenizer.has_chat_template and tokenizer.bos is not None and not _writes_bos(tokenizer):
        notes.append(
            "the chat template writes no begin-of-sequence token, though the tokenizer puts "
            f'"{tokenizer.inner.bos_token}" before plain text: chats have none, as in transformers and vLLM'
        )
    return notes


def _generation_config(source: ModelSource, key: str = "model") -> tuple[dict[str, Any], str]:
    """Return the content of a folder's generation_config and, if it cannot be read, the reason."""
    path = Path(source.path) / GENERATION
    if not path.is_file():
        return {}, ""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, flat(error, 100)
    if not isinstance(found, dict):
        raise ConfigError(f'{key}: "{source.name}": {GENERATION} must be a JSON object; fix or delete it')
    return found, ""


def _turn_end(tokenizer: HFTokenizer) -> int | None:
    """Return the control token that the chat template writes right after an answer, None without one."""
    if not tokenizer.has_chat_template:
        return None
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
    try:
        _, answer, rest = tokenizer.render_chat(messages, add_generation_prompt=False).rpartition(PROBE)
    except Exception:  # the template may raise anything; prompts/templates.py reports it
        return None
    first = tokenizer.controls.found(rest)[:1] if answer else []
    return next((tokenizer.controls.ids.get(word) for word in first if rest.lstrip().startswith(word)), None)


def _writes_bos(tokenizer: HFTokenizer) -> bool:
    """Return whether a chat begins with the begin-of-sequence token; True if its template fails on a probe."""
    try:
        written = tokenizer.render_chat([{"role": "user", "content": "x"}])
    except Exception:  # the template may raise anything; prompts/templates.py reports it
        return True
    return tokenizer.encode(written, special_tokens=False)[:1] == [tokenizer.bos]
