"""The RAG-aware drafter: matches in the row's contexts and answer, and in other records' passages and answers.

    speculation: {method: context}

Matches vote, and every guess has a probability learnt during the run (calibration.py), so that the engine verifies only
what pays. Rows share passages and answers, so guesses depend on earlier records; answers never do. `isolate` turns
sharing off. Limit: exact token matches only; paraphrases do not match.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import Calibration
from ragspec.speculation.drafters.ngram_index import Match, NgramIndex, Proposals, match_length

PROMPT, OUTPUT, OTHER_CONTEXT, OTHER_OUTPUT = range(4)
PRIOR_LOG_ODDS = {OTHER_CONTEXT: -1.5, OTHER_OUTPUT: -0.8}  # by where a match stands, before anything is known
SHARED_TOKENS = 200_000  # maximum tokens of other records in memory
SURE = 4  # tokens of a match in the row's own text that make other records' texts unnecessary


class SharedPool:
    """Texts of other records, concatenated; matches do not cross from one to the next."""

    def __init__(self) -> None:
        self._index = NgramIndex(1, 4)
        self._documents: list[tuple[int, int, int]] = []  # start, end, origin
        self._known: set[int] = set()

    def __len__(self) -> int:
        """Tokens that it holds."""
        return len(self._index.tokens)

    def add(self, token_ids: Sequence[int], origin: int) -> None:
        """Add a text unless it is known, truncated if very long."""
        token_ids = token_ids[:SHARED_TOKENS]
        key = hash(tuple(token_ids))
        if key in self._known or len(token_ids) < 4:
            return
        if len(self._index.tokens) + len(token_ids) > SHARED_TOKENS:
            self.__init__()  # type: ignore[misc]  # full: start over, since the run has moved on
        self._known.add(key)
        start = len(self._index.tokens)
        self._index.extend(token_ids)
        self._documents.append((start, len(self._index.tokens), origin))

    def matches(self, suffix: Sequence[int]) -> list[Match]:
        """Return the matches: positions after which a text continues, ending like `suffix`."""
        found = []
        for position in self._index.find(suffix):
            number = bisect_right(self._documents, position - 1, key=lambda document: document[0]) - 1
            start, end, origin = self._documents[number]
            length = match_length(self._index.tokens, position, suffix, floor=start)
            if length > 0 and position < end:
                found.append(Match(self._index.tokens, position, end, origin, length, False))
        return found


class ContextDrafter:
    """Drafts from the retrieved passages. isolate: do not share texts between records.

    native.py drafts the same faster. note: why it does not, for the user.
    """

    def __init__(self, isolate: bool = False) -> None:
        self.note = ""
        self.calibration = Calibration(PRIOR_LOG_ODDS)
        self.pool = None if isolate else SharedPool()

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> ContextRow:
        """Return the drafter of one record."""
        row = ContextRow(prompt, self.calibration, self.pool)
        if self.pool is not None:
            for start, end in passages:
                self.pool.add(prompt[start:end], OTHER_CONTEXT)
        return row


class ContextRow:
    """Drafts for one record."""

    def __init__(self, prompt: Sequence[int], calibration: Calibration, pool: SharedPool | None) -> None:
        self._index = NgramIndex()
        self._index.extend(prompt)
        self._prompt_tokens = len(prompt)
        self._proposals = Proposals(calibration)
        self._pool = pool

    def propose(self, limit: int) -> Draft:
        """Return the chain that the matches vote for."""
        tokens = self._index.tokens
        end = len(tokens)
        matches = []
        for position in self._index.find(tokens):
            if position < end:
                origin = PROMPT if position < self._prompt_tokens else OUTPUT
                length = match_length(tokens, position, tokens)
                matches.append(Match(tokens, position, end, origin, length, True))
        if self._pool is not None and not any(match.length >= SURE for match in matches):
            matches += self._pool.matches(tokens)
        return self._proposals.build(matches, limit, self._prompt_tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the emitted tokens."""
        self._proposals.score(token_ids)
        self._index.extend(token_ids)

    def close(self) -> None:
        """Share the finished answer with other rows."""
        if self._pool is not None:
            self._pool.add(self._index.tokens[self._prompt_tokens :], OTHER_OUTPUT)
