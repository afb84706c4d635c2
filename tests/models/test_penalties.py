"""Penalties count an answer's own tokens, whatever stands before them."""

import torch

from ragspec.models.logits_processors import AnswerPenalties


def test_a_token_costs_its_presence_once_and_its_frequency_every_time():
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    before = scores.clone()
    ids = torch.tensor([[3, 3, 0, 2, 2, 0], [3, 3, 1, 1, 1, 1]])  # prompts of two tokens
    penalties = AnswerPenalties(prompt_tokens=2, presence=0.5, frequency=0.25)
    assert penalties(ids, scores).tolist() == [[0.0, 1.0, 0.0, 1.0], [1.0, -0.5, 1.0, 1.0]]
    assert torch.equal(scores, before)
    assert torch.equal(penalties(ids[:, :2], scores), before)
    assert torch.equal(penalties(ids[:, :1], scores), before)


def test_a_token_that_has_no_score_is_left_out():
    scores = torch.zeros(1, 3)
    assert AnswerPenalties(0, 1.0, 0.0)(torch.tensor([[2, 3, 9]]), scores).tolist() == [[0.0, 0.0, -1.0]]
