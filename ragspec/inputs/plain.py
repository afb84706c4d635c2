"""What a table's values are in JSON: `plain(datetime(2024, 5, 1)) == "2024-05-01T00:00:00"`.

decimals: their digits, as text. dates, times, timestamps: ISO 8601. durations: seconds. bytes: base64. NaN and
infinities: null. uuids: their usual text. maps: lists of pairs, as pyarrow has them.
"""

from __future__ import annotations

import base64
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def plain(value: Any) -> Any:
    """Return `value` as JSON has it. Raises TypeError for what has no such form."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "isoformat"):  # pandas' timestamps, of nanoseconds
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__}")
