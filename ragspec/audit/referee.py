"""Stock transformers as the audit's reference, loaded as the runner loads the model but computing without our code.

`verify` compares two runs of one engine, so it cannot see an error in both. Some records are therefore answered by
stock generate() too, one at a time. Where a run samples with its own noise, which generate() lacks, the model is asked
token by token instead whether the record's noise draws that token from its distribution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from ragspec.audit.lossless import Audit, Divergence, Referee, divergences, judge
from ragspec.benchmark.passes import Answer, Answers
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.engine.sampling import Noise, draw
from ragspec.errors import ConfigError
from ragspec.models.compat import cache_argument, forget, length_dependent, restart_length
from ragspec.models.logits_processors import GenerationRules, GrammarFollower
from ragspec.records import Failure, Generation, Request, Sampling
from ragspec.structured.grammars import Grammars

# vLLM arguments with which it computes something other than transformers does from the same checkpoint
VLLM_ONLY_ARGS = ("hf_overrides", "kv_cache_dtype", "enable_lora", "sampling_args")


class Target:
    """The loaded target model of `config`. Raises ConfigError and ModelError if transformers cannot load it.

    ran: `Runner.about()` of a run, for the dtype that vLLM chose.
    """

    def __init__(self, config: RunConfig, ran: dict[str, Any]) -> None:
        from ragspec.runners.huggingface.args import Args
        from ragspec.runners.huggingface.checkpoint import Checkpoint

        args = stock_config(config, ran).args()
        assert isinstance(args, Args)
        self._greedy = config.sampling.temperature == 0
        self._checkpoint = Checkpoint(config.model or "", args)
        self.model = self._checkpoint.load()
        self.tokenizer, self.rules = self._checkpoint.tokenizer, self._checkpoint.rules
        self.grammars = self._checkpoint.grammars

    def answers(self, requests: Sequence[Request]) -> Iterator[Generation | Failure]:
        """Yield the answers of stock generate(), one record at a time."""
        from ragspec.runners.huggingface.assisted import Speculation
        from ragspec.runners.huggingface.stock import StockBackend

        backend = StockBackend(
            self.model,
            self.tokenizer,
            self._checkpoint.ends,
            Speculation("none"),
            rows=1,
            rules=self.rules,
            greedy_by_default=self._greedy,
            grammars=self.grammars,
        )
        return backend.generate(requests)


def stock_config(config: RunConfig, ran: dict[str, Any]) -> RunConfig:
    """Return `config` for stock generate() at batch 1. Raises ConfigError if that would be another model."""
    if config.model is None:
        raise ConfigError(f"runner {config.runner} has no model that transformers could load")
    given = config.runner_args
    if config.runner == "vllm":
        given = {key: given[key] for key in given if key in ("revision", "trust_remote_code")}
        given |= {"dtype": ran.get("dtype", "auto")}
    args = {key: value for key, value in given.items() if key not in ("lookahead", "engine", "batch_size")}
    raw = config.model_dump() | {
        "runner": "huggingface",
        "speculation": {"method": "none"},
        "runner_args": args | {"engine": "transformers", "batch_size": 1},
    }
    return build_config(raw, "stock generate()")


def check_same_answers(config: RunConfig, ran: dict[str, Any]) -> None:
    """Raise ConfigError if the runner and transformers legitimately differ by more than rounding."""
    given = config.runner_args
    if config.runner != "vllm":
        return
    for key in VLLM_ONLY_ARGS:
        if given.get(key) not in (None, "auto", False, {}):
            raise ConfigError(f"runner_args.{key} exists only in vLLM: stock generate() would give different answers")
    if asked := ran.get("not_done"):
        raise ConfigError(f"the model's generation_config asks for {asked}, which vLLM does not support")
    if ran.get("quantized") or given.get("load_format") == "dummy":
        raise ConfigError(
            "vLLM quantizes the weights or uses dummy weights, so transformers would give different answers"
        )


# -- referee ---------------------------------------------------------------------------------------


SPLITS = (1, 4, 16)  # tokens of the last forward after a prefill: the shapes of decoding
LEAST = {torch.float32: 1e-6, torch.float64: 1e-12}  # one rounding, relative to the largest score; else LEAST_HALF
LEAST_HALF = 4e-3


class ModelReferee:
    """Judges a token by the model's logits, computed in several shapes: their difference is this machine's noise.

    rules: how logits become choices. grammars: builds the model's grammars on demand.
    """

    def __init__(self, model: Any, rules: GenerationRules, grammars: Callable[[], Grammars] | None = None) -> None:
        self._model = model
        self._cache_name = cache_argument(type(model).forward)
        self._grammars = grammars
        self._rules = rules
        self._length_dependent = length_dependent(model)

    @torch.inference_mode()
    def judge(self, divergence: Divergence) -> tuple[float, float, float]:
        """Return the shortfalls of the speculative and the plain token, and the difference between shapes."""
        sampling = divergence.sampling
        found = self._logits(divergence.prompt, divergence.common)
        scores = [self._scores(logits, divergence, sampling) for logits in found]
        allowed = scores[0].isfinite()  # processors mask tokens with -inf
        noise = max((float((other - scores[0])[allowed].abs().max()) for other in scores[1:]), default=0.0)
        least = LEAST.get(self._model.dtype, LEAST_HALF) * float(scores[0][allowed].abs().max())
        assert divergence.speculative is not None
        assert divergence.plain is not None
        point = None
        if sampling.temperature > 0:
            point = Noise(sampling.seed, divergence.id).at(divergence.position) * float(scores[0][-1])
        shortfalls = [_shortfall(scores[0], token, point) for token in (divergence.speculative, divergence.plain)]
        return shortfalls[0], shortfalls[1], max(noise, least)

    @torch.inference_mode()
    def choices(
        self, name: str, prompt: list[int], answer: list[int], sampling: Sampling, grammar: str = ""
    ) -> list[int]:
        """Return the token that model and noise choose at each position of a sampled answer, given its prefix."""
        if not answer:
            return []
        if self._length_dependent:
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

    def _follower(self, grammar: str) -> GrammarFollower:
        """Return a follower of the grammar, at its start."""
        assert self._grammars is not None
        return GrammarFollower(self._grammars().matcher(grammar))

    def _forward(self, ids: list[int], last: int) -> torch.Tensor:
        """Return the logits of the last `last` positions, (last, vocab) in float32, from one forward."""
        keep = {"logits_to_keep": last} if "logits_to_keep" in signature(self._model.forward).parameters else {}
        text = torch.tensor([ids], device=self._model.device)
        return self._model(text, **keep).logits[0, -last:].float()  # type: ignore[no-any-return]

    def _logits(self, prompt: list[int], common: list[int]) -> list[torch.Tensor]:
        """Return the logits after prompt and `common`, (vocab,), from one forward and from splits of several shapes.

        Models whose rotary frequencies depend on the length are only run as generate() runs them.
        """
        if self._length_dependent:
            return [list(self._steps(prompt, common))[-1]]
        ids = prompt + common
        text = torch.tensor([ids], device=self._model.device)
        found = [self._forward(ids, 1)[0]]
        for last in SPLITS:
            if last < len(ids):
                first = self._model(text[:, :-last], use_cache=True)
                second = self._model(text[:, -last:], use_cache=True, **{self._cache_name: first.past_key_values})
                found.append(second.logits[0, -1].float())
        return found

    def _steps(self, prompt: list[int], answer: list[int]) -> Iterator[torch.Tensor]:
        """Yield the logits, (vocab,), after the prompt and after each token of the answer, stepping as generate()."""
        for module in self._length_dependent:
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
            output = self._model(ids, use_cache=True, **{self._cache_name: cache})
            cache = output.past_key_values
            yield output.logits[0, -1].float()

    def _scores(self, logits: torch.Tensor, divergence: Divergence, sampling: Sampling) -> torch.Tensor:
        """Return the scores to choose by: processed logits, or cumulative probabilities if sampled."""
        if divergence.grammar:
            logits = self._follower(divergence.grammar).masked(logits, divergence.common)
        processors = self._rules.processors(sampling, len(divergence.prompt))
        if processors is not None:
            logits = processors(logits[None], divergence.prompt + divergence.common)[0]
        if sampling.temperature == 0:
            return logits
        return torch.softmax(logits.double(), -1).cumsum(0)


def _shortfall(scores: torch.Tensor, token: int, point: float | None) -> float:
    """Return how far `token` is from being chosen: below the largest logit, or outside the drawn point."""
    if point is None:
        return float(scores.max() - scores[token])
    low = float(scores[token - 1]) if token else 0.0
    return max(0.0, low - point, point - float(scores[token]))


# -- reference answers -----------------------------------------------------------------------------


def sample(answers: Iterable[Answer], count: int, seed: int) -> list[Answer]:
    """Return `count` of the answers, at least two: the longest and shortest prompt, and a draw of the others."""
    answers = list(answers)
    ranked = sorted(answers, key=lambda answer: (len(answer.prompt_token_ids), answer.id))
    if len(ranked) <= max(2, count):
        return answers
    drawn = random.Random(seed).sample(ranked[1:-1], max(2, count) - 2)
    chosen = {answer.id for answer in (ranked[0], *drawn, ranked[-1])}
    return [answer for answer in answers if answer.id in chosen]


def greedy(target: Target, answers: Iterable[Answer]) -> tuple[Answers, list[str]]:
    """Return stock generate()'s answers for the greedy ones of `answers`, and why some are missing."""
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


def compare(reference: Answers, run: Answers, referee: Callable[[], Referee], audit: Audit) -> list[Divergence]:
    """Count in `audit` how `run` differs from the reference; return the divergences that are bugs."""
    same = Answers({name: answer for name, answer in run.answered.items() if name in reference.answered})
    return [
        divergence for divergence in divergences(reference, same, audit) if not audit.add(judge(divergence, referee))
    ]


def compare_draws(answers: Iterable[Answer], referee: ModelReferee, audit: Audit) -> list[Divergence]:
    """Count in `audit` whether sampled answers are, token by token, what their noise draws from the model.

    A record is a bug at its first token that is off by more than rounding, a tie if tokens are only off by rounding.
    Returns the divergences that are bugs.
    """
    bugs = []
    for answer in answers:
        last = None
        for divergence in _misses(answer, referee):
            last = judge(divergence, lambda: referee)
            if not last.tie:
                bugs.append(divergence)
                break
        if last is None:
            audit.identical += 1
        else:
            audit.add(last)
    return bugs


def _misses(answer: Answer, referee: ModelReferee) -> Iterator[Divergence]:
    """Yield the tokens of an answer that model and noise would not choose after its prefix."""
    prompt, ids = answer.prompt_token_ids, answer.token_ids
    chosen = referee.choices(answer.id, prompt, ids, answer.sampling, answer.grammar)
    for at, (own, theirs) in enumerate(zip(chosen, ids, strict=True)):
        if own != theirs:
            yield Divergence(answer.id, at, own, theirs, prompt, ids[:at], answer.sampling, answer.grammar)
