"""The drafters `context` and `prompt_lookup` in C++ (native.cpp): the drafts of all rows of a step in one call.

    >>> row = native_lookup(1, 3).open([5, 6, 7, 5, 6])
    >>> row.propose(3).token_ids
    [7, 5, 6]

Drafts are equal to those of context.py and prompt_lookup.py, which say what they are and draft where nothing can be
compiled. Limit: one thread; a call computes for all rows in turn.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import astuple
from functools import cache, cached_property
from math import ceil, exp, log
from pathlib import Path
from struct import pack
from typing import Any, overload

import numpy as np

from ragspec.host.compiler import Unbuilt, build_library
from ragspec.speculation.draft_length import break_even
from ragspec.speculation.drafters import calibration, context, ngram_index
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import Calibration
from ragspec.speculation.step_cost import Cost, costs_of

SOURCE = Path(__file__).with_suffix(".cpp")
OPTIONS = ("-ffp-contract=off",)  # sums and products are rounded one by one, as Python's are
LARGEST_SHARED = 4  # tokens of an n-gram of other records' texts
QUEUED = 8192  # numbers that wait for the next call: tokens of answers, and two more for each row
MOST_UNINDEXED = 48  # tokens of a text that wait to be indexed
BINS = 10
LONGEST_CHAIN = ceil(log(ngram_index.LEAST_ACCEPTANCE) / -log(1 + exp(-calibration.SURE))) + 1
CONSTANTS: dict[str, float | list[int]] = {
    "int KEPT": ngram_index.KEPT,
    "int LONGEST_MATCH": ngram_index.LONGEST_MATCH,
    "int LARGEST_SHARED": LARGEST_SHARED,
    "int MOST_UNINDEXED": MOST_UNINDEXED,
    "int SURE_LENGTH": context.SURE,
    "int MOST_ORIGINS": calibration.MOST_ORIGINS,
    "int LONGEST_START": calibration.LONGEST_START,
    "int DEEPEST": calibration.DEEPEST,
    "int LENGTH_BUCKETS": len(calibration.LENGTHS),
    "int LONGEST_BUCKET": calibration.LENGTHS[-1],
    "int BUCKETS[]": [calibration.length_bucket(length) for length in range(calibration.LENGTHS[-1] + 1)],
    "double MAJORITY": calibration.SHARES[0],
    "double UNANIMITY": calibration.SHARES[1],
    "double PACE": calibration.PACE,
    "double SLOWEST": calibration.SLOWEST,
    "double SURE": calibration.SURE,
    "double LEAST_ERROR": calibration.LEAST_ERROR,
}
SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "ragspec_drafter": ([c_int, c_int, c_int, c_int64, c_void_p, c_void_p], c_void_p),
    "ragspec_drafter_free": ([c_void_p], None),
    "ragspec_drafter_open": ([c_void_p, c_void_p, c_int64, c_void_p, c_int64], c_int64),
    "ragspec_drafter_extend": ([c_void_p, c_void_p, c_int64], c_int64),
    "ragspec_drafter_close": ([c_void_p, c_int64, c_int], c_int64),
    "ragspec_drafter_settle": ([c_void_p], c_int64),
    "ragspec_drafter_propose": ([*[c_void_p] * 2, c_int64, c_int64, c_double, *[c_void_p] * 4], c_int64),
    "ragspec_drafter_allocate": ([*[c_void_p] * 2, c_int64, c_void_p, *[c_double] * 2, *[c_void_p] * 3], c_int64),
    "ragspec_drafter_state": ([c_void_p, c_void_p], None),
}


def library() -> ctypes.CDLL:
    """Return the compiled drafters, built unless they are cached. Raises Unbuilt."""
    found = built_or_why_not()
    if isinstance(found, str):
        raise Unbuilt(found)
    return found


@cache
def built_or_why_not() -> ctypes.CDLL | str:
    """Return the library, or why there is none, so that a compiler that fails is asked once."""
    constants = "".join(f"constexpr {name} = {_in_cpp(value)};\n" for name, value in CONSTANTS.items())
    try:
        built = build_library(constants + SOURCE.read_text(encoding="utf-8"), OPTIONS, keep_lock=True)
    except Unbuilt as reason:
        return str(reason)
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(built, name)
        function.argtypes, function.restype = arguments, result
    return built


def _in_cpp(value: float | list[int]) -> str:
    return repr(value).replace("[", "{").replace("]", "}")


def native_context(isolate: bool = False) -> NativeDrafter:
    """Return ContextDrafter in C++. Raises Unbuilt."""
    shared = 0 if isolate else context.SHARED_TOKENS
    return NativeDrafter(1, 3, Calibration(context.PRIOR_LOG_ODDS), shared=shared, votes=True)


def native_lookup(smallest: int = 1, largest: int = 3) -> NativeDrafter:
    """Return PromptLookup in C++. Raises Unbuilt."""
    return NativeDrafter(smallest, max(smallest, largest), Calibration(), shared=0, votes=False)


def _address(values: array[Any] | np.ndarray) -> int:
    return values.buffer_info()[0] if isinstance(values, array) else int(values.ctypes.data)


class NativeDrafter:
    """A drafter in C++ with drafts for all rows at once. Tokens of answers wait for the next call that needs them.

    Args:
        smallest: Tokens of the shortest n-gram of a row.
        largest: Tokens of the longest.
        priors: What its calibration starts from.
        shared: Tokens of other records that it keeps; 0: none.
        votes: Whether all matches vote; else the longest drafts.

    Raises:
        Unbuilt: It cannot be compiled here.
    """

    def __init__(self, smallest: int, largest: int, priors: Calibration, *, shared: int, votes: bool) -> None:
        self._calls = library()
        matches, vote_priors = array("d", priors.match_priors()), array("d", priors.vote_priors())
        self._drafter = self._calls.ragspec_drafter(
            smallest, largest, votes, shared, _address(matches), _address(vote_priors)
        )
        _checked(-1 if self._drafter is None else 0)
        weakref.finalize(self, self._calls.ragspec_drafter_free, self._drafter)
        self.calibration = NativeCalibration(self)
        self.dropped: list[int] = []  # rows that ended unfinished
        self.waiting: list[int] = []  # a row, how many tokens it emitted, and they; then the next row's

    def open(self, prompt: Sequence[int], passages: Sequence[tuple[int, int]] = ()) -> NativeRow:
        """Return the drafter of one record."""
        tokens = pack(f"{len(prompt)}i", *prompt)
        spans = array("q", [edge for passage in passages for edge in slice(*passage).indices(len(prompt))[:2]])
        call = self._calls.ragspec_drafter_open
        return NativeRow(self, _checked(call(self._drafter, tokens, len(prompt), _address(spans), len(spans) // 2)))

    def propose_all(self, rows: Sequence[NativeRow], limits: Sequence[int]) -> DraftBatch:
        """Return the drafts of several rows of this drafter, each of at most `limits[i]` tokens."""
        self.catch_up()
        longest = max(0, min(max(limits, default=0), LONGEST_CHAIN))
        most = len(rows) * longest
        tokens, sources = np.empty(most, np.int32), np.empty(most, np.int32)
        acceptance, counts = np.empty(most), np.empty(len(rows), np.int64)
        asked = pack(f"{2 * len(rows)}q", *[row.handle for row in rows], *limits)
        least = max(ngram_index.LEAST_ACCEPTANCE, self.calibration.least)
        total = _checked(
            self._calls.ragspec_drafter_propose(
                *(self._drafter, asked, len(rows), longest, least),
                *(_address(tokens), _address(acceptance), _address(sources), _address(counts)),
            )
        )
        return DraftBatch(tokens[:total], acceptance[:total], sources[:total], counts)

    def settle(self) -> None:
        """Index the answers' tokens, which drafts look through one by one until then."""
        self.catch_up()
        _checked(self._calls.ragspec_drafter_settle(self._drafter))

    def close(self, row: int) -> None:
        """Share the row's answer with others, and release it."""
        self.catch_up()
        _checked(self._calls.ragspec_drafter_close(self._drafter, row, 1))

    def catch_up(self) -> None:
        """Learn from the tokens that wait, and release rows that ended unfinished."""
        if self.waiting:
            queue = pack(f"{len(self.waiting)}i", *self.waiting)
            self.waiting.clear()
            _checked(self._calls.ragspec_drafter_extend(self._drafter, queue, len(queue) // 4))
        while self.dropped:
            _checked(self._calls.ragspec_drafter_close(self._drafter, self.dropped.pop(), 0))

    def state(self) -> list[float]:
        """Return the trials and hits of its guesses, and sums of estimates and of hits in each of BINS bins."""
        self.catch_up()
        found: array[float] = array("d", bytes(8 * (2 + 2 * BINS)))
        self._calls.ragspec_drafter_state(self._drafter, _address(found))
        return found.tolist()


def _checked(result: int) -> int:
    if result < 0:
        raise MemoryError("drafting")
    return result


class NativeRow:
    """Drafts for one record. handle: the row's number in C++; -1 once it is closed."""

    __slots__ = ("_drafter", "_waiting", "handle")

    def __init__(self, drafter: NativeDrafter, handle: int) -> None:
        self.handle = handle
        self._drafter = drafter
        self._waiting = drafter.waiting

    def propose(self, limit: int) -> Draft:
        """Return the draft of this row alone."""
        return self._drafter.propose_all([self], [limit])[0]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Queue the emitted tokens."""
        if self.handle >= 0:
            waiting = self._waiting
            waiting += self.handle, len(token_ids)
            waiting.extend(token_ids)
            if len(waiting) > QUEUED:
                self._drafter.catch_up()

    def close(self) -> None:
        """Share the finished answer with other rows."""
        if self.handle >= 0:
            handle, self.handle = self.handle, -1
            self._drafter.close(handle)

    def __del__(self) -> None:
        if self.handle >= 0:
            self._drafter.dropped.append(self.handle)


class NativeCalibration:
    """What calibration.Calibration says of itself, from C++. least: probability below which a chain is useless."""

    def __init__(self, drafter: NativeDrafter) -> None:
        self.least = 0.0
        self._drafter: NativeDrafter = weakref.proxy(drafter)

    @property
    def trials(self) -> int:
        """Guesses compared with the target's tokens."""
        return int(self._drafter.state()[0])

    @property
    def hits(self) -> int:
        """Guesses that were right."""
        return int(self._drafter.state()[1])

    @property
    def error(self) -> float | None:
        """Return the expected calibration error, as Calibration.error."""
        trials, _, *sums = self._drafter.state()
        if not trials:
            return None
        distances = [abs(predicted - hits) for predicted, hits in zip(sums[:BINS], sums[BINS:], strict=True)]
        return sum(distances) / trials


class DraftBatch(Sequence[Draft]):
    """The drafts of several rows in flat arrays, one row after the other; lists are made of what is kept.

    Attributes:
        acceptance: Cumulative acceptance of all tokens, float64.
        counts: Tokens of each row.
    """

    def __init__(self, tokens: np.ndarray, acceptance: np.ndarray, sources: np.ndarray, counts: np.ndarray) -> None:
        self._tokens = tokens
        self.acceptance = acceptance
        self._sources = sources  # -1: none
        self.counts = counts

    def paying(self, cost: Cost, reach: int, prefill_tokens: int = 0) -> list[Draft]:
        """Return the drafts cut to what pays, as draft_length.allocate() has it."""
        rows, total = len(self.counts), len(self._tokens)
        least_rate, token_s = break_even(rows, cost, reach, prefill_tokens)
        costs = np.ascontiguousarray(costs_of(cost, rows + 1, rows + total, rows, reach), np.float64)
        lengths, kept = np.empty(rows, np.int64), np.empty(total, np.int32)
        count = _checked(
            library().ragspec_drafter_allocate(
                *(_address(self.acceptance), _address(self.counts), rows, _address(costs)),
                *(least_rate, -1.0 if token_s is None else token_s),
                *(_address(self._tokens), _address(lengths), _address(kept)),
            )
        )
        return self._lists(kept[:count], lengths)

    def cut(self, lengths: np.ndarray) -> list[Draft]:
        """Return the drafts with `lengths[i]` tokens each, at most as many as they have."""
        ends = np.cumsum(self.counts)
        kept = np.arange(len(self._tokens)) < np.repeat(ends - self.counts + lengths, self.counts)
        return self._lists(self._tokens[kept], lengths)

    def _lists(self, kept: np.ndarray, lengths: np.ndarray) -> list[Draft]:
        """Return drafts of `lengths[i]` tokens each, which `kept` has one row after the other."""
        ids, empty, at, start = kept.tolist(), Draft(), 0, 0
        drafts: list[Draft] = []
        for length, count in zip(lengths.tolist(), self.counts.tolist(), strict=True):
            if length:
                end = start + length
                drafts.append(KeptDraft(self, at, ids[start:end]))
                start = end
            else:
                drafts.append(empty)
            at += count
        return drafts

    def details(self, start: int, count: int) -> tuple[list[float], list[int | None]]:
        """Return the cumulative acceptance and the sources of `count` tokens from the batch's token `start` on."""
        places = self._sources[start : start + count].tolist()
        return self.acceptance[start : start + count].tolist(), [None if place < 0 else place for place in places]

    @cached_property
    def _drafts(self) -> list[Draft]:
        return self.cut(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Draft: ...

    @overload
    def __getitem__(self, index: slice) -> list[Draft]: ...

    def __getitem__(self, index: int | slice) -> Draft | list[Draft]:
        return self._drafts[index]


class KeptDraft(Draft):
    """A draft of a batch. What is not needed to verify it becomes lists when it is asked for.

    batch, start: where its tokens are. token_ids: those of them that are kept.
    """

    __slots__ = ("_batch", "_start")

    def __init__(self, batch: DraftBatch, start: int, token_ids: list[int]) -> None:
        self._batch = batch
        self._start = start
        self.token_ids = token_ids
        self.probabilities = None

    def __getattr__(self, name: str) -> Any:
        """Fill the lists that are not there yet."""
        if name not in ("cumulative_acceptance", "sources"):
            raise AttributeError(name)
        self.cumulative_acceptance, self.sources = self._batch.details(self._start, len(self.token_ids))
        return getattr(self, name)

    def __eq__(self, other: object) -> bool:
        """Return whether two drafts have the same fields."""
        return isinstance(other, Draft) and astuple(self) == astuple(other)

    __hash__ = None  # type: ignore[assignment]
