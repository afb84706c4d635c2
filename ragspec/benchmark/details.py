"""What a benchmark shows besides speeds: sample answers, acceptance by record, the roofline; and the printed table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ragspec.benchmark.comparison import describe_quality
from ragspec.benchmark.passes import Answer
from ragspec.benchmark.plan import baselines, ratios_to_fewer, ratios_to_peers, ratios_to_plain, ratios_to_rank
from ragspec.benchmark.results import (
    NAME,
    RECORD_SPEED,
    SPEED,
    Piece,
    Profile,
    Quote,
    Ratio,
    Results,
    Roofline,
    Run,
    Sample,
)
from ragspec.records import Tokenizer

SAMPLES = 6  # answers shown
PASSAGE_CHARS = 1200  # shown of a passage
READ_BYTES = 1 << 28  # to measure memory bandwidth
MATRIX_SIDE = 1024  # of the square matrices multiplied to measure arithmetic
MEASURE_S = 0.3  # seconds per measurement: a busy machine reaches its peak for moments only


def samples(answers: Sequence[Answer], tokenizer: Tokenizer) -> tuple[Sample, ...]:
    """Return the first answers of a pass as pieces of text with their origin."""
    return tuple(
        Sample(
            id=answer.id,
            question=answer.question,
            pieces=pieces(answer, tokenizer),
            passages=tuple(Quote(passage.id, passage.text[:PASSAGE_CHARS]) for passage in answer.passages),
            guessed_known=bool(answer.guessed),
            speculation=answer.speculation,
        )
        for answer in answers[:SAMPLES]
    )


def pieces(answer: Answer, tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """Return an answer's tokens as text; a token that ends inside a character has none."""
    ids = answer.token_ids
    sources: list[str | None] = [None] * len(ids)
    for start, end, passage in answer.copied_tokens:
        sources[start:end] = [passage] * (end - start)
    found, done = [], 0
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1])
        if text.endswith("�") and i + 1 < len(ids):
            text = text[:done]  # the next token completes the character
        drafted = bool(answer.guessed) and bool(answer.guessed[i])
        found.append(Piece(text[done:], "draft" if drafted else "target", sources[i]))
        done = max(done, len(text))
    return tuple(found)


def acceptance_by_record(answers: Sequence[Answer]) -> tuple[float, ...]:
    """Return the acceptance rate of every answer that had a draft."""
    rates = [answer.speculation["acceptance_rate"] for answer in answers]
    return tuple(rate for rate in rates if rate is not None)


@cache
def roofline(device: str, dtype: str) -> Roofline | None:
    """Return the device's peak memory bandwidth and arithmetic, measured once; None without torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    kind = getattr(torch, dtype, torch.float32)

    def best(work: Callable[[], Any]) -> float:
        least, began = float("inf"), time.perf_counter()
        while time.perf_counter() < began + MEASURE_S:
            started = time.perf_counter()
            work().sum().item()  # synchronises with the device
            least = min(least, time.perf_counter() - started)
        return least

    block = torch.ones(READ_BYTES // kind.itemsize, dtype=kind, device=device)
    square = torch.ones(MATRIX_SIDE, MATRIX_SIDE, dtype=kind, device=device)
    products: list[Callable[[], Any]] = [lambda: square @ square]
    if device == "cpu" and kind == torch.float32:
        from ragspec.engine.model.weight_layouts import makers

        # torch's own product may be a fifth slower than oneDNN's
        products = [partial(make(square), square, None) for make in makers(None).values()]
    return Roofline(
        bytes_per_s=READ_BYTES / min(best(lambda: block), best(lambda: block.view(-1, MATRIX_SIDE) @ square[0])),
        flops_per_s=2 * MATRIX_SIDE**3 / min(best(product) for product in products),
    )


# -- table -----------------------------------------------------------------------------------------


MAX_WIDTH = 1000  # columns of the console for which the table is measured
COLUMNS = ("method", "tokens/s", "vs plain", "decode tokens/s", "acceptance", "tokens/step", "output", "identical")
ENERGY = "J/token"  # the last column, where the machine tells


def print_results(console: Console, results: Results, folder: Path) -> None:
    """Print one row per candidate, its passes combined, with the paired ratio to plain decoding."""
    machine = results.machine
    about = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    console.print(about, *machine["gpus"], markup=False)
    console.print(what_is_timed(results), markup=False)
    for note in results.notes:
        console.print(f"note: {note}", markup=False, style="yellow")
    _print_figures(console, results)
    for ratio in ratios_to_peers(results):
        console.print(f"{_describe_ratio(ratio)}{_unit_suffix(ratio)}", markup=False)
    for ratio in ratios_to_rank(results):
        console.print(
            f"{_describe_ratio(ratio)}{_unit_suffix(ratio)}{_prompt_tokens_suffix(results, ratio)}", markup=False
        )
    for line in describe_quality(results.quality):
        console.print(line, markup=False)
    for ratio in ratios_to_fewer(results, SPEED):
        console.print(f"{_describe_ratio(ratio)}{_scaling_suffix(results, ratio)}", markup=False)
    for name, detail in results.details.items():
        if detail is not None and detail.profile is not None:
            console.print(_profile(name, detail.profile))
    console.print(f"results in {folder / NAME}, answers in {folder / 'outputs'}", markup=False)


def what_is_timed(results: Results) -> str:
    """Return what a reader must know to compare the figures with others."""
    config = next(iter(results.configs.values()), {})
    sampling = config.get("sampling", {})
    temperature = sampling.get("temperature")
    passes = max((run.repeat for run in results.runs), default=0)
    parts = [
        str(config.get("model")),
        f"temperature {temperature}" if temperature else "greedy",
        f"at most {sampling.get('max_new_tokens') or sampling.get('default_new_tokens')} tokens an answer",
        "prompts included, loading and warm-up not",
        f"95% intervals over {passes} passes of the same records" if passes > 1 else "one pass",
    ]
    return f"timed: {'; '.join(parts)}"


def _print_figures(console: Console, results: Results) -> None:
    """Print a table or, if it is too wide for the console, each candidate's figures below its name."""
    columns = (*COLUMNS, ENERGY) if results.has_energy else COLUMNS
    rows = list(_rows(results))
    table = Table(box=None, pad_edge=False)
    for title in columns:
        table.add_column(title, justify="left" if title == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if console.measure(table, options=console.options.update(max_width=MAX_WIDTH)).maximum <= console.width:
        console.print(table)
        return
    for name, *figures in rows:
        shown = (f"{title} {figure}" for title, figure in zip(columns[1:], figures, strict=True) if figure != "-")
        console.print(name, markup=False, style="bold")
        console.print(Padding(Text(", ".join(shown)), (0, 0, 0, 2)), soft_wrap=False)


def _rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each candidate, in the order of COLUMNS, then of ENERGY."""
    plain = baselines(results.runs)
    to_plain = {ratio.name: ratio for ratio in ratios_to_plain(results, SPEED)}
    for name in results.names:
        run = results.typical(name)
        yield (
            name,
            _speed(run.tokens_per_s),
            to_plain[name].formatted() if name in to_plain else "-",
            _speed(run.decode_tokens_per_s),
            "-" if run.acceptance_rate is None else f"{run.acceptance_rate:.1%}",
            "-" if run.tokens_per_step is None else f"{run.tokens_per_step:.2f}",
            f"{run.output_tokens:,}",
            "-" if plain[name] is None else f"{run.identical} of {run.records}",
            *([_joules(run)] if results.has_energy else []),
        )


def table_of(results: Results) -> list[dict[str, Any]]:
    """Return one row per candidate for `--format`: figures as numbers, intervals in columns of their own."""
    plain = baselines(results.runs)
    to_plain = {ratio.name: ratio for ratio in ratios_to_plain(results, SPEED)}
    rows = []
    for name in results.names:
        run, ratio = results.typical(name), to_plain.get(name)
        rows.append(
            {
                "method": name,
                "tokens_per_s": run.tokens_per_s,
                "vs_plain": ratio and ratio.median,
                "vs_plain_low": ratio and ratio.low,
                "vs_plain_high": ratio and ratio.high,
                "decode_tokens_per_s": run.decode_tokens_per_s,
                "acceptance_rate": run.acceptance_rate,
                "tokens_per_step": run.tokens_per_step,
                "output_tokens": run.output_tokens,
                "identical": None if plain[name] is None else run.identical,
                "records": run.records,
                "passes": len(results.runs_of(name)),
                **({"j_per_output_token": run.j_per_output_token} if results.has_energy else {}),
            }
        )
    return rows


def _profile(name: str, profile: Profile) -> Table:
    """Return a table of where the time of a pass went, one row per part."""
    table = Table(box=None, pad_edge=False, title=f"{name}: where {profile.seconds:.1f} s went", title_justify="left")
    for title in ("step", "part", "seconds", "share", "of its bound"):
        table.add_column(title, justify="left" if title in ("step", "part") else "right", overflow="fold")
    rows = [
        (f"{phase} ({each.steps:,} steps)", part, value.seconds, value.bound_s)
        for phase, each in profile.phases.items()
        for part, value in each.parts.items()
    ]
    rows += [("all", "drafting", profile.drafting_s, None), ("all", "everything else", profile.rest_s, None)]
    for step, part, seconds, bound_s in rows:
        bound = f"{seconds / bound_s:.2f}x" if bound_s else ""
        table.add_row(step, part, f"{seconds:.2f}", f"{seconds / profile.seconds:.0%}", bound)
    return table


def _unit_suffix(ratio: Ratio) -> str:
    """Return the ratio's unit if it is not tokens."""
    return " in records/s" if ratio.metric == RECORD_SPEED else ""


def _prompt_tokens_suffix(results: Results, ratio: Ratio) -> str:
    """Return how many prompt tokens both candidates computed, if known."""
    one, other = (results.runs_of(name)[0].computed_prompt_tokens for name in (ratio.name, ratio.baseline))
    return "" if one is None or other is None else f", with {one:,} prompt tokens computed against {other:,}"


def _scaling_suffix(results: Results, ratio: Ratio) -> str:
    """Return the ratio as a share of a linear speed-up over its workers."""
    workers = {run.name: run.workers for run in results.runs}
    more, fewer = workers[ratio.name] or 1, workers[ratio.baseline] or 1
    return f", {ratio.median * fewer / more:.0%} of a linear speed-up on {more} workers" if more > fewer else ""


def _joules(run: Run) -> str:
    return "-" if run.j_per_output_token is None else f"{run.j_per_output_token:.2f}"


def _speed(speed: float | None) -> str:
    return f"{speed:.1f}" if speed else "-"


def _describe_ratio(ratio: Ratio) -> str:
    return f"{ratio.name} runs at {ratio.formatted()} the speed of {ratio.baseline}"
