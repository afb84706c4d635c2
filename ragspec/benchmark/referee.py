"""Asks the model, in transformers itself and without any speculation, what it thinks of a token."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from ragspec.benchmark.lossless import Parting
from ragspec.engine.sampling import Noise, draw, penalise, probabilities
from ragspec.records import Sampling

SPLITS = (1, 4, 16)  # tokens of the last forward, after a first one that filled the cache: the shapes of decoding
LEAST = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the largest score; what one rounding may do, or LEAST_HALF
LEAST_HALF = 4e-3


class ModelReferee:
    """Computes the same logits in several shapes: their difference is this machine's noise."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def judge(self, parting: Parting) -> tuple[float, float, float]:
        """Return the shortfalls of the speculative and of the plain token, and the difference that shapes make."""
        ids = parting.prompt + parting.common
        sampling = sampling_of(parting.sampling)
        scores = [self._scores(logits, ids, sampling) for logits in self._logits(ids)]
        noise = max(float((other - scores[0]).abs().max()) for other in scores[1:])
        least = LEAST.get(self._model.dtype, LEAST_HALF) * float(scores[0].abs().max())
        assert parting.speculative is not None
        assert parting.plain is not None
        point = None
        if sampling.temperature > 0:
            point = Noise(sampling.seed, parting.id).at(parting.position) * float(scores[0][-1])
        shortfalls = [_shortfall(scores[0], token, point) for token in (parting.speculative, parting.plain)]
        return shortfalls[0], shortfalls[1], max(noise, least)

    @torch.inference_mode()
    def choices(self, name: str, prompt: list[int], answer: list[int], sampling: Sampling) -> list[int]:
        """Return what model and noise choose at each place of a sampled answer, given what precedes it."""
        if not answer:
            return []
        text = torch.tensor([prompt + answer[:-1]], device=self._model.device)
        keep = {"logits_to_keep": len(answer)} if "logits_to_keep" in signature(self._model.forward).parameters else {}
        logits = self._model(text, **keep).logits[0, -len(answer) :].float()  # (len(answer), vocab)
        seen = [prompt + answer[:at] for at in range(len(answer))]
        weights = probabilities(penalise(logits, sampling.repetition_penalty, seen), sampling)
        noise = Noise(sampling.seed, name)
        return draw(weights, [noise.at(at) for at in range(len(answer))])

    def _logits(self, ids: list[int]) -> list[torch.Tensor]:
        """Return the logits after `ids`, (vocab,) in float32, in one forward and in two of several shapes."""
        text = torch.tensor([ids], device=self._model.device)
        found = [self._model(text).logits[0, -1].float()]
        for last in SPLITS:
            if last < len(ids):
                first = self._model(text[:, :-last], use_cache=True)
                second = self._model(text[:, -last:], past_key_values=first.past_key_values, use_cache=True)
                found.append(second.logits[0, -1].float())
        return found

    def _scores(self, logits: torch.Tensor, ids: list[int], sampling: Sampling) -> torch.Tensor:
        """Return what a token is chosen by: processed logits, or the running sum of probabilities."""
        logits = penalise(logits[None], sampling.repetition_penalty, [ids])
        if sampling.temperature == 0:
            return logits[0]
        return probabilities(logits, sampling)[0].cumsum(0)


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """Return the sampling of an answer's line."""
    return Sampling(**{**settings, "stop": tuple(settings["stop"])})


def _shortfall(scores: torch.Tensor, token: int, point: float | None) -> float:
    """Return by how much `token` is not the choice: below the largest logit, or outside of where the draw fell."""
    if point is None:
        return float(scores.max() - scores[token])
    low = float(scores[token - 1]) if token else 0.0
    return max(0.0, low - point, point - float(scores[token]))
