"""A page of two runs' answers side by side: what differs is marked, and F1 is beside each where there are references.

>>> write_pairs("small.jsonl", "large.jsonl", Path("side-by-side.html")).verdict
'7 of 10 answers are the same'

Like the report, the page is one file without scripts, and text from models and users is escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError
from ragspec.host.files import is_among, write_whole
from ragspec.inputs.storage import advising
from ragspec.outputs.reader import OUTPUT_HINT, answers_in, text_of, tokens_of
from ragspec.quality.graded import is_itself_json, metadata_of, references_of, said_in
from ragspec.quality.metrics import f1
from ragspec.report.page import style, template

EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # written without spaces
WORD = re.compile(rf"\s+|[^\W{EAST_ASIAN}]+|.", re.DOTALL)
SHOWN = 500  # pairs on the page; those that differ come first


@dataclass(frozen=True, slots=True)
class Side:
    """One run's answer. pieces: (text, whether the other answer lacks it). f1: in per cent, None without reference."""

    text: str
    pieces: tuple[tuple[str, bool], ...]
    f1: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A record's two answers. question, reference: "" if the outputs do not hold them."""

    id: str
    question: str
    reference: str
    sides: tuple[Side, Side]

    @property
    def same(self) -> bool:
        """Whether both answers are the same text."""
        return self.sides[0].text == self.sides[1].text


@dataclass(frozen=True, slots=True)
class Pairs:
    """All records that both runs answered. names: of the outputs. alone: records that only one run answered.

    replaced: answers that a later line with the same id replaced.
    """

    names: tuple[str, str]
    pairs: list[Pair]
    alone: int = 0
    replaced: int = 0

    @property
    def verdict(self) -> str:
        """How many answers are the same, and how good each run's are."""
        said = f"{sum(pair.same for pair in self.pairs)} of {len(self.pairs)} answers are the same"
        if self.alone:
            said += f" ({self.alone} more in only one of the runs)"
        if self.replaced:
            said += f" ({self.replaced} are replaced by later ones with the same id)"
        means = [_mean([pair.sides[side].f1 for pair in self.pairs]) for side in (0, 1)]
        if None in means:
            return said
        return said + f"; F1 {means[0]:.1f} ({self.names[0]}) and {means[1]:.1f} ({self.names[1]})"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per record for `--format`."""
        return [
            {"id": pair.id, "question": pair.question, "reference": pair.reference, "same": pair.same}
            | {f"answer_{side + 1}": pair.sides[side].text for side in (0, 1)}
            | {f"f1_{side + 1}": pair.sides[side].f1 for side in (0, 1)}
            for pair in self.pairs
        ]


def write_pairs(one: str, other: str, path: Path) -> Pairs:
    """Write the page of two outputs, and return its content. Raises ConfigError if they have no record in common."""
    if is_among(path, (one, other)):
        raise ConfigError(f"--output: {path} is one of the two outputs; choose another name for the page")
    found = pairs_of(one, other)
    ranked = sorted(found.pairs, key=lambda pair: pair.same)
    text = template("side_by_side.html.jinja").render(
        found=found, pairs=ranked[:SHOWN], left=len(ranked[SHOWN:]), style=style()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    return found


def pairs_of(one: str, other: str) -> Pairs:
    """Return the answers of two outputs to the same records."""
    with advising(f"ANSWERS {OUTPUT_HINT}", [one, other]):
        (lines, replaced), (others, replaced_too) = map(_by_id, (one, other))
    shared = [name for name in lines if name in others]
    if not shared:
        raise ConfigError(f"{other}: none of its records are in {one}")
    pairs = [_pair(name, lines[name], others[name]) for name in shared]
    return Pairs((one, other), pairs, len(lines.keys() ^ others.keys()), replaced + replaced_too)


def _by_id(path: str) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the lines with an answer by id, and how many a later one replaced."""
    answered = [(name, line) for name, text, line in answers_in(path) if text is not None]
    return dict(answered), len(answered) - len({name for name, _ in answered})


def _pair(name: str, line: dict[str, Any], other: dict[str, Any]) -> Pair:
    metadata = {**metadata_of(other), **metadata_of(line)}
    references, _ = references_of(metadata)
    question = line.get("query") or other.get("query") or metadata.get("query") or metadata.get("question") or ""
    texts = (str(text_of(line)), str(text_of(other)))
    split = _marked(*texts)
    sides = [
        Side(text, pieces, _score(text, each, metadata), tokens_of(each))
        for text, pieces, each in zip(texts, split, (line, other), strict=True)
    ]
    return Pair(name, str(question), references[0] if references else "", (sides[0], sides[1]))


def _score(text: str, line: dict[str, Any], metadata: dict[str, Any]) -> float | None:
    """Return an answer's F1 as `ragspec evaluate` computes it, None without a reference."""
    references, _ = references_of(metadata, as_text=is_itself_json(text, line))
    return 100 * f1(said_in(text, line), references) if references else None


def _marked(one: str, other: str) -> tuple[tuple[tuple[str, bool], ...], tuple[tuple[str, bool], ...]]:
    """Return both texts in pieces, each with whether the other text lacks it, by words."""
    words, others = (WORD.findall(text) for text in (one, other))
    left, right = [], []
    for kind, begin, end, begin_other, end_other in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        left.append(("".join(words[begin:end]), kind != "equal"))
        right.append(("".join(others[begin_other:end_other]), kind != "equal"))
    return tuple(piece for piece in left if piece[0]), tuple(piece for piece in right if piece[0])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
