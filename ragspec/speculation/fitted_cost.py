"""What a step costs in an engine that can be watched but not probed: a Cost (cost.py) fitted while it runs.

    seconds = a + b x rows + c x draft tokens

Rows are counted apart from drafts, because a row's own token also pays for reading its keys and values. Pure.
"""

from __future__ import annotations

FADE = 0.98  # weight of the past at each observation
RIDGE_ROWS = 64.0  # squared rows of spread in the observations, at which the fitted slope counts half
RIDGE_DRAFTS = 512.0  # the same for draft tokens: the prior is good, and steps are few and noisy
PRIOR_TOKENS = 16.0  # tokens that cost as much as the step itself, before anything is known


class FittedCost:
    """A Cost by fading least squares. Limit: it is linear, and knows the cache's length only because the past fades."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._drafts = self._seconds = 0.0  # means
        self._spread_rows = self._spread_drafts = self._common = 0.0  # weighted sums of products, about the means
        self._rows_seconds = self._drafts_seconds = 0.0
        self._slopes = (0.0, 0.0)

    def observe(self, tokens: int, rows: int, seconds: float) -> None:
        """Learn from a step of `tokens` on `rows` rows. One that something else interrupted is clipped."""
        if self._weight:
            expected = self(tokens, rows)
            seconds = min(2 * expected, max(expected / 2, seconds))
        self._weight = FADE * self._weight + 1
        row, draft, late = rows - self._rows, tokens - rows - self._drafts, seconds - self._seconds  # from the means
        self._rows += row / self._weight
        self._drafts += draft / self._weight
        self._seconds += late / self._weight
        late = seconds - self._seconds
        self._spread_rows = FADE * self._spread_rows + row * (rows - self._rows)
        self._spread_drafts = FADE * self._spread_drafts + draft * (tokens - rows - self._drafts)
        self._common = FADE * self._common + row * (tokens - rows - self._drafts)
        self._rows_seconds = FADE * self._rows_seconds + row * late
        self._drafts_seconds = FADE * self._drafts_seconds + draft * late
        self._slopes = self._fit()

    def _fit(self) -> tuple[float, float]:
        """Return seconds per row and per draft token: least squares with a prior (ridge regression)."""
        prior = self._seconds / (PRIOR_TOKENS + self._rows + self._drafts)
        rows, drafts = self._spread_rows + RIDGE_ROWS, self._spread_drafts + RIDGE_DRAFTS
        by_rows, by_drafts = self._rows_seconds + RIDGE_ROWS * prior, self._drafts_seconds + RIDGE_DRAFTS * prior
        determinant = rows * drafts - self._common**2
        per_row = (by_rows * drafts - by_drafts * self._common) / determinant
        per_draft = (by_drafts * rows - by_rows * self._common) / determinant
        return max(0.0, per_row), max(0.0, per_draft)

    def __call__(self, tokens: int, rows: int, reach: int = 0) -> float:
        """Return seconds for `tokens` in all on `rows` rows; in some unit of its own before it has seen a step."""
        if not self._weight:
            return PRIOR_TOKENS + tokens
        per_row, per_draft = self._slopes
        drafts = tokens - rows
        line = self._seconds + per_row * (rows - self._rows) + per_draft * (drafts - self._drafts)
        return max(line, per_row * rows + per_draft * drafts, self._seconds / 8)

    def marginal(self, tokens: int = 0, reach: int = 0) -> float:
        """Return seconds that one more draft token costs."""
        return self._slopes[1]
