"""Whether stock generate() is any faster with its speculation: the first records are answered both ways."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragspec.speculation.savings import Savings

RECORDS, MOST = 2, 4  # compared at least, and where so few do not tell


@dataclass(slots=True)
class Comparison:
    """Tokens and seconds of the same records, with drafts and without."""

    method: str
    records: int = 0
    tokens: int = 0
    drafted_s: float = 0.0
    plain_tokens: int = 0
    plain_s: float = 0.0
    savings: Savings = field(default_factory=Savings)

    @property
    def done(self) -> bool:
        """Whether enough were compared."""
        low, high = self.savings.interval
        return self.records >= MOST or (self.records >= RECORDS and (self.slower or low > 1 or high < 1))

    def add(self, tokens: int, drafted_s: float, plain_tokens: int, plain_s: float) -> None:
        """Take in a record's answer both ways. Sampled ones need not be of one length."""
        self.records += 1
        self.tokens += tokens
        self.drafted_s += drafted_s
        self.plain_tokens += plain_tokens
        self.plain_s += plain_s
        if tokens and plain_tokens:
            self.savings.add(plain_s / plain_tokens * tokens, drafted_s)

    @property
    def slower(self) -> bool:
        """Whether plain decoding is the faster one, beyond what may be chance in so few records."""
        return self.savings.interval[1] < 1

    def note(self, remedy: str) -> str:
        """Return what to tell the user where speculation is slower. remedy: what is done, or can be, about it."""
        drafted, plain = self.tokens / self.drafted_s, self.plain_tokens / self.plain_s
        return (
            f"{self.method} is slower than plain decoding here: {drafted:.1f} tokens/s against {plain:.1f} (stock "
            f"generate(), the first {self.records} records both ways); {remedy}"
        )
