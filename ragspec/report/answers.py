"""Answers token by token: which tokens a draft had guessed, and which passage they were copied from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragspec.benchmark.results import Piece, Quote, Results, Sample

COLOURS = 8  # of passages; their classes are in the page's style


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the page shows it. kind: its class. source: what the pointer over it shows."""

    text: str
    kind: str
    drafted: bool
    source: str


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """An answer of candidate `name`."""

    name: str
    title: str
    tokens: tuple[Token, ...]
    passages: tuple[Quote, ...]
    speculation: dict[str, Any]


def shown_answers(results: Results) -> list[ShownAnswer]:
    """Return the answers of the last candidate that knows where its tokens came from; none if no candidate does."""
    for name in reversed(results.names):
        detail = results.details.get(name)
        if detail and any(sample.guessed_known for sample in detail.samples):
            return [_shown(name, sample) for sample in detail.samples]
    return []


def _shown(name: str, sample: Sample) -> ShownAnswer:
    colours = {passage.id: f"c{place % COLOURS}" for place, passage in enumerate(sample.passages)}
    tokens = tuple(
        Token(
            piece.text,
            colours.get(piece.context, piece.by) if piece.context is not None else piece.by,
            piece.by == "draft",
            _source(piece),
        )
        for piece in sample.pieces
    )
    return ShownAnswer(name, sample.question or sample.id, tokens, sample.passages, sample.speculation)


def _source(piece: Piece) -> str:
    how = "guessed by a draft, accepted" if piece.by == "draft" else "written by the model"
    return how if piece.context is None else f"{how}; found in passage {piece.context}"
