"""A sample of the records answered outside of our engine, and the audited runs held against it.

`verify` compares two runs of one engine, and what is wrong in both it cannot see. So some records are answered by stock
transformers generate() too, one at a time. Where the run samples with noise of its own, which generate() has not, the
model is asked token by token instead: is this the one that the record's noise draws from its distribution?
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ragspec.audit.lossless import Audit, Parting, Referee, judge, partings
from ragspec.audit.referee import ModelReferee, sampling_of
from ragspec.audit.target import Target
from ragspec.records import Failure, Request

Line = dict[str, Any]  # of a run's answers, as the benchmark's workers write them


def sample(lines: Iterable[Line], count: int, seed: int) -> list[Line]:
    """Return `count` answered lines, two at least: the longest and the shortest prompt, and a draw of the others."""
    answered = [line for line in lines if "token_ids" in line]
    ranked = sorted(answered, key=lambda line: (len(line["prompt_token_ids"]), line["id"]))
    if len(ranked) <= max(2, count):
        return answered
    drawn = random.Random(seed).sample(ranked[1:-1], max(2, count) - 2)
    chosen = {line["id"] for line in (ranked[0], *drawn, ranked[-1])}
    return [line for line in answered if line["id"] in chosen]


def greedy(target: Target, lines: Sequence[Line]) -> tuple[list[Line], list[str]]:
    """Return the greedy ones of `lines` as stock generate() answers them, and what it could not answer."""
    asked = [line for line in lines if line["sampling"]["temperature"] == 0]
    requests = [
        Request(place, line["id"], line["prompt_token_ids"], sampling_of(line["sampling"]))
        for place, line in enumerate(asked)
    ]
    answered, failed = [], []
    for outcome in target.answers(requests):
        line = asked[outcome.index]
        if isinstance(outcome, Failure):
            failed.append(f"{line['id']}: {outcome.message}")
        else:
            answered.append({**line, "token_ids": outcome.token_ids})
    return answered, failed


def compare(
    reference: Sequence[Line], run: Iterable[Line], referee: Callable[[], Referee], audit: Audit
) -> list[Parting]:
    """Count in `audit` how `run` differs from the reference's answers; return the partings that are bugs."""
    names = {line["id"] for line in reference}
    found = partings(reference, [line for line in run if line["id"] in names], audit)
    return [parting for parting in found if not audit.add(judge(parting, referee))]


def compare_draws(lines: Iterable[Line], referee: ModelReferee, audit: Audit) -> list[Parting]:
    """Count in `audit` whether sampled answers are, token by token, what their noise draws from the model.

    A record is a bug at its first token that is more than rounding away, a tie where others are only rounding away.
    Returns the partings that are bugs.
    """
    bugs = []
    for line in lines:
        last = None
        for parting in _misses(line, referee):
            last = judge(parting, lambda: referee)
            if not last.tie:
                bugs.append(parting)
                break
        if last is None:
            audit.identical += 1
        else:
            audit.add(last)
    return bugs


def _misses(line: Line, referee: ModelReferee) -> Iterator[Parting]:
    """Yield the tokens of an answer that are not those the model and the record's noise choose after what precedes."""
    prompt, answer = line["prompt_token_ids"], line["token_ids"]
    chosen = referee.choices(line["id"], prompt, answer, sampling_of(line["sampling"]))
    for at, (own, theirs) in enumerate(zip(chosen, answer, strict=True)):
        if own != theirs:
            yield Parting(line["id"], at, own, theirs, prompt, answer[:at], line["sampling"])
