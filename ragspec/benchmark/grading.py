"""How good the answers of candidates are, where records have references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ragspec.benchmark.results import Quality
from ragspec.quality.evaluate import Scores, cites, differences, means, scores_of
from ragspec.quality.graded import Answers, read_graded


def graded(outputs: Mapping[str, Path], baselines: Mapping[str, str]) -> dict[str, Quality]:
    """Return the quality of each candidate; nothing where no record has a reference.

    outputs: by candidate. baselines: of those that are compared, with whom.
    """
    read: dict[str, Answers] = {}
    for name, path in outputs.items():
        answers = read_graded(str(path))
        if len(answers.without) < len(answers.graded):
            read[name] = answers
    citing = cites(*read.values())
    scores: dict[str, Scores] = {name: scores_of(answers, citing=citing) for name, answers in read.items()}
    found = {}
    for name, own in scores.items():
        other = baselines.get(name)
        apart = differences(own, scores[other]) if other in scores else {}
        found[name] = Quality(means(own), other if apart else None, apart)
    return found


def told(quality: Mapping[str, Quality]) -> Iterator[str]:
    """Yield the F1 of each candidate, and its difference from its baseline; once for those of which it is the same."""
    names: dict[str, list[str]] = {}
    for name, own in quality.items():
        apart = own.differences.get("f1")
        against = f", {apart.told(sign=True)} against {own.baseline}" if apart is not None else ""
        names.setdefault(f"F1 {own.scores['f1'].told()}{against}", []).append(name)
    for words, alike in names.items():
        yield f"{', '.join(alike)}: {words}"
