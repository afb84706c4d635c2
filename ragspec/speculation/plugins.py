"""Drafters from outside: entry points in the group `ragspec.drafters`, and what a program registers.

    [project.entry-points."ragspec.drafters"]
    my-drafter = "my_package:MyDrafter"        # called with DrafterSettings, returns a Drafter (drafters/base.py)

What such a drafter raises costs drafts, never answers, and is named in the run's notes; what it guesses is checked.
Limit: a registered drafter is known to this process only, an installed one to all (vLLM's workers too).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from ragspec.errors import ConfigError, flat
from ragspec.speculation.drafters.base import Draft, Drafter, RowDrafter

if TYPE_CHECKING:
    from ragspec.speculation.methods import DrafterSettings

GROUP = "ragspec.drafters"
PRIOR_HITS, PRIOR_TRIALS = 1.0, 2.0  # of guesses that come without a probability
log = logging.getLogger(__name__)
registered: dict[str, Callable[[Any], Drafter]] = {}


def register(name: str, make: Callable[[Any], Drafter]) -> None:
    """Let `speculation.method: name` be the drafter that `make` returns for DrafterSettings. Raises ConfigError."""
    from ragspec.speculation.methods import METHODS

    if name in METHODS:
        raise ConfigError(f'drafter "{name}": ragspec has a method of that name; choose another')
    registered[name] = make


def plugins() -> dict[str, Callable[[DrafterSettings], Drafter]]:
    """Return what makes each drafter from outside, by method word. None of their code is imported yet."""
    installed: dict[str, Callable[[Any], Drafter]] = {
        point.name: _Installed(point) for point in entry_points(group=GROUP)
    }
    return {name: _Guarding(name, make) for name, make in {**installed, **registered}.items()}


def failures(drafters: Iterable[Drafter]) -> list[str]:
    """Return a note for each drafter that failed."""
    return [drafter.failure for drafter in drafters if isinstance(drafter, Guarded) and drafter.failure]


class _Installed:
    """An entry point, imported when its drafter is made."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point

    def __call__(self, settings: DrafterSettings) -> Drafter:
        made: Drafter = self._point.load()(settings)
        return made


class _Guarding:
    """Makes a drafter behind its guard."""

    def __init__(self, name: str, make: Callable[[Any], Drafter]) -> None:
        self._name = name
        self._make = make

    def __call__(self, settings: DrafterSettings) -> Drafter:
        return Guarded(self._name, self._make, settings)


class Guarded:
    """A drafter from outside. failure: what it raised, in words; it drafts no more after that."""

    def __init__(self, name: str, make: Callable[[Any], Drafter], settings: DrafterSettings) -> None:
        self._name = name
        self._vocabulary = settings.vocabulary
        self.failure = ""
        self.hits, self.trials = PRIOR_HITS, PRIOR_TRIALS
        self._inner: Drafter | None = self.tried("start", lambda: make(settings))

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> RowDrafter:
        """Return the drafter of one record."""
        inner = self._inner
        return _GuardedRow(self, None if inner is None else self.tried("open", lambda: inner.open(prompt, passages)))

    def tried(self, what: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns; None if it raises, or something has failed before."""
        if self.failure:
            return None
        try:
            return call()
        except Exception as error:  # other people's code: whatever it raises, answers do not depend on it
            log.debug("the drafter %s failed", self._name, exc_info=error)
            self.failure = (
                f"the drafter {self._name} failed in {what} ({type(error).__name__}: {flat(error, 120)}); "
                "it drafted no more after that"
            )
            self._inner = None
            return None

    def checked(self, draft: Draft, limit: int) -> Draft:
        """Return the part of `draft` that can be verified, with a probability for every guess."""
        width = self._vocabulary
        ids = takewhile(lambda i: type(i) is int and i >= 0 and (width is None or i < width), draft.token_ids[:limit])
        token_ids = list(ids)
        count = len(token_ids)
        survival = list(accumulate(draft.survival[:count], min))
        if len(survival) < count:
            rate = self.hits / self.trials
            survival = [rate ** (depth + 1) for depth in range(count)]
        sources: list[int | None] = [None] * count
        return Draft(token_ids, survival, draft.sources[:count] if len(draft.sources) >= count else sources)


class _GuardedRow:
    """One record's drafter behind its guard."""

    def __init__(self, guard: Guarded, inner: RowDrafter | None) -> None:
        self._guard = guard
        self._inner = inner
        self._guessed: list[int] = []

    def propose(self, limit: int) -> Draft:
        inner = self._inner
        if inner is None:
            return Draft()
        draft = self._guard.tried("propose", lambda: self._guard.checked(inner.propose(limit), limit))
        if draft is None:
            return Draft()
        self._guessed = draft.token_ids
        return draft  # type: ignore[no-any-return]

    def extend(self, token_ids: Sequence[int]) -> None:
        for guess, token in zip(self._guessed, token_ids, strict=False):
            self._guard.trials += 1
            self._guard.hits += guess == token
            if guess != token:
                break
        self._guessed = []
        inner = self._inner
        if inner is not None:
            self._guard.tried("extend", lambda: inner.extend(token_ids))

    def close(self) -> None:
        inner = self._inner
        if inner is not None:
            self._guard.tried("close", inner.close)
