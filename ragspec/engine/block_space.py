"""Who has the blocks of a pool that does not grow: a request takes what its tokens need, and the youngest gives way.

    >>> space = BlockSpace(cache)
    >>> work, failed = space.make_room(scheduler, work)

Blocks that finished requests left are given up first, the least recently used before others; then drafts; then the
youngest request, which is computed again later. Drafts that a model sampled go last: whether they fit depends on what
was sampled, so dropping them would bias the answer, while a request computed again samples the same draft. Source:
Kwon et al. 2023, PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.request_state import RequestState, ScheduledRequest, without_draft
from ragspec.engine.scheduler import Scheduler

WATERMARK = 0.01  # of all blocks, which no request is admitted to, so that it need not leave at once (as in vLLM)


class BlockSpace:
    """The blocks of one cache. preempted: how often a request has lost its blocks."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self.preempted = 0

    def room_beside(self, needs: Mapping[int, int]) -> int:
        """Return how many tokens a request may have to be admitted beside others. needs: their tokens, by slot."""
        spare = int(WATERMARK * self._cache.blocks) * self._cache.size if needs else 0
        return self._cache.room_beside(needs) - spare

    def make_room(
        self, scheduler: Scheduler, work: Sequence[ScheduledRequest]
    ) -> tuple[list[ScheduledRequest], RequestState | None]:
        """Return the part of a step's work that there are blocks for, and a request that does not fit even alone."""
        kept = list(work)
        while self._missing(kept) > self._cache.free:
            left, alone = scheduler.forget_oldest(), len(scheduler.rows()) == 1
            if left is not None:
                self._cache.drop(left)
            elif any(_drops(item, alone) for item in kept):
                kept = [without_draft(item) if _drops(item, alone) else item for item in kept]
            elif alone:
                return [], kept[0].row
            else:
                place, row = scheduler.preempt_youngest()
                self._cache.drop(place)
                self.preempted += 1
                kept = [item for item in kept if item.row is not row]
        return kept, None

    def make_room_for(self, scheduler: Scheduler, row: RequestState, tokens: int) -> bool:
        """Return whether there are blocks for a row's first `tokens` tokens, if finished requests give theirs up."""
        while self._cache.missing([(row.place, row.computed, tokens)]) > self._cache.free:
            left = scheduler.forget_oldest()
            if left is None:
                return False
            self._cache.drop(left)
        return True

    def _missing(self, work: Sequence[ScheduledRequest]) -> int:
        # without a call for each, as it is between steps
        return self._cache.missing([(item.row.place, item.start, item.start + len(item.token_ids)) for item in work])


def _drops(item: ScheduledRequest, alone: bool) -> bool:
    """Return whether an item's draft is dropped: one that was sampled only if no other request can give way."""
    return bool(item.draft.token_ids) and (alone or item.draft.probabilities is None)
