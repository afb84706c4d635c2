"""What a user should know of a model before it answers: no end token, a damaged generation_config, a BOS left out.

>>> caveats(source, config, tokenizer)
['the model has no end token: answers end at max_new_tokens, or with a stop string']
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

GENERATION = "generation_config.json"
PROBE = "ragspec answers"  # a text that no template has


def caveats(
    source: ModelSource,
    config: Any,
    tokenizer: HFTokenizer,
    generate_args: Mapping[str, Any] | None = None,
    *,
    stops: Collection[int | None] = (),
) -> list[str]:
    """Return notes, a line each; nothing loads. generate_args: what wins over the model's generation_config.

    stops: tokens that end answers beside the model's own.

    Raises ConfigError for end tokens that are none.
    """
    notes = []
    own, damage = _generation_config(source)
    if damage:
        notes.append(f"the model's {GENERATION} cannot be read ({damage}): what it asks for is ignored")
    eos = [(generate_args or {}).get("eos_token_id"), own.get("eos_token_id"), config.get_text_config().eos_token_id]
    found = next((each for each in (*eos, tokenizer.inner.eos_token_id) if each is not None), None)
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ends):
        raise ConfigError(f"model: eos_token_id must be a token's id or a list of ids, not {json.dumps(found)[:60]}")
    width = width_of(config)
    if not ends:
        notes.append("the model has no end token: answers end at max_new_tokens, or with a stop string")
    elif all(token >= width for token in ends):
        notes.append(f"the model cannot write its end token ({ends[0]}; it has {width}): answers end at max_new_tokens")
    elif (turn := _turn_end(tokenizer)) is not None and turn not in {*ends, *stops}:
        notes.append(
            f'the chat template ends an answer with "{tokenizer.piece(turn)}", which is no end token of the model: '
            f"answers may go on with another turn; sampling.stop_token_ids: [{turn}] ends them there"
        )
    if tokenizer.has_chat_template and tokenizer.bos is not None and not _writes_bos(tokenizer):
        notes.append(
            "the chat template writes no begin-of-sequence token, though the tokenizer puts "
            f'"{tokenizer.inner.bos_token}" before plain text: chats have none, as in transformers and vLLM'
        )
    return notes


def _generation_config(source: ModelSource) -> tuple[dict[str, Any], str]:
    """Return what a folder's generation_config says, and why it cannot be read where it cannot."""
    path = Path(source.path) / GENERATION
    if not path.is_file():
        return {}, ""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, flat(error, 100)
    if not isinstance(found, dict):
        raise ConfigError(f'model: "{source.name}": {GENERATION} must be a JSON object; mend or delete it')
    return found, ""


def _turn_end(tokenizer: HFTokenizer) -> int | None:
    """Return the control token that the chat template writes right after an answer, None where it writes none."""
    if not tokenizer.has_chat_template:
        return None
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
    try:
        _, answer, rest = tokenizer.render_chat(messages, add_generation_prompt=False).rpartition(PROBE)
    except Exception:  # a program of the model's authors; prompts/chat.py says what is wrong with it
        return None
    first = tokenizer.controls.found(rest)[:1] if answer else []
    return next((tokenizer.controls.ids.get(word) for word in first if rest.lstrip().startswith(word)), None)


def _writes_bos(tokenizer: HFTokenizer) -> bool:
    """Return whether a chat begins with the begin-of-sequence token; also where its template fails on a probe."""
    try:
        written = tokenizer.render_chat([{"role": "user", "content": "x"}])
    except Exception:  # a program of the model's authors; prompts/chat.py says what is wrong with it
        return True
    return tokenizer.encode(written, special_tokens=False)[:1] == [tokenizer.bos]
