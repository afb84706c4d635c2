"""Which tokens of an answer were copied from which passage: the drafts knew it anyway."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.drafters.base import Draft
from ragspec.engine.row import Row
from ragspec.records import Copied

LEAST = 4  # tokens; a shorter run is no quotation


def note_copied(row: Row, draft: Draft, emitted: Sequence[int]) -> None:
    """Add to row.copied what `emitted`, which does not stand in row.tokens yet, took from a passage.

    A token counts if it was a draft from there, or if it goes on a run that reached it, token for token.
    """
    passages = row.request.passages
    if not passages:
        return
    prompt = row.request.token_ids
    for offset, token in enumerate(emitted):
        place = row.written + offset
        run = row.copied[-1] if row.copied else None
        if run is not None and run.end == place:
            source = run.source + run.end - run.start
            if source < passages[run.passage][1] and prompt[source] == token:
                run.end += 1
                continue
        guessed = draft.sources[offset] if offset < len(draft.sources) else None
        if guessed is None or draft.token_ids[offset] != token:
            continue
        passage = _passage(passages, guessed)
        if passage is not None:
            row.copied.append(Copied(place, place + 1, passage, guessed))


def worth_citing(row: Row, tokens: int) -> tuple[Copied, ...]:
    """Return the runs of at least LEAST tokens inside an answer of `tokens`.

    The word that a copy begins with was often not drafted yet: a run is drawn out to the left as far as it agrees.
    """
    prompt, runs, end = row.request.token_ids, [], 0
    for run in row.copied:
        start, source, first = run.start, run.source, row.request.passages[run.passage][0]
        while start > end and source > first and row.tokens[len(prompt) + start - 1] == prompt[source - 1]:
            start, source = start - 1, source - 1
        end = min(run.end, tokens)
        if end - start >= LEAST:
            runs.append(Copied(start, end, run.passage, source))
    return tuple(runs)


def _passage(passages: Sequence[tuple[int, int]], position: int) -> int | None:
    return next((number for number, (start, end) in enumerate(passages) if start <= position < end), None)
