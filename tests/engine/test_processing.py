"""Processors of many requests at once: the bits of transformers' own, one request and one position after another."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from ragspec.engine.processing import Positions, processed
from ragspec.engine.scheduler import new_row
from ragspec.models.logits_processors import GenerationRules, Processors
from ragspec.records import Request, Sampling
from tests.engine.test_engine import loaded  # noqa: F401

VOCABULARY = 400
SETTINGS = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    {"logit_bias": ((3, 2.0), (7, -4.0)), "presence_penalty": 0.4},
    {"min_new_tokens": 6, "presence_penalty": 0.4},  # reads the number of tokens
]


@pytest.fixture
def rules(loaded, tiny):  # noqa: F811
    return GenerationRules(loaded(tiny)[0].inner, frozenset({2}), 0)


def row_of(rules, rng, index, asked):
    """Return a row in the middle of its answer, of few tokens so that many come several times."""
    some = partial(rng.choices, range(rng.choice([5, 60, VOCABULARY])))
    prompt = some(k=rng.randrange(1, 40))
    row = new_row(Request(index, f"q{index}", prompt, Sampling(max_new_tokens=30, **asked, seed=index)))
    row.tokens += some(k=rng.choice([0, 1, 12]))
    row.processors = rules.processors(row.request.sampling, len(prompt))
    return row


def one_by_one(logits, asked):
    """Return what every processor makes of every position alone."""
    found, at = [], 0
    for row, draft, first in asked:
        for upto in range(first, len(draft) + 1):
            scores, ids = logits[at : at + 1], torch.tensor([[*row.tokens, *draft[:upto]]])
            for processor in () if row.processors is None else row.processors._processors:  # noqa: SLF001
                scores = processor(ids, scores)
            found.append(scores)
            at += 1
    return torch.cat(found)


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_requests_is_processed_as_each_alone(rules, seed):
    rng = random.Random(seed)
    kinds = rng.choices(SETTINGS, k=rng.choice([1, 2, 4]))
    asked = []
    for index in range(rng.randrange(1, 9)):
        row = row_of(rules, rng, index, rng.choice(kinds))
        draft = rng.choices(range(VOCABULARY), k=rng.randrange(6))
        asked.append(Positions(row, draft, rng.choice([0, 0, len(draft)])))
    logits = torch.randn(sum(each.size for each in asked), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    for _ in range(2):  # what rows remember of their texts is right the second time too
        assert torch.equal(processed(logits, asked), one_by_one(logits, asked))
        assert torch.equal(logits, before)
        for row, *_ in asked:
            row.tokens += rng.choices(range(VOCABULARY), k=rng.randrange(4))


def test_rows_of_the_same_settings_are_processed_at_once(rules, monkeypatch):
    rng, calls = random.Random(0), []
    together = Processors.together

    def counted(self, logits, texts):
        calls.append(len(logits))
        return together(self, logits, texts)

    monkeypatch.setattr(Processors, "together", counted)
    rows = [row_of(rules, rng, index, SETTINGS[4]) for index in range(5)]
    processed(torch.randn(15, VOCABULARY), [Positions(row, [1, 2]) for row in rows])
    assert calls == [15]


def test_what_reads_lengths_is_processed_alone(rules):
    sampling = Sampling(max_new_tokens=9)
    joins = {
        key: rules.processors(replace(sampling, **{key: value}), 5).join
        for key, value in {"min_new_tokens": 4, "presence_penalty": 0.5, "repetition_penalty": 1.5}.items()
    }
    assert joins == {"min_new_tokens": False, "presence_penalty": True, "repetition_penalty": True}
