"""`ragspec verify`: answer the input with and without speculation, and a sample of it in stock transformers."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from ragspec.audit.lossless import (
    Audit,
    Comparison,
    Divergence,
    Findings,
    Tested,
    Verdict,
    compare_bits,
    divergences,
    judge,
)
from ragspec.benchmark.comparison import graded
from ragspec.benchmark.passes import Answer, Answers, read_answers
from ragspec.benchmark.plan import Candidate, check_input, make_plan
from ragspec.benchmark.process import open_worker
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, ModelError
from ragspec.outputs.folder import write_json
from ragspec.speculation.methods import PLAIN, method_named

STOCK = "stock generate()"


def run_verify(
    config: RunConfig,
    folder: Path,
    *,
    limit: int | None,
    console: Console,
    reference: int = 8,
    seed: int = 0,
    bits: bool = False,
) -> Findings:
    """Audit `config` on its own input; write `folder`/verify.json and a reproducer for each bug.

    Args:
        config: The config, with the method to verify.
        folder: For outputs, findings and reproducers.
        limit: Records to answer, None for all.
        console: For progress.
        reference: How many records stock generate() answers too; 0 for none.
        seed: Of that sample.
        bits: Answer the input twice more with log-probabilities, and compare those bit for bit. A run with
            `runner_args.exact` always does.

    Raises:
        ConfigError: If there is nothing to verify, or texts cannot be compared.
    """
    if config.speculation.method == PLAIN:
        raise ConfigError(
            "speculation.method: with method none there is nothing to verify; set the method that you use"
        )
    check_comparable(config)
    with config.redactor().over_errors():
        verification = _Verification(config, folder, limit, console)
        verification.compare_runs()
        exact = bool(config.runner_args.get("exact"))
        if bits or exact:
            verification.compare_bits(exact)
        if reference:
            verification.compare_with_reference(reference, seed)
        found = verification.findings
    write_json(folder / "verify.json", found.to_json(STOCK, seed) | {"config": config.model_dump(mode="json")})
    return found


class _Verification:
    """One audit: the runs' answers, the model that judges them (loaded on demand), and the findings."""

    def __init__(self, config: RunConfig, folder: Path, limit: int | None, console: Console) -> None:
        self.findings = Findings()
        self._config = config
        self._folder = folder
        self._console = console
        self._plan = make_plan(config)
        check_input(config)
        self._plain_about: dict[str, Any] = {}  # Runner.about() of the plain run
        self._method_about: dict[str, Any] = {}  # of the run with speculation
        self._outputs: dict[str, Path] = {}
        self._limit = limit
        self._answers = [self._answer(candidate) for candidate in self._plan]
        self.findings.quality = graded(self._outputs, {self._plan[1].name: self._plan[0].name})

    def _answer(self, candidate: Candidate) -> Answers:
        with open_worker(candidate, self._folder, self._limit, self._console) as worker:
            self._console.print(f"{candidate.name}: answering ...", markup=False)
            ran = worker.measure()
            self.findings.tested = Tested(ran.drafted, ran.accepted, ran.notes)
            self._method_about = worker.ready.about["runner"]
            self._plain_about = self._plain_about or self._method_about
            self._outputs[candidate.name] = worker.answers
            return read_answers(worker.answers).each()

    def compare_runs(self) -> None:
        """Compare the method with plain decoding."""
        (plain, method), audit = self._plan, Audit()
        one, two = (self._reproducible(answers) for answers in self._answers)
        if left := len(self._answers[0].answered) - len(one.answered):
            self.findings.left_out.append(
                f"{left} sampled answers: with {method.name} they have the same distribution, not the same text"
            )
        for divergence in divergences(one, two, audit):
            if not audit.add(judge(divergence, self._referee)):
                self._write_reproducer(method, PLAIN, divergence, audit.bugs[-1])
        self.findings.comparisons.append(Comparison(method.name, plain.name, audit))

    def compare_bits(self, promised: bool) -> None:
        """Answer again with log-probabilities, and compare those of both runs. promised: by `runner_args.exact`."""
        one, two = (self._reproducible(self._answer(_with_logprobs(candidate))) for candidate in self._plan)
        self.findings.bits = compare_bits(one, two, promised)

    def _reproducible(self, answers: Answers) -> Answers:
        """Return the answers whose text is the same in any run."""
        same = {name: answer for name, answer in answers.answered.items() if self._is_reproducible(answer)}
        return Answers(same, answers.failed)

    def _is_reproducible(self, answer: Answer) -> bool:
        """Return whether an answer is reproducible: greedy, or sampled with noise that belongs to positions."""
        if answer.sampling.temperature == 0:
            return True
        drafts = method_named(self._config.speculation.method)
        keyed = drafts.is_deterministic or self._method_about.get("draft_vocabulary") == "other"
        return self._plain_about.get("engine") == "ragspec" and keyed

    def compare_with_reference(self, count: int, seed: int) -> None:
        """Compare a sample of both runs with stock transformers, or say why that is impossible."""
        from ragspec.audit import referee as reference
        from ragspec.audit.referee import check_same_answers

        plain, method = (self._reproducible(answers).answered for answers in self._answers)
        asked = reference.sample([answer for name, answer in plain.items() if name in method], count, seed)
        if not asked:
            return
        try:
            check_same_answers(self._config, self._plain_about)
            target = self._target
        except (ConfigError, ModelError) as error:
            self.findings.left_out.append(f"{STOCK}: {error}")
            return
        self._console.print(f"{STOCK}: answering {len(asked)} records, one at a time ...", markup=False)
        answers, failed = reference.greedy(target, asked)
        self.findings.left_out += [f"{STOCK}: {failure}" for failure in failed]
        self.findings.reference_ids = [answer.id for answer in asked]
        sampled = {answer.id for answer in asked if answer.sampling.temperature > 0}
        for candidate, run in zip(self._plan, self._answers, strict=True):
            audit = Audit()
            bugs = reference.compare(answers, run, self._referee, audit)
            drawn = [answer for name, answer in run.answered.items() if name in sampled]
            bugs += reference.compare_draws(drawn, self._referee(), audit)
            self.findings.comparisons.append(Comparison(candidate.name, STOCK, audit))
            for divergence, verdict in zip(bugs, audit.bugs, strict=True):
                self._write_reproducer(candidate, STOCK, divergence, verdict)

    @cached_property
    def _target(self) -> Any:
        from ragspec.audit.referee import Target

        self._console.print(f"{STOCK}: loading ...", markup=False)
        return Target(self._config, self._plain_about)

    def _referee(self) -> Any:
        from ragspec.audit.referee import ModelReferee

        return ModelReferee(self._target.model, self._target.rules, self._target.grammars)

    def _write_reproducer(self, candidate: Candidate, against: str, divergence: Divergence, verdict: Verdict) -> None:
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in divergence.id)[:80]
        if against == STOCK:
            name = f"{candidate.name}-stock-{name}"
        write_json(
            self._folder / "bugs" / f"{name}.json",
            {
                "run": candidate.name,
                "against": against,
                "verdict": asdict(verdict),
                "prompt_token_ids": divergence.prompt,
                "answer_before": divergence.common,
                "sampling": asdict(divergence.sampling),
                "grammar": divergence.grammar,
                "config": candidate.config.model_dump(mode="json"),
                "note": "other records in its batch may matter: if it does not reproduce alone, run the whole input",
            },
        )


def _with_logprobs(candidate: Candidate) -> Candidate:
    sampling = candidate.config.sampling
    if sampling.logprobs is None:
        sampling = sampling.model_copy(update={"logprobs": 0})
    config = candidate.config.model_copy(update={"sampling": sampling})
    return replace(candidate, name=f"{candidate.name}-logprobs", config=config)


def check_comparable(config: RunConfig) -> None:
    """Raise ConfigError if answers are equal only in distribution, so that texts cannot be compared."""
    spec, sampled = config.speculation, config.sampling.temperature > 0
    stock = config.runner_args.get("engine") == "transformers"
    other_tokens = spec.method == "draft_model" and spec.draft_tokenizer is not None
    keyed = other_tokens or method_named(spec.method).is_deterministic
    if sampled and (config.runner == "vllm" or stock or not keyed):
        raise ConfigError(
            f"sampling.temperature: {config.sampling.temperature}: with {spec.method} on {config.runner} sampled "
            "answers have the same distribution, not the same text; verify with --set sampling.temperature=0"
        )
