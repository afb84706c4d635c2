"""What a token's chances are, by transformers' own processors: what the engine's answers are compared with."""

import torch


def penalise(logits, penalty, seen):
    """Return logits (n, vocab) with the repetition penalty of each row's `seen` tokens. Source: arXiv:1909.05858."""
    if penalty == 1.0:
        return logits
    from transformers import RepetitionPenaltyLogitsProcessor

    processor = RepetitionPenaltyLogitsProcessor(penalty)
    rows = zip(logits, seen, strict=True)
    return torch.cat([processor(torch.tensor([ids], device=row.device), row[None]) for row, ids in rows])


def probabilities(logits, sampling):
    """Return (n, vocab) in float64: temperature, top-k, top-p, min-p, softmax. temperature must be over 0."""
    for warper in warpers_of(sampling):
        logits = warper(None, logits)
    return torch.softmax(logits.double(), dim=-1)


def warpers_of(sampling):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
