"""Training examples for a draft: the target's answers to the user's records, from an ordinary run that can resume."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from ragspec.benchmark.plan import check_input
from ragspec.config.io import OutputConfig
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.host.files import write_whole
from ragspec.inputs.record import parse_record
from ragspec.inputs.record_ids import RecordIds
from ragspec.inputs.sources import open_source
from ragspec.json_text import loads
from ragspec.outputs.journal import Journal
from ragspec.run.local import LocalPass
from ragspec.run.session import prepare
from ragspec.speculation.methods import find

LEAST = 24  # examples; fewer would only be memorised
HELD_OUT = 8  # one example in this many is kept for measuring
MAX_TOKENS = 1024  # of an example; longer ones lose their beginning
ANSWERS, INPUT = "answers.jsonl", "held_out.jsonl"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the target's answer, or its last tokens. prompt_tokens: how many of token_ids are the prompt's."""

    id: str
    token_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ExampleSplit:
    """taught: to train on. held_out: to measure acceptance on."""

    taught: list[Example]
    held_out: list[Example]

    @property
    def tokens(self) -> int:
        """Number of answer tokens to train on."""
        return sum(len(example.token_ids) - example.prompt_tokens for example in self.taught)


def without_draft(config: RunConfig) -> RunConfig:
    """Return `config` without the draft that is to be trained."""
    row = find(config.speculation.method)
    drafted = row is not None and "draft_model" in row.needs
    speculation = {"method": "none"} if drafted else config.speculation.model_dump()
    spec = speculation | {"draft_model": None, "draft_tokenizer": None}
    return build_config(config.model_dump() | {"speculation": spec, "scale": None}, "train-draft")


def check_records(config: RunConfig) -> None:
    """Raise ConfigError if the input cannot be read repeatedly."""
    if config.input is None or config.input.is_stdin:
        raise ConfigError("input: a draft is measured on records that are read again; give a file with --input")
    check_input(config)


def answer(config: RunConfig, folder: Path, limit: int | None) -> ExampleSplit:
    """Run the target on records it has not answered yet, and return all answers. Raises ConfigError and ModelError."""
    assert config.input is not None
    with open_source(config.input) as source:
        records = sum(1 for _ in islice(source, min(LEAST, limit or LEAST)))
    _check_enough(config, records, "records" if records != limit else "records (--limit)")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ANSWERS
    output = OutputConfig(path=str(path))
    session = prepare(config.model_copy(update={"output": output}))
    with open_source(config.input) as source, Journal(output, session.identity(), partial=True) as journal:
        LocalPass(session, source, journal, limit=limit, keep_details=True).answer()
    with path.open("rb") as lines:
        examples = [example for line in lines if (example := _example(loads(line))) is not None]
    _check_enough(config, len(examples), f"answers (in {path})")
    return split_examples(examples)


def _example(line: dict[str, Any]) -> Example | None:
    """Return the example in an output line; None for an error line or an answer of one token."""
    answer_ids = line.get("token_ids", [])
    if "error" in line or len(answer_ids) < 2:
        return None
    prompt = line["prompt_token_ids"]
    kept = (prompt + answer_ids)[-MAX_TOKENS:]
    return Example(line["id"], kept, max(0, len(kept) - len(answer_ids)))


def _check_enough(config: RunConfig, count: int, what: str) -> None:
    if count < LEAST:
        raise ConfigError(
            f"{config.input}: {count} {what} are too few to teach a draft; at least {LEAST} are needed, and a "
            "few hundred are better"
        )


def split_examples(examples: Sequence[Example]) -> ExampleSplit:
    """Return the examples in two parts; which ones are held out depends only on their ids."""
    order = sorted(examples, key=lambda example: blake2b(example.id.encode(), digest_size=8).digest())
    count = max(4, len(order) // HELD_OUT)
    return ExampleSplit(order[count:], order[:count])


def write_held_out(config: RunConfig, examples: ExampleSplit, folder: Path) -> Path:
    """Write the input rows of the held-out examples to a file, and return its path."""
    wanted = {example.id for example in examples.held_out}
    assert config.input is not None
    lines = []
    with open_source(config.input) as source:
        ids = RecordIds(source)
        for row in source:
            with suppress(RecordError):  # not a record, so it has no answer either
                parse_record(row.value, row.number, config.prompt.source)
                if ids.of(row) in wanted:
                    lines.append(row.text.strip())
    write_whole(folder / INPUT, b"\n".join(lines) + b"\n")
    return folder / INPUT
