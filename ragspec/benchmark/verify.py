"""`ragspec verify`: answers the input without and with speculation, and says what differs and why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from ragspec.baseline import PLAIN
from ragspec.benchmark.lossless import Audit, Parting, Verdict, judge, partings
from ragspec.benchmark.plan import Candidate, make_plan
from ragspec.benchmark.process import open_worker
from ragspec.config import RunConfig
from ragspec.errors import ConfigError
from ragspec.journal import write_json


def run_verify(config: RunConfig, folder: Path, *, limit: int | None, console: Console) -> Audit:
    """Audit `config` on its own input; write `folder`/verify.json, and a reproducer per bug. Raises ConfigError."""
    if config.speculation.method == PLAIN:
        raise ConfigError("speculation.method: none has nothing to verify; set the method that you use")
    check_comparable(config)
    plan = make_plan(config)
    answers = []
    for candidate in plan:
        with open_worker(candidate, folder, limit, console) as worker:
            console.print(f"{candidate.name}: answering ...", markup=False)
            worker.measure()
            answers.append([orjson.loads(line) for line in worker.answers.read_bytes().splitlines()])
    audit = Audit()
    found = list(partings(answers[0], answers[1], audit))
    referee = None
    for parting in found:
        if referee is None and parting.plain is not None and parting.speculative is not None:
            console.print("asking the model itself where answers part ...")
            from ragspec.benchmark.referee import ModelReferee

            args = config.runner_args
            referee = ModelReferee.load(config.model or "", args.get("revision"), args)
        verdict = judge(parting, referee)  # type: ignore[arg-type]  # None where neither token is judged
        (audit.ties if verdict.tie else audit.bugs).append(verdict)
        if not verdict.tie:
            _write_reproducer(folder, plan[-1], parting, verdict)
    write_json(folder / "verify.json", audit.to_json() | {"config": config.model_dump(mode="json")})
    return audit


def check_comparable(config: RunConfig) -> None:
    """Raise ConfigError where answers are equal in distribution only, so that texts cannot be compared."""
    spec, sampled = config.speculation, config.sampling.temperature > 0
    stock = config.runner_args.get("engine") == "transformers"
    if sampled and (config.runner == "vllm" or stock or spec.method not in ("context", "prompt_lookup")):
        raise ConfigError(
            f"sampling.temperature: {config.sampling.temperature}: with {spec.method} on {config.runner} sampled "
            "answers have the same distribution, not the same text; verify with --set sampling.temperature=0"
        )


def _write_reproducer(folder: Path, candidate: Candidate, parting: Parting, verdict: Verdict) -> None:
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in parting.id)[:80]
    write_json(
        folder / "bugs" / f"{name}.json",
        {
            "verdict": asdict(verdict),
            "prompt_token_ids": parting.prompt,
            "answer_before": parting.common,
            "sampling": parting.sampling,
            "config": candidate.config.model_dump(mode="json"),
            "note": "what stood in the batch beside it can matter: if it alone does not show it, take the whole input",
        },
    )


def print_audit(console: Console, audit: Audit, folder: Path) -> None:
    """Print the findings, one line each."""
    console.print(f"{audit.identical} of {audit.records} answers are identical, token for token")
    for kind, verdicts, style in (("tie", audit.ties, "yellow"), ("BUG", audit.bugs, "red")):
        for verdict in verdicts:
            console.print(f"{kind}: {_describe(verdict)}", markup=False, style=style)
    if audit.unanswered:
        names = ", ".join(audit.unanswered[:5])
        console.print(f"{len(audit.unanswered)} not answered in both runs: {names}", markup=False, style="yellow")
    if audit.bugs:
        console.print(f"reproducers in {folder / 'bugs'}", markup=False)
    console.print(f"details in {folder / 'verify.json'}", markup=False)


def _describe(verdict: Verdict) -> str:
    where = f'"{verdict.id}", token {verdict.position}: {verdict.speculative} instead of {verdict.plain}'
    if verdict.shortfall is None:
        return f"{where}: one answer ends where the other goes on"
    margin: Any = max(verdict.shortfall, verdict.plain_shortfall or 0.0)
    return f"{where}, {margin:.1e} below the best; shapes alone make {verdict.noise:.1e} here"
