"""The workers of a run: placed, looked at, loaded, listened to, replaced when they die, and let go.

with Crew(session, scale) as crew:
    crew.load(records)
    for event in crew.listen(): ...
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from ragspec import __version__
from ragspec.config.sections import ScaleConfig
from ragspec.errors import ConfigError, ModelError
from ragspec.run.ray.cluster import Cluster
from ragspec.run.ray.hand import WAIT_S, Hand
from ragspec.run.ray.inbox import End
from ragspec.run.ray.leases import DEATH, SILENCE
from ragspec.run.ray.messages import Place, Report, Word, unpack
from ragspec.run.ray.worker import Worker
from ragspec.run.session import Session

TRIES = 3  # deaths in a row without a line, after which a worker is not replaced
PLACING_S = 300.0  # a busy machine takes minutes to start a process that imports torch
LOADING = 10  # times the timeout, while a model loads
ASKED = 4  # times in that time
PAUSE_S = 0.1  # before a message that was lost is sent again
LEAVING_S = 30.0  # for workers to free what they hold


@dataclass(frozen=True, slots=True)
class Heard:
    """What a worker has said."""

    hand: Hand
    word: Word


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that is dead, or taken for dead. suspicion: that what it had is the reason (leases.py)."""

    hand: Hand
    why: str
    suspicion: int


class Crew:
    """`scale.workers` workers of one session. Raises ConfigError where one could not answer as the others do.

    notes: what the user should know. about: what workers say of their runner. details: their lines also say what an
    audit and a report need.
    """

    def __init__(self, session: Session, scale: ScaleConfig, *, details: bool = False) -> None:
        self.hands = [Hand(f"worker {number}") for number in range(1, scale.workers + 1)]
        self.notes: list[str] = []
        self.about: dict[str, Any] = {}
        self.method = session.runner.method
        self.scale = scale
        self.details = details
        self._cluster = Cluster(scale)
        own = session.config.of_workers()
        self._config, self._identity = own.as_given(), replace(session, config=own).identity()
        self._gpus = own.devices()
        self._share = (1.0, 0.0)  # CPUs and GPUs of a worker
        self._versions = {"ragspec": __version__}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._cluster)
            stack.callback(self._dismiss)
            self._begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def able(self) -> int:
        """Return how many workers answer, or soon will."""
        return sum(hand.state in ("checked", "loading", "answering") for hand in self.hands)

    def load(self, records: int | None) -> None:
        """Let models load: one on each machine first, then as many at a time as have loaded there.

        records: how many will come to all workers, None if nobody knows.
        """
        each = None if records is None else -(-records // len(self.hands))
        for hand in self.hands:
            if hand.state == "checked":
                there = [other.state for other in self.hands if other.node == hand.node]
                if there.count("loading") < max(1, there.count("answering")):
                    hand.load(each)
            if hand.state == "loading" and "exchange" not in hand.refs:
                hand.send([])

    def muster(self, records: int | None) -> None:
        """Wait until all workers that have a machine are loaded. Raises ConfigError and ModelError."""
        while any(hand.state in ("checked", "loading") for hand in self.hands):
            self.load(records)
            for event in self.listen():
                if isinstance(event, Lost):
                    self.replace(event.hand, event.why, fruitful=False)

    def listen(self, wait_s: float = WAIT_S) -> list[Heard | Lost]:
        """Return what has happened; wait for it, up to `wait_s` seconds. Raises ConfigError and ModelError."""
        events: list[Heard | Lost] = []
        calls = {ref: (hand, what) for hand in self.hands for what, ref in hand.refs.items()}
        for ref in self._cluster.ready(list(calls), wait_s) if calls else ():
            hand, what = calls[ref]
            if hand.refs.pop(what, None) is None:  # it died of another call
                continue
            try:
                said = self._cluster.get(ref)
            except self._cluster.unheard():
                time.sleep(PAUSE_S)
                hand.repeat(what)
            except self._cluster.lost() as error:
                why = self._cluster.reason(error)
                if self._cluster.unfit(error):
                    raise ConfigError(f"{hand.name} cannot start: {why}") from None
                events.append(self._lose(hand, why, 0 if self._cluster.gone(hand.node) else DEATH))
            else:
                events += self._take(hand, what, said)
        return events + self._silent()

    def replace(self, hand: Hand, why: str, *, fruitful: bool) -> None:
        """Place another worker in a dead one's stead. fruitful: it died, but not in vain. Raises ModelError."""
        hand.fruitless = 0 if fruitful else hand.fruitless + 1
        if hand.fruitless < TRIES:
            self.place(hand)
            return
        hand.state = "gone"
        self.note(f"{hand.name} is not replaced any more: it died {TRIES} times without finishing a record")
        if all(each.state == "gone" for each in self.hands):
            raise ModelError(f"no worker is left; {hand.name} on {hand.host} died last: {why}")

    def end(self) -> None:
        """Let workers free what they hold, and tell what they know."""
        left = self.rest("run")
        self._wait_for("run", left)
        for hand in left:
            if hand.state == "answering":
                hand.report()
        self._wait_for("report", left)

    def rest(self, end: End = "pass") -> list[Hand]:
        """Tell workers, which have answered all that they had, that it was the last of a pass; return them."""
        left = [hand for hand in self.hands if hand.state == "answering"]
        for hand in left:
            hand.refs.pop("exchange", None)
            hand.send([], end)
        return left

    def note(self, note: str) -> None:
        """Keep what the user should know, once."""
        if note not in self.notes:
            self.notes.append(note)

    # -- how workers come ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Place workers, and look at the machines that have room for them before a model loads anywhere."""
        self._share = self._cluster.share(self._gpus)
        room = self._cluster.room(*self._share)
        if room < len(self.hands):
            self.note(f"the cluster has room for {room} of {len(self.hands)} workers; others start when it has more")
        for hand in self.hands:
            self.place(hand)
        expected = min(room, len(self.hands))
        deadline = time.monotonic() + PLACING_S
        while sum(hand.state != "placing" for hand in self.hands) < expected and time.monotonic() < deadline:
            for event in self.listen():
                if isinstance(event, Lost):
                    self.replace(event.hand, event.why, fruitful=False)
        if all(hand.state == "placing" for hand in self.hands):
            raise ConfigError(f"scale: no worker has started within {PLACING_S:g} s, though the cluster has room")

    def place(self, hand: Hand) -> None:
        hand.begin(self._cluster.start(Worker, *self._share, self._config, os.getcwd(), self.details))

    def _admit(self, hand: Hand, place: Place) -> None:
        """Let a worker take part, if it would answer as the others do. Raises ConfigError if it cannot."""
        if place.problem:
            raise ConfigError(f"{hand.name} on {place.host}: {place.problem}")
        if place.identity != self._identity:
            keys = ", ".join(key for key, value in self._identity.items() if place.identity.get(key) != value)
            raise ConfigError(
                f"{hand.name} on {place.host} would answer differently: {keys} are not those of this machine"
            )
        for name, version in place.versions.items():
            known = self._versions.setdefault(name, version)
            if name == "ragspec" and version != known:
                raise ConfigError(f"{hand.name} on {place.host} has ragspec {version}; here is {known}")
            if version != known:
                self.note(f"{place.host} has {name} {version}, others {known}: answers may differ")
        hand.place, hand.state = place, "checked"

    # -- what they say ------------------------------------------------------------------------------------------------

    def _take(self, hand: Hand, what: str, said: Any) -> list[Heard | Lost]:
        if what == "check":
            self._admit(hand, said)
        elif what == "report":
            self._take_report(hand, said)
        elif what == "exchange":
            word = unpack(said)
            hand.hear(word)
            return [Heard(hand, word)]
        elif said is not None:  # of run: why it ended
            if not any(each.summary.alive for each in self.hands):
                raise type(said)(f"{hand.name} on {hand.host}: {said}")
            return [self._lose(hand, str(said), DEATH)]
        return []

    def _take_report(self, hand: Hand, report: Report) -> None:
        hand.take_report(report)
        self.method = report.method
        self.about |= {key: report.about[key] for key in ("runner", "versions") if key in report.about}
        for note in report.notes:
            self.note(note)

    # -- how they go --------------------------------------------------------------------------------------------------

    def _silent(self) -> list[Heard | Lost]:
        """Return the workers that have said nothing for too long: they are taken for dead.

        Before that they are asked again, as messages may get lost.
        """
        now, patience, found = time.monotonic(), self.scale.timeout_s, list[Heard | Lost]()
        for hand in self.hands:
            most = {"answering": patience, "loading": LOADING * patience}.get(hand.state)
            if most is not None and "exchange" in hand.refs and now - hand.sent > most:
                found.append(self._lose(hand, f"it said nothing for {most:g} s", SILENCE))
            elif most is not None and "exchange" in hand.refs and now - hand.called > most / ASKED:
                hand.repeat("exchange")
        return found

    def _lose(self, hand: Hand, why: str, suspicion: int) -> Lost:
        self._leave(hand)
        hand.state = "dead"
        hand.summary.deaths += 1
        self.note(f"{hand.name} on {hand.host} died: {why}")
        return Lost(hand, why, suspicion)

    def _wait_for(self, what: str, hands: list[Hand]) -> None:
        deadline = time.monotonic() + LEAVING_S
        while any(what in hand.refs for hand in hands) and time.monotonic() < deadline:
            self.listen()

    def _leave(self, hand: Hand) -> None:
        hand.refs.clear()
        if hand.actor is not None:
            self._cluster.kill(hand.actor)
            hand.actor, hand.summary.alive = None, False

    def _dismiss(self) -> None:
        for hand in self.hands:
            self._leave(hand)
