"""Prefixes that outlive a run: loaded from disk where that is faster than computing them, and kept where prompts share
them.

    >>> tokens = stored.load(row, tokens)  # of the row's, in the cache now
    >>> stored.keep(row, tokens)  # which another prompt has too

Loading never changes more than rounding: what is loaded are the bits that an earlier run of the same model, machine and
settings computed (fingerprint.py). Limit: of the target model alone; a draft model computes its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any

from ragspec.engine.kv.prefix_store import UNIT, Damaged, Prefix, PrefixStore, chained
from ragspec.engine.model.forward import Model
from ragspec.engine.notes import Notes
from ragspec.engine.request_state import RequestState, ScheduledRequest
from ragspec.errors import flat

READERS = 4  # files read and checked at once
PENDING = 1 << 29  # bytes that wait to be written; beyond, prefixes are kept another time
MOSTLY = 0.9  # share of a step's tokens that are of prompts
AGAIN = 50  # times a slow load's seconds after which loading is tried again


class StoredPrefixes:
    """One run's use of a store. root: what computes keys and values (fingerprint.py)."""

    def __init__(self, store: PrefixStore, root: bytes, model: Model, notes: Notes) -> None:
        self._store = store
        self._root = root
        self._model = model
        self._notes = notes
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="prefixes")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefixes-write")
        self._lock = Lock()
        self._pending: dict[str, int] = {}  # bytes, by name of a file to be written
        self._writes = True  # until writing fails
        self._computing = Rate()
        self._loading = Rate()
        self._waits_s = 0.0  # of computing, before slow loading is tried again
        self._spent_s = 0.0  # of this step
        self.loaded_tokens = 0
        self.load_s = 0.0
        self.stored_tokens = 0
        self.damaged = 0
        self._writer.submit(self._trim)

    def load(self, row: RequestState, computed: int, room: Callable[[int], bool]) -> int:
        """Load what follows a row's first `computed` tokens; return how many tokens of it are in the cache then.

        room: makes room for a row's first so many tokens; returns whether there is.
        """
        started = time.perf_counter()
        end = self._load(row, computed, self._held(row, computed), room)
        self._spent_s += time.perf_counter() - started
        return end

    def _held(self, row: RequestState, computed: int) -> list[str]:
        """Return the names of all units of a prompt, as far as those that it lacks are in the store."""
        names = self._names(row, min(row.prompt_tokens, len(row.tokens) - 1))
        for at in range(computed // UNIT, len(names)):
            if not self._store.holds(names[at]):
                return names[:at]
        return names

    def _load(self, row: RequestState, computed: int, names: Sequence[str], room: Callable[[int], bool]) -> int:
        at = computed // UNIT
        while at < len(names) and not self._is_slow():
            some = names[at : at + (READERS if self._loading.tokens else 1)]
            if not room((at + len(some)) * UNIT):
                break
            started = time.perf_counter()
            found = self._read(some)
            end = self._fill(row, computed, at, found)
            seconds = time.perf_counter() - started
            self._loading.add(end - computed, seconds)
            self.loaded_tokens += end - computed
            self.load_s += seconds
            computed, at = end, at + len(some)
            if len(found) < len(some):
                break
        if computed >= UNIT:
            self._store.touch(names[: computed // UNIT])
        return computed

    def _read(self, names: Sequence[str]) -> list[Prefix]:
        """Return the units up to the first that cannot be read."""
        found = []
        for each in self._readers.map(self._get, names):
            if each is None:
                break
            found.append(each)
        return found

    def _get(self, name: str) -> Prefix | None:
        try:
            return self._store.get(name)
        except Damaged:
            self.damaged += 1
            self._notes.add("prefix_store: damaged files were detected by their hash, and their contents recomputed")
        except OSError as error:
            self._notes.add(f"prefix_store: cannot be read: {error.strerror or flat(error)}")
        return None

    def _fill(self, row: RequestState, computed: int, at: int, found: Sequence[Prefix]) -> int:
        """Write units, the first of which is number `at` of a prompt, behind a row's first `computed` tokens."""
        cache, device = self._model.cache, self._model.device
        for number, prefix in enumerate(found, at):
            skipped, end = max(0, computed - number * UNIT), (number + 1) * UNIT
            if skipped < UNIT:
                cache.fill(row.place, end - UNIT + skipped, [each[:, skipped:].to(device) for each in prefix.tensors])
                computed = end
            self._computing.expect(prefix.seconds_per_token)
        return computed

    def _is_slow(self) -> bool:
        """Return whether loading is slower than computing, as far as both are known."""
        loading, computing = self._loading.seconds_per_token, self._computing.seconds_per_token
        if loading is None or computing is None or loading < computing:
            return False
        if self._waits_s > AGAIN * UNIT * loading:
            self._waits_s, self._loading = 0.0, Rate()
            return False
        self._notes.add(
            f"prefix_store: computing prefixes is faster here than loading them: {1 / computing:,.0f} tokens/s, "
            f"against {1 / loading:,.0f}"
        )
        return True

    def observe(self, work: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learn from a step what computing prompts takes: from one that does little else. seconds: of all of it."""
        seconds -= self._spent_s
        self._spent_s = 0.0
        self._waits_s += seconds
        tokens = sum(len(item.token_ids) for item in work)
        prompts = sum(len(item.token_ids) for item in work if not item.decodes)
        if prompts >= max(UNIT, MOSTLY * tokens):
            self._computing.add(tokens, seconds)

    # -- keeping -----------------------------------------------------------------------------------

    def keep(self, row: RequestState, tokens: int) -> None:
        """Write what is not in the store yet of a row's first `tokens` tokens, which are in the cache."""
        started = time.perf_counter()
        names = self._names(row, min(tokens, row.prompt_tokens)) if self._writes else []
        for at, name in enumerate(names):
            with self._lock:
                waits, pending = name in self._pending, sum(self._pending.values())
            if waits or self._store.holds(name):
                continue
            if pending > PENDING:
                break
            tensors = self._model.cache.read(row.place, at * UNIT, (at + 1) * UNIT)
            with self._lock:
                self._pending[name] = sum(each.nbytes for each in tensors)
            self._writer.submit(self._put, name, Prefix(tensors, self._computing.seconds_per_token or 0.0))
        self._store.touch(names)
        self._spent_s += time.perf_counter() - started

    def _put(self, name: str, prefix: Prefix) -> None:
        try:
            if self._writes and self._store.put(name, prefix):
                self.stored_tokens += UNIT
        except OSError as error:
            self._writes = False
            self._notes.add(f"prefix_store: stopped storing prefixes: {error.strerror or flat(error)}")
        finally:
            with self._lock:
                del self._pending[name]

    def _trim(self) -> None:
        with suppress(OSError):  # whoever reads or writes there says so
            self._store.trim()

    def close(self, *, finish: bool) -> None:
        """End its threads. finish: whether what waits is still written."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=not finish)

    def about(self) -> dict[str, Any]:
        """Return counts for the statistics."""
        return {
            "loaded_tokens": self.loaded_tokens,
            "load_s": round(self.load_s, 4),
            "stored_tokens": self.stored_tokens,
            "damaged_files": self.damaged,
        }

    def _names(self, row: RequestState, tokens: int) -> list[str]:
        salt = repr(self._model.frequencies.of(row.base)) if self._model.frequencies.vary else ""
        return chained(self._root + salt.encode(), row.tokens[:tokens])


class Rate:
    """Seconds per token, measured, or as expected before that."""

    def __init__(self) -> None:
        self.tokens = 0
        self._seconds = 0.0
        self._expected: float | None = None

    def add(self, tokens: int, seconds: float) -> None:
        """Count tokens and the seconds that they took."""
        self.tokens += tokens
        self._seconds += seconds

    def expect(self, seconds_per_token: float) -> None:
        """Take a figure of another run, as long as there is none of this one."""
        self._expected = seconds_per_token or self._expected

    @property
    def seconds_per_token(self) -> float | None:
        """None if nothing is known."""
        return self._seconds / self.tokens if self.tokens else self._expected
