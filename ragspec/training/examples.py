"""What a draft learns from: the target's answers to the user's records, written by an ordinary run that resumes."""

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

LEAST = 24  # answers; a draft of fewer learns them, and nothing else
HELD_OUT = 8  # one answer in so many is kept for measuring
LONGEST = 1024  # tokens of a lesson; the beginnings of longer ones are cut off
ANSWERS, INPUT = "answers.jsonl", "held_out.jsonl"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the target's answer in one, or its last tokens. prompt_tokens: how many of them are the prompt's."""

    id: str
    token_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ExampleSplit:
    """taught: what is learnt from. held_out: what acceptance is measured on."""

    taught: list[Example]
    held_out: list[Example]

    @property
    def tokens(self) -> int:
        """Tokens of the answers that are learnt from."""
        return sum(len(example.token_ids) - example.prompt_tokens for example in self.taught)


def without_draft(config: RunConfig) -> RunConfig:
    """Return `config` without the draft that is to be made."""
    row = find(config.speculation.method)
    drafted = row is not None and "draft_model" in row.needs
    speculation = {"method": "none"} if drafted else config.speculation.model_dump()
    spec = speculation | {"draft_model": None, "draft_tokenizer": None}
    return build_config(config.model_dump() | {"speculation": spec, "scale": None}, "train-draft")


def check_records(config: RunConfig) -> None:
    """Raise ConfigError if the input cannot be read again and again."""
    if config.input is None or config.input.is_stdin:
        raise ConfigError("input: a draft is measured on records that are read again; give a file with --input")
    check_input(config)


def answer(config: RunConfig, folder: Path, limit: int | None) -> ExampleSplit:
    """Let the target answer what it has not answered yet, and return its answers. Raises ConfigError and ModelError."""
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
    """Return what an output line teaches, None for nothing: an error, or an answer of a token."""
    said = line.get("token_ids", [])
    if "error" in line or len(said) < 2:
        return None
    prompt = line["prompt_token_ids"]
    kept = (prompt + said)[-LONGEST:]
    return Example(line["id"], kept, max(0, len(kept) - len(said)))


def _check_enough(config: RunConfig, count: int, what: str) -> None:
    if count < LEAST:
        raise ConfigError(
            f"{config.input}: {count} {what} are too few to teach a draft; at least {LEAST} are needed, and a "
            "few hundred are better"
        )


def split_examples(examples: Sequence[Example]) -> ExampleSplit:
    """Return the lessons in two parts; which of them is held out depends on its id alone."""
    order = sorted(examples, key=lambda example: blake2b(example.id.encode(), digest_size=8).digest())
    count = max(4, len(order) // HELD_OUT)
    return ExampleSplit(order[count:], order[:count])


def write_held_out(config: RunConfig, examples: ExampleSplit, folder: Path) -> Path:
    """Write the rows of the records that are held out to a file of their own, and return it."""
    wanted = {example.id for example in examples.held_out}
    assert config.input is not None
    lines = []
    with open_source(config.input) as source:
        ids = RecordIds(source)
        for row in source:
            with suppress(RecordError):  # what is no record has no answer either
                parse_record(row.value, row.number, config.prompt.source)
                if ids.of(row) in wanted:
                    lines.append(row.text.strip())
    write_whole(folder / INPUT, b"\n".join(lines) + b"\n")
    return folder / INPUT
