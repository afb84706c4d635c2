"""Several matches vote on what comes next; a guess is remembered until it is known whether it was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import Calibration, Features

LEAST_SURVIVAL = 0.02  # a guess less likely than this is not made


@dataclass(slots=True)
class Match:
    """A position in some text whose continuation may be the row's."""

    text: Sequence[int]
    position: int
    end: int  # of the text, or of the document in it
    origin: int  # what kind of text it is, to the calibration
    length: int  # tokens before the position that agree with the row
    prompt: bool  # whether `text` begins with the row's own prompt, whose positions can be cited


class Proposals:
    """Builds chains from matches, and scores each chain against what the target wrote, verified or not."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._chain: list[int] = []  # the guess that is being scored
        self._features: list[Features] = []
        self._at = 0

    def build(self, matches: list[Match], limit: int, prompt_tokens: int) -> Draft:
        """Return the chain that the matches vote for, up to `limit` tokens and as long as it is of use."""
        calibration = self._calibration
        least = max(LEAST_SURVIVAL, calibration.least)
        draft, features = Draft(), []
        survival = 1.0
        weights = [calibration.odds(match.origin, match.length) for match in matches]
        step = 0
        while matches and step < limit:
            votes: dict[int, float] = {}
            best, best_weight = -1, 0.0
            total = 0.0
            alive = []
            for match, weight in zip(matches, weights, strict=True):
                position = match.position + step
                if position >= match.end:
                    continue
                alive.append((match, weight))
                token = match.text[position]
                votes[token] = vote = votes.get(token, 0.0) + weight
                total += weight
                if vote >= best_weight:  # of equals the later one wins
                    best, best_weight = token, vote
            if not alive:
                break
            agreeing = [(m, w) for m, w in alive if m.text[m.position + step] == best] if len(votes) > 1 else alive
            leader = max(agreeing, key=lambda pair: pair[1])[0]
            origins = len({match.origin for match, _ in agreeing})
            share = best_weight / total
            position = leader.position + step
            known = calibration.features(
                leader.origin,
                leader.length + step,
                best,
                leader.text[position - 1],
                step,
                share,
                origins,
                len(agreeing),
            )
            survival *= calibration.estimate(known)
            if survival < least:
                break
            draft.token_ids.append(best)
            draft.survival.append(survival)
            draft.sources.append(position if leader.prompt and position < prompt_tokens else None)
            features.append(known)
            matches, weights = [m for m, _ in agreeing], [w for _, w in agreeing]
            step += 1
        if not self._chain and draft.token_ids:
            self._chain, self._features, self._at = draft.token_ids, features, 0
        return draft

    def score(self, token_ids: Sequence[int]) -> None:
        """Compare the chain that is being scored with tokens that the target wrote."""
        for token in token_ids:
            if not self._chain:
                return
            hit = self._chain[self._at] == token
            self._calibration.observe(self._features[self._at], hit)
            self._at += 1
            if not hit or self._at == len(self._chain):
                self._chain = []
