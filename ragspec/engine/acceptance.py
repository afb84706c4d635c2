"""Which tokens a step's requests generate: the target's own choice, as far as each draft agrees with it.

    >>> for item, token_ids in accept(work, result, constraint): ...

Requests are chosen for together, so that a device is waited for a few times a step, not a few times a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from ragspec.engine.constraint import Constraint, Masks
from ragspec.engine.model.result import NOT_A_NUMBER, StepResult, best_tokens
from ragspec.engine.processing import Positions, processed
from ragspec.engine.request_state import ScheduledRequest
from ragspec.engine.sampling import SampledDraft, agreement, draw, reject
from ragspec.models.logits_processors import token_logprobs

TOGETHER = 1 << 24  # probabilities that a device computes at once
CACHED = 1 << 20  # the same for a CPU, whose caches hold no more

StepOutput = list[tuple[ScheduledRequest, list[int]]]  # each request with its generated tokens
Chosen = dict[int, list[int]]  # tokens, by the index of a request's first logits


class Place(NamedTuple):
    """A request that generates, and the index of its first logits."""

    item: ScheduledRequest
    at: int

    @property
    def end(self) -> int:
        """The index after its last logits."""
        return self.at + self.item.wanted

    def agreed(self, tokens: Sequence[int]) -> list[int]:
        """Return the target's choices up to and including the first that is not the draft's."""
        return list(tokens[: agreement(self.item.draft.token_ids, tokens) + 1])

    def noise(self) -> list[float]:
        """Return the uniform number of each of its positions."""
        row = self.item.row
        return [row.noise.at(row.written + i) for i in range(self.item.wanted)]

    def sampled_draft(self, target: torch.Tensor) -> SampledDraft:
        """Return its draft beside the target's probabilities, (wanted, vocab)."""
        row, draft = self.item.row, self.item.draft
        assert draft.probabilities is not None
        return SampledDraft(target, draft.probabilities, draft.token_ids, row.noise, row.written)


def needs_logits(work: Sequence[ScheduledRequest]) -> bool:
    """Return whether more is needed than the best tokens."""
    return any(item.row.needs_logits for item in work if item.writes)


def accept(work: Sequence[ScheduledRequest], result: StepResult, constraint: Constraint) -> StepOutput:
    """Return each request's tokens, up to and including the target's first disagreement with the draft.

    The last is NOT_A_NUMBER where logits of theirs are not numbers. Marks requests that overflowed, be it behind a
    wrong draft.

    result: of the sum of wanted tokens, request after request. constraint: applies grammars.
    """
    if not needs_logits(work):
        best = result.best()
        _mark_overflow(work, best)
        return _accept_best(work, best)
    starts = list(accumulate((item.wanted for item in work), initial=0))[:-1]
    places = [Place(item, at) for item, at in zip(work, starts, strict=True) if item.writes]
    masks = constraint.masks(work)
    logits = result.logits()
    best = best_tokens(logits).tolist()
    _mark_overflow(work, best)
    chosen = _choose(places, best, logits, masks, constraint)
    for place in places:
        tokens = chosen[place.at]
        if NOT_A_NUMBER in best[place.at : place.at + len(tokens)]:  # however a token was chosen from them
            tokens[-1] = NOT_A_NUMBER
    _note_logprobs(places, chosen, logits)
    return [(item, chosen[at] if item.writes else []) for item, at in zip(work, starts, strict=True)]


def _mark_overflow(work: Sequence[ScheduledRequest], best: Sequence[int]) -> None:
    """Mark requests of which logits are not numbers."""
    if NOT_A_NUMBER in best:
        at = 0
        for item in work:
            item.overflowed = NOT_A_NUMBER in best[at : at + item.wanted]
            at += item.wanted


def _accept_best(work: Sequence[ScheduledRequest], best: list[int]) -> StepOutput:
    """Return the best tokens of each request as far as its draft agrees; between steps, so without a call for each."""
    output: StepOutput = []
    at = 0
    for item in work:
        if not item.writes:
            output.append((item, []))
            continue
        guesses = item.draft.token_ids
        end = at + len(guesses)
        agreed = end if guesses == best[at:end] else at + agreement(guesses, best[at:end])
        output.append((item, best[at : agreed + 1]))
        at = end + 1
    return output


def _choose(
    places: Sequence[Place], best: Sequence[int], logits: torch.Tensor, masks: Masks | None, constraint: Constraint
) -> Chosen:
    """Return the tokens of requests of any kind. best: best_tokens() of the logits."""
    greedy: list[Place] = []
    penalized: list[Place] = []  # the best after processing
    sampled: list[Place] = []
    drafted: list[Place] = []  # by a model that sampled
    for place in places:
        row = place.item.row
        if row.samples:
            (sampled if place.item.draft.probabilities is None else drafted).append(place)
        else:
            (greedy if row.greedy else penalized).append(place)
    chosen = _choose_best(greedy, best, logits, constraint)
    for several in _batches(penalized, logits):
        chosen |= _parted(several, _processed(several, logits, masks).argmax(-1).tolist())
    for several in _batches(sampled, logits):
        noise = [uniform for place in several for uniform in place.noise()]
        chosen |= _parted(several, draw(_probabilities(several, logits, masks), noise))
    for several in _batches(drafted, logits):
        parts = torch.split(_probabilities(several, logits, masks), [place.item.wanted for place in several])
        samples = [place.sampled_draft(target) for place, target in zip(several, parts, strict=True)]
        chosen |= {place.at: tokens for place, tokens in zip(several, reject(samples), strict=True)}
    return chosen


def _choose_best(places: Sequence[Place], best: Sequence[int], logits: torch.Tensor, constraint: Constraint) -> Chosen:
    """Return the best tokens that grammars allow."""
    chosen = {}
    for place in places:
        mine, grammar = best[place.at : place.end], place.item.row.grammar
        if grammar is None:
            chosen[place.at] = place.agreed(mine)
        else:
            guesses = place.item.draft.token_ids
            chosen[place.at] = constraint.greedy(grammar, guesses, mine, logits[place.at : place.end])
    return chosen


def _probabilities(places: Sequence[Place], logits: torch.Tensor, masks: Masks | None) -> torch.Tensor:
    return torch.softmax(_processed(places, logits, masks).double(), dim=-1)


def _processed(places: Sequence[Place], logits: torch.Tensor, masks: Masks | None) -> torch.Tensor:
    """Return the logits of requests, (sum of wanted, vocab), after their grammars and processors."""
    indices = [at for place in places for at in range(place.at, place.end)]
    rows = logits[torch.tensor(indices, device=logits.device)]
    if masks is not None:
        rows = masks.applied(rows, indices)
    return processed(rows, [Positions(place.item.row, place.item.draft.token_ids) for place in places])


def _parted(places: Iterable[Place], tokens: Iterable[int]) -> Chosen:
    """Return each request's part of the tokens of all."""
    rest = iter(tokens)
    return {place.at: place.agreed(list(islice(rest, place.item.wanted))) for place in places}


def _batches(places: Sequence[Place], logits: torch.Tensor) -> Iterator[list[Place]]:
    """Yield the requests in parts of as many as are computed at once, at least one."""
    most, part, rows = (CACHED if logits.device.type == "cpu" else TOGETHER) // logits.shape[1], list[Place](), 0
    for place in places:
        if part and rows + place.item.wanted > most:
            yield part
            part, rows = [], 0
        part.append(place)
        rows += place.item.wanted
    if part:
        yield part


def _note_logprobs(places: Sequence[Place], chosen: Chosen, logits: torch.Tensor) -> None:
    """Note the log-probabilities of generated tokens where they are asked for."""
    asked: dict[int, list[Place]] = {}
    for place in places:
        most = place.item.row.request.sampling.logprobs
        if most is not None and chosen[place.at][-1] != NOT_A_NUMBER:
            asked.setdefault(most, []).append(place)
    for most, several in asked.items():
        for part in _batches(several, logits):
            indices = [place.at + i for place in part for i in range(len(chosen[place.at]))]
            tokens = [token for place in part for token in chosen[place.at]]
            found = iter(token_logprobs(logits[torch.tensor(indices, device=logits.device)], tokens, most))
            for place in part:
                place.item.logprobs = [next(found) for _ in chosen[place.at]]
