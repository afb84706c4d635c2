"""Records as requests, and their outcomes until a record has all of its own.

One prompt and one answer, mostly. `n` asks for several answers to each prompt; a text completion may bring several
prompts.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from ragspec.outputs.answers import Flight
from ragspec.records import Failure, Generation, Request


class Landed(NamedTuple):
    """A record with all its outcomes. answers: in order, `n` of each prompt; or why there are none."""

    flight: Flight
    answers: list[Generation] | Failure


class _Waiting(NamedTuple):
    flight: Flight
    outcomes: list[Generation | Failure | None]


class Gathering:
    """Which request belongs to which record."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, tuple[int, _Waiting]] = {}

    def requests(self, flight: Flight) -> list[Request]:
        """Return the requests of a record. Greedy answers to a prompt are all the same, and written once."""
        times = 1 if flight.sampling.temperature == 0 else flight.n
        waiting = _Waiting(flight, [None] * (times * len(flight.prompts)))
        requests = []
        for place in range(len(waiting.outcomes)):
            prompt = flight.prompts[place // times]
            # the first is sampled as a record's only answer is
            name = flight.record.id if place == 0 else f"{flight.record.id}#{place}"
            index = next(self._numbers)
            self._waiting[index] = place, waiting
            request = Request(
                index,
                name,
                prompt.token_ids,
                flight.sampling,
                prompt.places,
                flight.whole_grammar(prompt),
                prompt.thinking,
            )
            requests.append(request)
        return requests

    def take(self, outcome: Generation | Failure) -> Landed | None:
        """Take in an outcome; return the record if it was the last that was missing."""
        place, waiting = self._waiting.pop(outcome.index)
        flight, outcomes = waiting
        outcomes[place] = outcome
        if any(each is None for each in outcomes):
            return None
        answers = [each for each in outcomes if isinstance(each, Generation)]
        failure = next((each for each in outcomes if isinstance(each, Failure)), None)
        if failure is not None:
            return Landed(flight, failure)
        if len(answers) < flight.n * len(flight.prompts):
            answers = [each for each in answers for _ in range(flight.n)]
        return Landed(flight, answers)
