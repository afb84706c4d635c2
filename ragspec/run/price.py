"""Prices and budgets as users write them: "2.5/h", "$0.3/kWh@150W", "0.6/Mtok"; "2h", "$5", "1Mtok".

>>> Price.of("$2.50/h").money(seconds=7200, tokens=0)
5.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragspec.errors import ConfigError

SIGN = r"(?P<sign>[$€£¥]?)"
NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
PRICE = re.compile(rf"{SIGN}\s*{NUMBER}\s*/\s*(h|kWh|Mtok)(?:@{NUMBER}W)?", re.IGNORECASE)
AMOUNT = re.compile(rf"{SIGN}\s*{NUMBER}\s*(?P<unit>s|m|min|h|d|ktok|Mtok|tok)?", re.IGNORECASE)
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
TOKENS = {"tok": 1, "ktok": 1000, "mtok": 1_000_000}
FORMS = "2.5/h, 0.3/kWh@150W (with the machine's power) or 0.6/Mtok"


@dataclass(frozen=True, slots=True)
class Price:
    """A price of `amount` per hour, kilowatt-hour (at `watts`), or million tokens of prompts and answers."""

    text: str
    amount: float
    unit: Literal["h", "kwh", "mtok"]
    watts: float = 0.0
    sign: str = ""

    @classmethod
    def of(cls, text: str) -> Price:
        """Return the price that `--price` was given. Raises ConfigError."""
        found = PRICE.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f'--price: "{text}" has no known unit; write {FORMS}')
        unit = found[3].lower()
        if unit == "kwh" and found[4] is None:
            raise ConfigError(f'--price: "{text}": the power of this machine is unknown; write {text}@150W')
        if unit != "kwh" and found[4] is not None:
            raise ConfigError(f'--price: "{text}": watts belong to a price per kWh; write {FORMS}')
        return cls(text.strip(), float(found[2]), unit, float(found[4] or 0.0), found["sign"])  # type: ignore[arg-type]

    def money(self, seconds: float, tokens: float) -> float:
        """Return what so many seconds of one machine, or so many tokens, cost."""
        if self.unit == "mtok":
            return self.amount * tokens / 1e6
        hours = seconds / 3600
        return self.amount * hours * (self.watts / 1000 if self.unit == "kwh" else 1.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may use, all runs of its output together: seconds, or tokens of prompts and answers."""

    text: str
    seconds: float | None = None
    tokens: float | None = None

    @classmethod
    def of(cls, text: str, prices: Sequence[Price]) -> Budget:
        """Return the budget that `--budget` was given. Raises ConfigError."""
        found = AMOUNT.fullmatch(text.strip())
        unit = (found["unit"] or "").lower() if found else ""
        if found is None or bool(found["sign"]) == bool(unit) or not float(found[2]):
            raise ConfigError(
                f'--budget: "{text}" is not a valid budget; write a time (2h, 30m), money ($5) or tokens (1Mtok)'
            )
        amount = float(found[2])
        if unit in SECONDS:
            return cls(text, seconds=amount * SECONDS[unit])
        if unit in TOKENS:
            return cls(text, tokens=amount * TOKENS[unit])
        if len(prices) != 1:
            raise ConfigError(f"--budget {text} is an amount of money, which needs one --price: {FORMS}")
        price = prices[0]
        if price.sign and price.sign != found["sign"]:
            raise ConfigError(
                f"--budget {text} and --price {price.text} are in different currencies; write both in one"
            )
        if not price.money(3600.0, 1e6):
            raise ConfigError(f"--price {price.text}: with a price of zero, --budget {text} is never reached")
        if price.unit == "mtok":
            return cls(text, tokens=amount / price.amount * 1e6)
        return cls(text, seconds=amount / price.money(1.0, 0.0))
