"""`ragspec tune`: time candidates on a sample of the user's input, and write the config of the winner.

Passes alternate until the budget is spent; a candidate clearly behind after a round is dropped. Speculation has to beat
plain decoding in every pair of passes, and by a margin, or plain decoding wins. The verdict says how sure that is. On
request, variants that may change answers are tried beside the winner (frontier.py). Limit: only the config's batch size
is tried.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console

from ragspec.benchmark.comparison import format_ratio, graded, paired, sides
from ragspec.benchmark.frontier import TRIES, allowed, frontier, points, variants
from ragspec.benchmark.plan import Candidate, check_input, make_plan
from ragspec.benchmark.process import Worker, open_worker
from ragspec.benchmark.results import RECORD_SPEED, SPEED, Pass
from ragspec.config.redaction import by_name
from ragspec.config.run import RunConfig
from ragspec.errors import ConfigError, ModelError, did_you_mean
from ragspec.host.files import write_whole
from ragspec.host.machine import machine
from ragspec.inputs.sources import first_records
from ragspec.quality.graded import references_of
from ragspec.records import Record
from ragspec.run.runner_choice import choose_for_input
from ragspec.speculation.methods import FAKE, PLAIN, model_free

BEHIND = 0.85  # of the fastest speed in a round; slower candidates are dropped
MARGIN = 1.03  # by which speculation has to win
Speeds = dict[str, list[float | None]]  # candidate -> speed of each pass
LENGTHS = {"vllm": {"prompt_lookup": (4, 8)}}  # draft lengths to try where the engine does not choose them itself


@dataclass(frozen=True, slots=True)
class Tuned:
    """The choice, with a line of evidence per candidate. verdict: how sure the choice is, in a sentence.

    figures: the same as rows for `--format`.
    """

    winner: Candidate
    evidence: list[str]
    verdict: str
    figures: tuple[dict[str, Any], ...] = ()


def tune(
    config: RunConfig,
    folder: Path,
    *,
    budget_s: float,
    limit: int,
    console: Console,
    tries: Sequence[str] = (),
    max_loss: float | None = None,
) -> Tuned:
    """Time candidates within about `budget_s` seconds, loading included, and return the choice.

    Args:
        config: The user's config.
        folder: For outputs and logs.
        budget_s: Seconds for the lossless candidates; `tries` get as many again.
        limit: Records per pass.
        console: For progress.
        tries: Variants that may change answers (frontier.TRIES), timed beside the winner.
        max_loss: F1 points that the choice may lose to a variant; None: choose no variant.

    Raises:
        ConfigError: If there is nothing to try, or quality cannot be measured.
        ModelError: If a candidate's process fails.
    """
    if max_loss is not None and not tries:
        raise ConfigError(
            "--max-loss: says what --try may lose; give --try order (or passages, dtype, quantization) too"
        )
    records = _records_to_try(tries, config, limit)
    tuned = _tune_lossless(config, folder, budget_s=budget_s, limit=limit, console=console)
    if not tries:
        return tuned
    passages = max([config.retrieval.top_k if config.retrieval else 0, *(len(each.contexts) for each in records)])
    plan = [tuned.winner, *variants(tuned.winner, tries, passages, on_gpu=bool(machine()["gpus"]))]
    if len(plan) == 1:
        return replace(tuned, evidence=[*tuned.evidence, f"nothing to try for {', '.join(tries)}"])
    return _try_variants(tuned, plan, max_loss, folder, budget_s=budget_s, limit=limit, console=console)


def _tune_lossless(config: RunConfig, folder: Path, *, budget_s: float, limit: int, console: Console) -> Tuned:
    deadline = time.monotonic() + budget_s
    plan = candidates(config)
    if len(plan) < 2:
        raise ConfigError(
            f'runner: "{config.runner}" has no method to try without further settings; set speculation.method'
        )
    check_input(config)
    speeds: Speeds = {candidate.name: [] for candidate in plan}
    with ExitStack() as stack:
        alive: list[Worker] = []
        for candidate in plan:
            if alive and time.monotonic() > deadline - budget_s / 3:
                console.print(f"{candidate.name}: skipped, too little of the budget is left", markup=False)
                continue
            alive.append(stack.enter_context(open_worker(candidate, folder, limit, console)))
        _time_rounds(alive, deadline, speeds, console, _still_competitive)
    return choose(plan, speeds)


def _records_to_try(tries: Sequence[str], config: RunConfig, limit: int) -> list[Record]:
    """Return the first records if there are `tries`. Raises ConfigError if their quality cannot be measured."""
    for word in tries:
        if word not in TRIES:
            raise ConfigError(f'--try: "{word}" is not known{did_you_mean(word, TRIES)}')
    if not tries:
        return []
    if config.input is None or config.input.is_stdin:
        raise ConfigError("input: tuning reads its input several times; give a file with --input")
    records = first_records(config.input, limit, config.prompt.source)
    if not any(references_of(record.metadata)[0] for record in records):
        raise ConfigError("--try changes answers: the records need a `reference`, so that quality can be measured")
    return records


def _try_variants(
    tuned: Tuned,
    plan: Sequence[Candidate],
    max_loss: float | None,
    folder: Path,
    *,
    budget_s: float,
    limit: int,
    console: Console,
) -> Tuned:
    """Time variants beside the winner (first in the plan); choose one only within `max_loss`."""
    deadline = time.monotonic() + budget_s
    speeds: Speeds = {candidate.name: [] for candidate in plan}
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(open_worker(plan[0], folder, limit, console))]
        for candidate in plan[1:]:
            try:
                workers.append(stack.enter_context(open_worker(candidate, folder, limit, console)))
            except (ConfigError, ModelError) as error:  # a variant that cannot run here is only ruled out
                refused[candidate.name] = str(error)
        # answers may differ in length
        failed = _time_rounds(workers, deadline, speeds, console, lambda workers, speeds: workers, RECORD_SPEED)
        answers = {worker.candidate.name: worker.answers for worker in workers}
    for name, count in failed.items():
        if count > failed[tuned.winner.name]:
            refused[name] = f"{count} records failed"
    others = [candidate for candidate in plan[1:] if candidate.name not in refused]
    quality = graded(answers, {candidate.name: tuned.winner.name for candidate in others})
    found = points(tuned.winner, others, speeds, quality)
    best = frontier(found)
    evidence = [point.formatted(best=point in best) for point in found]
    evidence += [f"{name}: ruled out: {why}" for name, why in refused.items()]
    chosen = allowed(found, max_loss)
    verdict = tuned.verdict if chosen.lossless else f"{chosen.candidate.name} is chosen: {chosen.speed}"
    return replace(tuned, winner=chosen.candidate, evidence=[*tuned.evidence, *evidence], verdict=verdict)


def _time_rounds(
    workers: list[Worker],
    deadline: float,
    speeds: Speeds,
    console: Console,
    keep: Callable[[list[Worker], Speeds], list[Worker]],
    metric: str = SPEED,
) -> dict[str, int]:
    """Time rounds until the deadline, at least one, while two candidates are left; return failed records by name.

    keep: returns the workers of the next round. metric: the speed to compare, of a Pass.
    """
    number, took = 0, 0.0
    failed: dict[str, int] = {}
    while not number or (len(workers) > 1 and time.monotonic() + took <= deadline):
        number += 1
        started = time.monotonic()
        for name, figures in _time_round(workers, number, console).items():
            speeds[name].append(getattr(figures, metric))
            failed[name] = figures.failed
        took = time.monotonic() - started
        workers = keep(workers, speeds)
    return failed


def _time_round(workers: list[Worker], number: int, console: Console) -> dict[str, Pass]:
    """Run one pass of every worker, reversing the order every other round."""
    passes = {}
    for worker in workers if number % 2 else reversed(workers):
        name = worker.candidate.name
        console.print(f"{name}: pass {number} ...", markup=False)
        passes[name] = worker.measure()
    if not any(figures.records for figures in passes.values()):
        raise ConfigError(f"{workers[0].candidate.name}: no record was answered; see {workers[0].answers}")
    return passes


def _still_competitive(workers: list[Worker], speeds: Speeds) -> list[Worker]:
    """Return plain decoding and the workers not far behind in the last round."""
    last = {worker.candidate.name: speeds[worker.candidate.name][-1] or 0.0 for worker in workers}
    least = BEHIND * max(last.values())
    return [
        worker
        for worker in workers
        if worker.candidate.config.speculation.method == PLAIN or last[worker.candidate.name] >= least
    ]


def candidates(config: RunConfig) -> list[Candidate]:
    """Return plain decoding, the config's method, and every method of the runner that needs no further settings."""
    config = choose_for_input(config).config
    free = () if config.runner == FAKE else model_free(config.runner)
    methods = [PLAIN, config.speculation.method, *free]
    if importlib.util.find_spec("arctic_inference") is None:
        methods = [method for method in methods if method != "suffix" or method == config.speculation.method]
    plan = []
    for method in dict.fromkeys(methods):
        own = method == config.speculation.method
        lengths = (None,) if own else LENGTHS.get(config.runner, {}).get(method, (None,))
        for length in lengths:
            plan += make_plan(config, [method], [], [length] if length else [])
    return plan


def choose(plan: list[Candidate], speeds: Speeds) -> Tuned:
    """Return the fastest candidate that beats plain decoding in every pair of passes, else plain decoding.

    plan: plain decoding is first. speeds: a candidate without any was not timed, because of the budget.
    """
    skipped = [candidate.name for candidate in plan if not speeds[candidate.name]]
    plan = [candidate for candidate in plan if speeds[candidate.name]]
    plain = speeds[plan[0].name]
    winner, best = plan[0], MARGIN
    evidence = []
    for candidate in plan:
        mine = speeds[candidate.name]
        ratios = paired(mine, plain)
        rate = median([speed for speed in mine if speed] or [0.0])
        beside = f", {format_ratio(ratios)} the speed of {plan[0].name}" if candidate is not plan[0] and ratios else ""
        evidence.append(f"{candidate.name}: {rate:.1f} tokens/s{beside}, {_passes(mine)}")
        if ratios and min(ratios) > 1.0 and median(ratios) > best:
            winner, best = candidate, median(ratios)
    evidence += [f"{name}: not timed: too little of the budget was left" for name in skipped]
    figures = tuple(_figures(candidate, speeds, plan[0], chosen=candidate is winner) for candidate in plan)
    return Tuned(winner, evidence, _verdict(winner, plan, speeds), figures)


def _figures(candidate: Candidate, speeds: Speeds, plain: Candidate, *, chosen: bool) -> dict[str, Any]:
    """Return a candidate's row: its median speed, and the extremes of its ratios to plain decoding."""
    mine = [speed for speed in speeds[candidate.name] if speed]
    ratios = [] if candidate is plain else paired(speeds[candidate.name], speeds[plain.name])
    return {
        "method": candidate.name,
        "tokens_per_s": median(mine) if mine else None,
        "vs_plain": median(ratios) if ratios else None,
        "vs_plain_low": min(ratios, default=None),
        "vs_plain_high": max(ratios, default=None),
        "passes": len(mine),
        "chosen": chosen,
    }


def _verdict(winner: Candidate, plan: Sequence[Candidate], speeds: Speeds) -> str:
    """Return why `winner` is chosen, how sure that is, and which candidates may be as fast."""
    plain = plan[0]
    if len(plan) == 1:
        return f"{plain.name} is chosen: nothing else was timed within the budget; give a larger --budget"
    if winner is plain:
        return f"{plain.name} is chosen: nothing else was faster in every pass, by {MARGIN - 1:.0%} or more"
    ratios = paired(speeds[winner.name], speeds[plain.name])
    sure = sides(ratios)[0] > 1
    open_ = "" if sure else f", which may be chance after {_passes(ratios)}; a larger --budget would tell"
    found = f"{winner.name} is chosen: {format_ratio(ratios)} the speed of {plain.name}{open_}"
    rivals = [other.name for other in plan if other not in (winner, plain) and _may_be_as_fast(other, winner, speeds)]
    return f"{found}; not clearly slower: {', '.join(rivals)}" if rivals else found


def _passes(each: Sequence[Any]) -> str:
    return "1 pass" if len(each) == 1 else f"{len(each)} passes"


def _may_be_as_fast(other: Candidate, winner: Candidate, speeds: Speeds) -> bool:
    ratios = paired(speeds[other.name], speeds[winner.name])
    return bool(ratios) and sides(ratios)[1] >= 1


def write_config(tuned: Tuned, path: Path, sample: str) -> None:
    """Write the winner's config with the evidence as comments. It is self-contained: a template is included as text."""
    about = machine()
    comments = [
        f"Chosen by `ragspec tune`: {tuned.winner.name}. Timed on {sample},",
        f"on {about['processor']}, {about['cores']} cores{''.join(', ' + gpu for gpu in about['gpus'])}:",
        *(f"  {line}" for line in [*tuned.evidence, tuned.verdict]),
    ]
    named: dict[str, str] = {}
    values: dict[str, Any] = by_name(tuned.winner.config.model_dump(exclude_defaults=True), "", named)
    values.setdefault("speculation", {"method": tuned.winner.config.speculation.method})
    if named:
        comments.append("Secrets are not written here. Before running this config, set in the environment:")
        comments += [f"  {name}: the value of {key}" for name, key in named.items()]
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, ("".join(f"# {line}\n" for line in comments) + text).encode())
