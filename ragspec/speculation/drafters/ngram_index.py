"""Match the end of a row in texts of token ids, and build drafts from the matches by vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import Calibration, Features

BITS = 21  # per token id in a key; vocabularies are below two million
KEPT = 8  # positions returned by a search
LONGEST_MATCH = 32  # tokens; longer matches count as this long


class NgramIndex:
    """An index of a growing text. A position is the one just after an n-gram, where its continuation begins.

    Positions of an n-gram form a linked list: a table holds the latest, and each holds the one before it. A list per
    n-gram would take several times as long to build. Appended tokens are indexed at the next search, so that a text
    that is never searched costs almost nothing.
    """

    def __init__(self, smallest: int = 1, largest: int = 3) -> None:
        self.tokens: list[int] = []
        self._latest: list[dict[int, int]] = [{} for _ in range(largest + 1)]  # by n: n-gram -> position
        self._before: list[list[int]] = [[0] for _ in range(largest + 1)]  # by n: position -> previous one; 0: none
        self._smallest = smallest
        self._largest = largest
        self._indexed = 0  # tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append `token_ids`."""
        self.tokens.extend(token_ids)

    def _catch_up(self) -> None:
        """Index the tokens appended since the last search."""
        start, self._indexed = self._indexed, len(self.tokens)
        token_ids = self.tokens[start:]
        for n in range(self._smallest, self._largest + 1):
            latest, before, kept = self._latest[n], self._before[n], (1 << BITS * n) - 1
            key = 0
            for token in self.tokens[max(0, start + 1 - n) : start]:
                key = key << BITS | token
            for position, token in enumerate(token_ids, start + 1):
                key = (key << BITS | token) & kept  # the n-gram that ends with this token
                if position < n:
                    before.append(0)
                else:
                    before.append(latest.get(key, 0))
                    latest[key] = position

    def find(self, suffix: Sequence[int]) -> list[int]:
        """Return up to KEPT positions before which the text ends like `suffix`, the latest last.

        Positions of longer n-grams are preferred. The end of the text may be among them.
        """
        if self._indexed < len(self.tokens):
            self._catch_up()
        keys, key = [0], 0
        for n in range(1, min(self._largest, len(suffix)) + 1):
            key |= suffix[-n] << BITS * (n - 1)
            keys.append(key)
        found: dict[int, None] = {}
        for n in range(len(keys) - 1, self._smallest - 1, -1):
            position, before = self._latest[n].get(keys[n], 0), self._before[n]
            while position:
                found[position] = None
                if len(found) == KEPT:
                    return sorted(found)
                position = before[position]
        return sorted(found)


def match_length(text: Sequence[int], position: int, suffix: Sequence[int], floor: int = 0) -> int:
    """Return how many tokens of text[floor:position] agree with the end of `suffix`, LONGEST_MATCH at most."""
    longest = min(LONGEST_MATCH, position - floor, len(suffix))
    length = 0
    while length < longest and text[position - 1 - length] == suffix[-1 - length]:
        length += 1
    return length


# -- voting ----------------------------------------------------------------------------------------

LEAST_ACCEPTANCE = 0.02  # probability at which chains end


@dataclass(slots=True)
class Match:
    """A position in a text whose continuation may be the row's."""

    text: Sequence[int]
    position: int
    end: int  # of the text, or of the document in it
    origin: int  # kind of text, for the calibration
    length: int  # tokens before the position that agree with the row
    prompt: bool  # whether `text` begins with the row's own prompt, whose positions can be cited


Voter = tuple[Match, float]  # a match and its weight
_weight = itemgetter(1)


def _agreeing(voters: list[Voter], step: int) -> tuple[list[Voter], float]:
    """Return the voters for the most popular token at this step of the chain, and their share of the weight."""
    votes: dict[int, float] = {}
    best, best_weight, total = -1, 0.0, 0.0
    alive = []
    for voter in voters:
        match, weight = voter
        position = match.position + step
        if position < match.end:
            token = match.text[position]
            votes[token] = vote = votes.get(token, 0.0) + weight
            total += weight
            alive.append((token, voter))
            if vote >= best_weight:  # ties: the later one wins
                best, best_weight = token, vote
    return [voter for token, voter in alive if token == best], best_weight / total if alive else 0.0


class Proposals:
    """Builds chains from matches, and scores them against the target's tokens, verified or not."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._chain: list[int] = []  # the chain being scored
        self._features: list[Features] = []
        self._at = 0

    def build(self, matches: list[Match], limit: int, prompt_tokens: int) -> Draft:
        """Return the chain that the matches vote for, up to `limit` tokens and while it is likely enough."""
        calibration = self._calibration
        least = max(LEAST_ACCEPTANCE, calibration.least)
        draft, features = Draft(), []
        acceptance = 1.0
        alive = [(match, calibration.odds(match.origin, match.length)) for match in matches]
        for step in range(limit):
            share, origins = 1.0, 1
            if len(alive) > 1:
                alive, share = _agreeing(alive, step)
                origins = len({match.origin for match, _ in alive})
            if not alive:
                break
            leader = max(alive, key=_weight)[0]
            position = leader.position + step
            if position >= leader.end:
                break
            guess = leader.text[position]
            known = calibration.features(
                leader.origin,
                leader.length + step,
                guess,
                leader.text[position - 1],
                step,
                share,
                origins,
                len(alive),
            )
            acceptance *= calibration.estimate(known)
            if acceptance < least:
                break
            draft.token_ids.append(guess)
            draft.cumulative_acceptance.append(acceptance)
            draft.sources.append(position if leader.prompt and position < prompt_tokens else None)
            features.append(known)
        if not self._chain and draft.token_ids:
            self._chain, self._features, self._at = draft.token_ids, features, 0
        return draft

    def score(self, token_ids: Sequence[int]) -> None:
        """Compare the chain being scored with the target's tokens."""
        for token in token_ids:
            if not self._chain:
                return
            hit = self._chain[self._at] == token
            self._calibration.observe(self._features[self._at], hit)
            self._at += 1
            if not hit or self._at == len(self._chain):
                self._chain = []
