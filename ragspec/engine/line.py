"""What a step costs in an engine that can be watched, not probed: seconds = a + b x tokens, fitted as it runs. Pure."""

from __future__ import annotations

FADE = 0.98  # weight of the past at each observation
LEAN = 64.0  # squared tokens of spread in the observations, at which the fitted slope counts half
PRIOR_TOKENS = 16.0  # tokens that cost as much as a step does at least


class LineCost:
    """A StepCost without probing. Limit: one line; rows and the cache's length are in it by the past fading."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # mean
        self._seconds = 0.0  # mean
        self._spread = 0.0  # of tokens, weighted sum of squares
        self._together = 0.0  # of tokens and seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step of `tokens`. One that was interrupted by something else counts little."""
        if self._weight:
            expected = self(tokens)
            seconds = min(2 * expected, max(expected / 2, seconds))
        self._weight = FADE * self._weight + 1
        off, late = tokens - self._tokens, seconds - self._seconds
        self._tokens += off / self._weight
        self._seconds += late / self._weight
        self._spread = FADE * self._spread + off * (tokens - self._tokens)
        self._together = FADE * self._together + off * (seconds - self._seconds)

    def __call__(self, tokens: int, rows: int = 0, reach: int = 0) -> float:
        """Return seconds for `tokens` in all; in some unit of its own before it has seen a step."""
        if not self._weight:
            return PRIOR_TOKENS + tokens
        slope = self.marginal()
        return max(self._seconds + slope * (tokens - self._tokens), slope * tokens, self._seconds / 8)

    def marginal(self, tokens: int = 0, reach: int = 0) -> float:
        """Return seconds that a token more costs."""
        prior = self._seconds / (PRIOR_TOKENS + self._tokens)
        return max(0.0, (self._together + LEAN * prior) / (self._spread + LEAN))
