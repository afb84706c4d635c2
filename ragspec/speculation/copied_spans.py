"""Spans of an answer that its accepted drafts copied from passages."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.records import Copied
from ragspec.speculation.drafters.base import Draft

LEAST = 4  # tokens; shorter runs are not citations


class CopiedSpans:
    """The runs that one answer copied from its prompt's passages.

    passages: (start, end) positions in `prompt`. runs: those so far.
    """

    def __init__(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]]) -> None:
        self._prompt = prompt
        self._passages = passages
        self.runs: list[Copied] = []

    def note(self, written: int, draft: Draft, emitted: Sequence[int]) -> None:
        """Add `emitted` tokens that follow `written` answer tokens and were drafted as `draft`.

        A token counts if it was drafted from a passage, or if it continues the preceding run token for token.
        """
        if not self._passages:
            return
        for offset, token in enumerate(emitted):
            at = written + offset
            run = self.runs[-1] if self.runs else None
            if run is not None and run.end == at:
                source = run.source + run.end - run.start
                if source < self._passages[run.passage][1] and self._prompt[source] == token:
                    run.end += 1
                    continue
            guessed = draft.sources[offset] if offset < len(draft.sources) else None
            if guessed is None or draft.token_ids[offset] != token:
                continue
            passage = next((n for n, (start, end) in enumerate(self._passages) if start <= guessed < end), None)
            if passage is not None:
                self.runs.append(Copied(at, at + 1, passage, guessed))

    def settled(self, written: int) -> int:
        """Return of how many of the first `written` tokens it is known whether they belong to a run worth citing."""
        run = self.runs[-1] if self.runs else None
        if run is not None and run.end == written and run.end - run.start < LEAST:
            return max(0, run.start - 1)  # a run may begin with a token that was not drafted
        return max(0, written - 1) if self._passages else written

    def worth_citing(self, answer: Sequence[int]) -> tuple[Copied, ...]:
        """Return the runs of at least LEAST tokens inside `answer`.

        The first word of a copy was often not drafted, so runs are extended to the left as far as the texts agree.
        """
        runs, end = [], 0
        for run in self.runs:
            if run.start >= len(answer):  # cut off by a stop string
                break
            start, source, first = run.start, run.source, self._passages[run.passage][0]
            while start > end and source > first and answer[start - 1] == self._prompt[source - 1]:
                start, source = start - 1, source - 1
            end = min(run.end, len(answer))
            if end - start >= LEAST:
                runs.append(Copied(start, end, run.passage, source))
        return tuple(runs)
