"""AutoGluon-RAG's config files, read as they are: `translate(raw, "c.yaml")` -> (native config, notes).

Keys of platforms that are not chosen, and keys without a counterpart, are named in notes: a note for each section or
platform. What ragspec does differently (no prompt in the answer, an attention mask, real batches) needs no key.
Source: AutoGluon-RAG 0.1 and its history, see autogluon_keys.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ragspec.config.run import RunConfig
from ragspec.config.translate.autogluon_generator import translate_generator
from ragspec.config.translate.autogluon_keys import FLAT, KEYS, NAMES, OLD_SECTIONS
from ragspec.config.translate.autogluon_retrieval import RETRIEVAL, note_unused, translate_retrieval
from ragspec.config.translate.autogluon_sections import Reading, gather, mapping_of
from ragspec.errors import ConfigError, did_you_mean

SECTION_NAMES = (*KEYS, *OLD_SECTIONS)
NATIVE_KEYS = tuple(RunConfig.model_fields)  # may appear beside theirs
SHARED_KEYS = ("input", "output", "order", "prompt", "retrieval")  # and do not show that a file is ragspec's
ALSO_NATIVE = ("chunk_size", "chunk_overlap", "embedding_model", "num_gpus")  # ragspec has these in its sections
WHOLE = ("speculation", "retrieval")  # sections of ours that replace what theirs mean; the others add to it


def is_autogluon(raw: dict[str, Any]) -> bool:
    """Return whether `raw` is an AutoGluon-RAG config: it has a key of theirs, or only sections named as theirs."""
    if any(key in FLAT and key not in ALSO_NATIVE for key in raw):
        return True
    sections = [key for key in SECTION_NAMES if key in raw]
    if any(isinstance(raw[key], dict) and raw[key].keys() & NAMES[OLD_SECTIONS.get(key, key)] for key in sections):
        return True
    return bool(sections) and not any(key in NATIVE_KEYS and key not in SHARED_KEYS for key in raw)


def translate(
    raw: dict[str, Any], source: str, given: Collection[str] = (), *, only_retrieval: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the native config that `raw` means, unchecked, and notes on what was not taken over as it is.

    given: our keys that come from elsewhere ("model", "retrieval.corpus"); theirs need not work.
    only_retrieval: for a command that needs no generator. Raises ConfigError for what cannot work (another platform's
    model), for settings that would change the answers, and for unknown keys.
    """
    _refuse_unknown(raw, source)
    ours = {key: raw[key] for key in NATIVE_KEYS if raw.get(key) is not None or (key == "retrieval" and key in raw)}
    reading = Reading(source, frozenset({*given, *ours}), only_retrieval)
    sections = gather(raw, reading)
    gpus = sections["shared"].take("num_gpus")
    config: dict[str, Any] = {}
    if not only_retrieval:
        config = translate_generator(sections["generator"], gpus, reading)
    note_unused(sections, ["shared"], "", reading)
    if "retrieval" in reading.given:
        note_unused(sections, RETRIEVAL, "retrieval is set", reading)
    elif retrieval := translate_retrieval(sections, reading):
        config["retrieval"] = retrieval
    for key, value in ours.items():
        merges = isinstance(config.get(key), dict) and key not in WHOLE
        config[key] = config[key] | mapping_of(value, f"{source}: {key}") if merges else value
    return config, reading.notes


def _refuse_unknown(raw: dict[str, Any], source: str) -> None:
    for key in raw:
        if key not in FLAT and key not in SECTION_NAMES and key not in NATIVE_KEYS:
            known = [*NATIVE_KEYS, *SECTION_NAMES, *(name for name in FLAT if name.islower())]
            hint = did_you_mean(str(key), known, [*SECTION_NAMES, *KEYS["generator"], *NATIVE_KEYS])
            raise ConfigError(f'{source}: "{key}" is not a known key of an AutoGluon-RAG config{hint}')
