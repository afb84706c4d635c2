"""Asks the model, in transformers itself and without any speculation, what it thinks of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch

from ragspec.audit.lossless import Parting
from ragspec.engine.sampling import Noise, draw
from ragspec.models.forwards import cache_word
from ragspec.models.generation import GenerationRules
from ragspec.models.masking import Follower
from ragspec.models.rotary import forget, length_dependent, restart_length
from ragspec.records import Sampling
from ragspec.structured.grammars import Grammars

SPLITS = (1, 4, 16)  # tokens of the last forward, after a first one that filled the cache: the shapes of decoding
LEAST = {torch.float32: 1e-6, torch.float64: 1e-12}  # of the largest score; what one rounding may do, or LEAST_HALF
LEAST_HALF = 4e-3


class ModelReferee:
    """Computes the same logits in several shapes: their difference is this machine's noise.

    rules: what logits go through before a token is chosen. grammars: makes those of the model's tokenizer.
    """

    def __init__(self, model: Any, rules: GenerationRules, grammars: Callable[[], Grammars] | None = None) -> None:
        self._model = model
        self._handed = cache_word(type(model).forward)
        self._grammars = grammars
        self._rules = rules
        self._rotary = length_dependent(model)

    @torch.inference_mode()
    def judge(self, parting: Parting) -> tuple[float, float, float]:
        """Return the shortfalls of the speculative and of the plain token, and the difference that shapes make."""
        sampling = parting.sampling
        found = self._logits(parting.prompt, parting.common)
        scores = [self._scores(logits, parting, sampling) for logits in found]
        allowed = scores[0].isfinite()  # processors forbid tokens by -inf
        noise = max((float((other - scores[0])[allowed].abs().max()) for other in scores[1:]), default=0.0)
        least = LEAST.get(self._model.dtype, LEAST_HALF) * float(scores[0][allowed].abs().max())
        assert parting.speculative is not None
        assert parting.plain is not None
        point = None
        if sampling.temperature > 0:
            point = Noise(sampling.seed, parting.id).at(parting.position) * float(scores[0][-1])
        shortfalls = [_shortfall(scores[0], token, point) for token in (parting.speculative, parting.plain)]
        return shortfalls[0], shortfalls[1], max(noise, least)

    @torch.inference_mode()
    def choices(
        self, name: str, prompt: list[int], answer: list[int], sampling: Sampling, grammar: str = ""
    ) -> list[int]:
        """Return what model and noise choose at each place of a sampled answer, given what precedes it."""
        if not answer:
            return []
        if self._rotary:
            logits = torch.stack(list(self._steps(prompt, answer[:-1])))
        else:
            logits = self._forward(prompt + answer[:-1], len(answer))
        if grammar:
            follower = self._follower(grammar)
            logits = torch.stack([follower.masked(own, answer[:at]) for at, own in enumerate(logits)])
        processors = self._rules.processors(sampling, len(prompt))
        if processors is not None:
            logits = processors(logits, prompt, answer[:-1])
        noise = Noise(sampling.seed, name)
        return draw(torch.softmax(logits.double(), -1), [noise.at(at) for at in range(len(answer))])

    def _follower(self, grammar: str) -> Follower:
        """Return what holds an answer to its grammar, from its beginning."""
        assert self._grammars is not None
        return Follower(self._grammars().matcher(grammar))

    def _forward(self, ids: list[int], last: int) -> torch.Tensor:
        """Return the logits of the `last` of some tokens, (last, vocab) in float32, in one forward."""
        keep = {"logits_to_keep": last} if "logits_to_keep" in signature(self._model.forward).parameters else {}
        text = torch.tensor([ids], device=self._model.device)
        return self._model(text, **keep).logits[0, -last:].float()  # type: ignore[no-any-return]

    def _logits(self, prompt: list[int], common: list[int]) -> list[torch.Tensor]:
        """Return the logits after prompt and `common`, (vocab,), in one forward and in two of several shapes.

        Where frequencies depend on the length of the text, as generate() computes them, and no other way.
        """
        if self._rotary:
            return [list(self._steps(prompt, common))[-1]]
        ids = prompt + common
        text = torch.tensor([ids], device=self._model.device)
        found = [self._forward(ids, 1)[0]]
        for last in SPLITS:
            if last < len(ids):
                first = self._model(text[:, :-last], use_cache=True)
                second = self._model(text[:, -last:], use_cache=True, **{self._handed: first.past_key_values})
                found.append(second.logits[0, -1].float())
        return found

    def _steps(self, prompt: list[int], answer: list[int]) -> Iterator[torch.Tensor]:
        """Yield the logits, (vocab,), after the prompt and after each token of the answer, as generate() steps."""
        for module in self._rotary:
            forget(module)
        restart = restart_length(self._model)
        cache, fresh = None, prompt
        for at in range(len(answer) + 1):
            text = prompt + answer[:at]
            if at:
                fresh = answer[at - 1 : at]
            if restart is not None and at and len(text) == restart + 1:
                cache, fresh = None, text
            ids = torch.tensor([fresh], device=self._model.device)
            output = self._model(ids, use_cache=True, **{self._handed: cache})
            cache = output.past_key_values
            yield output.logits[0, -1].float()

    def _scores(self, logits: torch.Tensor, parting: Parting, sampling: Sampling) -> torch.Tensor:
        """Return what a token is chosen by: processed logits, or the running sum of probabilities."""
        if parting.grammar:
            logits = self._follower(parting.grammar).masked(logits, parting.common)
        processors = self._rules.processors(sampling, len(parting.prompt))
        if processors is not None:
            logits = processors(logits[None], parting.prompt + parting.common)[0]
        if sampling.temperature == 0:
            return logits
        return torch.softmax(logits.double(), -1).cumsum(0)


def _shortfall(scores: torch.Tensor, token: int, point: float | None) -> float:
    """Return by how much `token` is not the choice: below the largest logit, or outside of where the draw fell."""
    if point is None:
        return float(scores.max() - scores[token])
    low = float(scores[token - 1]) if token else 0.0
    return max(0.0, low - point, point - float(scores[token]))
