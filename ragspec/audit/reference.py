"""A sample of the records answered outside our engine, and the audited runs compared with it.

`verify` compares two runs of one engine, so it cannot see what is wrong in both. Some records are therefore answered by
stock transformers generate() too, one at a time. Where the run samples with its own noise, which generate() lacks, the
model is asked token by token instead: is this the one that the record's noise draws from its distribution?
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ragspec.audit.lossless import Audit, Parting, Referee, judge, partings
from ragspec.audit.referee import ModelReferee
from ragspec.audit.target import Target
from ragspec.benchmark.answers import Answer, Answers
from ragspec.records import Failure, Request


def sample(answers: Iterable[Answer], count: int, seed: int) -> list[Answer]:
    """Return `count` of the answers, two at least: the longest and the shortest prompt, and a draw of the others."""
    answers = list(answers)
    ranked = sorted(answers, key=lambda answer: (len(answer.prompt_token_ids), answer.id))
    if len(ranked) <= max(2, count):
        return answers
    drawn = random.Random(seed).sample(ranked[1:-1], max(2, count) - 2)
    chosen = {answer.id for answer in (ranked[0], *drawn, ranked[-1])}
    return [answer for answer in answers if answer.id in chosen]


def greedy(target: Target, answers: Iterable[Answer]) -> tuple[Answers, list[str]]:
    """Return the greedy ones of `answers` as stock generate() gives them, and why it could not give some."""
    asked = [answer for answer in answers if answer.sampling.temperature == 0]
    requests = [
        Request(place, answer.id, answer.prompt_token_ids, answer.sampling, grammar=answer.grammar)
        for place, answer in enumerate(asked)
    ]
    given, failed = {}, []
    for outcome in target.answers(requests):
        answer = asked[outcome.index]
        if isinstance(outcome, Failure):
            failed.append(f"{answer.id}: {outcome.message}")
        else:
            given[answer.id] = replace(answer, token_ids=outcome.token_ids)
    return Answers(given), failed


def compare(reference: Answers, run: Answers, referee: Callable[[], Referee], audit: Audit) -> list[Parting]:
    """Count in `audit` how `run` differs from the reference's answers; return the partings that are bugs."""
    same = Answers({name: answer for name, answer in run.answered.items() if name in reference.answered})
    return [parting for parting in partings(reference, same, audit) if not audit.add(judge(parting, referee))]


def compare_draws(answers: Iterable[Answer], referee: ModelReferee, audit: Audit) -> list[Parting]:
    """Count in `audit` whether sampled answers are, token by token, what their noise draws from the model.

    A record is a bug at its first token that is more than rounding away, a tie where others are only rounding away.
    Returns the partings that are bugs.
    """
    bugs = []
    for answer in answers:
        last = None
        for parting in _misses(answer, referee):
            last = judge(parting, lambda: referee)
            if not last.tie:
                bugs.append(parting)
                break
        if last is None:
            audit.identical += 1
        else:
            audit.add(last)
    return bugs


def _misses(answer: Answer, referee: ModelReferee) -> Iterator[Parting]:
    """Yield the tokens of an answer that are not those the model and the record's noise choose after what precedes."""
    prompt, ids = answer.prompt_token_ids, answer.token_ids
    chosen = referee.choices(answer.id, prompt, ids, answer.sampling, answer.grammar)
    for at, (own, theirs) in enumerate(zip(chosen, ids, strict=True)):
        if own != theirs:
            yield Parting(answer.id, at, own, theirs, prompt, ids[:at], answer.sampling, answer.grammar)
