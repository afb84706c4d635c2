"""Rows of an Arrow batch that nothing may read: pyarrow follows damaged offsets out of memory, which ends the process.

    >>> damaged_rows(batch)
    {2, 3}

pyarrow's own `validate(full=True)` judges a column as a whole, so one damaged row would cost those beside it. Limit:
list views, string views, unions and run-end encoding are not checked.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any


def damaged_rows(batch: Any) -> set[int]:
    """Return the rows of a record batch with an offset outside of what it points into, at any depth."""
    found: set[int] = set()
    for column in batch.columns:
        found |= _damaged(column)
    return found


def _damaged(array: Any) -> set[int]:
    """Return the places of an array that cannot be read."""
    import pyarrow
    from pyarrow import types

    kind = array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return _damaged(array.storage)
    if isinstance(array, pyarrow.DictionaryArray):
        return _not_in(array.indices, len(array.dictionary), _damaged(array.dictionary))
    if types.is_struct(kind):
        return {place for at in range(kind.num_fields) for place in _damaged(array.field(at))}
    if types.is_fixed_size_list(kind):
        rows = {place // kind.list_size - array.offset for place in _damaged(array.values)}
        return {row for row in rows if 0 <= row < len(array)}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _lists(_offsets(array, wide=types.is_large_list(kind)), len(array), array.values)
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        wide = types.is_large_string(kind) or types.is_large_binary(kind)
        data = array.buffers()[2]
        return _outside(_offsets(array, wide=wide), len(array), data.size if data else 0)
    return set()


def _not_in(indices: Any, count: int, damaged: set[int]) -> set[int]:
    """Return the places whose index is none of a dictionary's `count` entries, or a damaged one."""
    used = [index for index in indices.unique().to_pylist() if index is not None]
    wrong = {index for index in used if not 0 <= index < count or index in damaged}
    return {at for at, index in enumerate(indices.to_pylist()) if index in wrong} if wrong else set()


def _offsets(array: Any, *, wide: bool) -> Any:
    """Return the offsets of an array's places and the end of the last one; None if they are missing."""
    import pyarrow

    buffer = array.buffers()[1]
    kind = pyarrow.int64() if wide else pyarrow.int32()
    if buffer is None or buffer.size < (array.offset + len(array) + 1) * kind.byte_width:
        return None
    return pyarrow.Array.from_buffers(kind, len(array) + 1, [None, buffer], offset=array.offset)


def _outside(offsets: Any, count: int, limit: int) -> set[int]:
    """Return the places, `count` in all, that begin or end at an offset beyond `limit`, or out of order."""
    from pyarrow import compute

    if not count or offsets is None:
        return set(range(count))
    is_rising = compute.all(compute.less_equal(offsets[:-1], offsets[1:])).as_py()
    if is_rising and offsets[0].as_py() >= 0 and offsets[-1].as_py() <= limit:
        return set()
    values = offsets.to_pylist()
    within = [at for at, value in enumerate(values) if 0 <= value <= limit]
    wrong = set(range(len(values))) - set(within)
    for one, next_one in pairwise(within):
        if values[one] > values[next_one]:  # either may be the damaged one
            wrong |= {one, next_one}
    return {place for at in wrong for place in (at - 1, at) if 0 <= place < count}


def _lists(offsets: Any, count: int, items: Any) -> set[int]:
    """Return the lists whose own offsets are damaged, or one of whose items cannot be read."""
    found = _outside(offsets, count, len(items))
    unreadable = sorted(_damaged(items)) if count else []
    if unreadable and offsets is not None:
        ends = offsets.to_pylist()
        for row in set(range(count)) - found:
            first = bisect_left(unreadable, ends[row])
            if first < len(unreadable) and unreadable[first] < ends[row + 1]:
                found.add(row)
    return found
