"""Scores of an answer against its references, citation scores, and bootstrap intervals of their means.

exact_match and f1 are SQuAD's (Rajpurkar et al. 2016, arXiv:1606.05250): without case, punctuation and English
articles; f1 is over words. SQuAD's script removes ASCII's punctuation only, these all of Unicode's too (curly quotes,
dashes), so scores of texts that have it may differ from the script's. In scripts without spaces (Chinese, Japanese,
Thai) every character is a word, as in MLQA's evaluation. rougeL is rouge-score's, whose words are Latin letters and
digits only. Intervals are percentile bootstraps over records (Efron and Tibshirani 1993), paired as in Koehn 2004.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ragspec.inputs.passages import NAMES

DRAWS = 2000
SEED = 0
LEVEL = 95  # per cent


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` records with its interval; no interval for a single record.

    exact: a count of these records, which says nothing about others; its interval has no width.
    """

    mean: float
    low: float | None
    high: float | None
    count: int
    exact: bool = False

    def formatted(self, *, sign: bool = False) -> str:
        """Return it as text: -0.4 (-1.9 to +1.0)."""
        form = "+.1f" if sign else ".1f"
        interval = "" if self.low is None or self.exact else f" ({self.low:{form}} to {self.high:{form}})"
        return f"{self.mean:{form}}{interval}"

    def to_json(self) -> dict[str, float | int | None]:
        """Return it as a JSON object."""
        low, high = (None if end is None else round(end, 4) for end in (self.low, self.high))
        return {"mean": round(self.mean, 4), "low": low, "high": high, "count": self.count}


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values, or of paired differences, with its 95% interval; None for no values."""
    if not values:
        return None
    given = np.asarray(values, dtype=float)
    if len(given) == 1:
        return Estimate(float(given[0]), None, None, 1)
    chance = np.random.default_rng(SEED)
    means = [given[chance.integers(len(given), size=len(given))].mean() for _ in range(DRAWS)]
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Estimate(float(given.mean()), float(low), float(high), len(given))


# -- scores ----------------------------------------------------------------------------------------
# Between 0 and 1; of several references, the best one counts.
ARTICLES = frozenset(("a", "an", "the"))
# CJK, kana, Thai, Lao, Khmer, Myanmar
SINGLE_CHARACTER_WORDS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ffff]"
)


def words(text: str) -> list[str]:
    """Return the normalised words that scores compare."""
    plain = "".join("" if _is_punctuation(char) else char for char in text.lower())
    return [word for word in SINGLE_CHARACTER_WORDS.sub(r" \g<0> ", plain).split() if word not in ARTICLES]


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char)[0] == "P"


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the answer equals a reference, word for word, else 0.0."""
    own = words(answer)
    return float(any(own == words(reference) for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of the answer's words."""
    own = words(answer)
    return max((_overlap(own, words(reference)) for reference in references), default=0.0)


def _overlap(own: list[str], other: list[str]) -> float:
    if not own or not other:
        return float(own == other)
    same = sum((Counter(own) & Counter(other)).values())
    return 2 * same / (len(own) + len(other))


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return ROUGE-L's F measure, with stemming (Lin 2004)."""
    score = _scorer()
    return max((score(reference, answer)["rougeL"].fmeasure for reference in references), default=0.0)


def has_rouge() -> bool:
    """Return whether rouge-score is installed."""
    return find_spec("rouge_score") is not None


@lru_cache(maxsize=1)
def _scorer() -> Callable[[str, str], Any]:
    from rouge_score.rouge_scorer import RougeScorer

    score: Callable[[str, str], Any] = RougeScorer(["rougeL"], use_stemmer=True).score
    return score


# -- citations -------------------------------------------------------------------------------------
NUMBERS = re.compile(r"\[(\d+(?:\s*[,;]\s*\d+)*)\]")  # [1], [2, 3]
FIELDS = ("citations", "sources", "cited", "passages")  # of a structured answer, with passage ids
ID_NAMES = ("passage", *NAMES["id"])  # of the id, where a citation is an object: {"id": "d7", "quote": "..."}


def cited(text: str, parsed: Any, contexts: Sequence[str]) -> set[str] | None:
    """Return the ids of the passages that an answer cites, by number in its text or by id in its fields.

    None if the answer cites nothing and has no such field. contexts: passage ids in the prompt's order. A number
    without a passage counts as a wrong id.
    """
    if isinstance(parsed, dict):
        found = [parsed[field] for field in FIELDS if field in parsed]
        return set(_ids(found)) if found else None
    return numbered(text, contexts) or None


def numbered(text: str, contexts: Sequence[str]) -> set[str]:
    """Return the ids of the passages whose numbers are in brackets in a text."""
    numbers = {int(number) for group in NUMBERS.findall(text) for number in re.split(r"[,;]", group)}
    return {contexts[number - 1] if 0 < number <= len(contexts) else f"[{number}]" for number in numbers}


def _ids(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _ids(each)
    elif isinstance(value, dict):
        yield from _ids(next((value[name] for name in ID_NAMES if name in value), None))
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def precision(own: set[str], gold: set[str]) -> float:
    """Return the share of cited passages that are gold."""
    return len(own & gold) / len(own) if own else 0.0


def recall(own: set[str], gold: set[str]) -> float:
    """Return the share of gold passages that are cited."""
    return len(own & gold) / len(gold)
