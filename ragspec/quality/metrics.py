"""Scores of one answer against its references: the best of them counts. All are between 0 and 1.

exact_match and f1 are SQuAD's (Rajpurkar et al. 2016, arXiv:1606.05250): without case, punctuation and English
articles; f1 is over words. Where a script has no spaces (Chinese, Japanese, Thai), every character is a word, as in
MLQA's evaluation. rougeL is rouge-score's, whose words are Latin letters and digits only.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

ARTICLES = frozenset(("a", "an", "the"))
# characters that are words by themselves: CJK, kana, Thai, Lao, Khmer, Myanmar
ALONE = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ffff]"
)


def words(text: str) -> list[str]:
    """Return the words that scores compare."""
    plain = "".join("" if _is_punctuation(char) else char for char in text.lower())
    return [word for word in ALONE.sub(r" \g<0> ", plain).split() if word not in ARTICLES]


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char)[0] == "P"


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer is one of the references, word for word, else 0."""
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
