"""Benchmarks, scores and indexes as pandas frames, for notebooks.

    from ragspec.frames import benchmark, evaluate, index, results

    benchmark({"model": "demo", "input": "questions.jsonl"}, methods=["none", "context"])

Each does what the command of its name does. Needs pandas: `pip install "ragspec[notebook]"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ragspec.errors import ConfigError

if TYPE_CHECKING:
    from ragspec.config.run import RunConfig


def results(folder: str | PathLike[str]) -> Any:
    """Return the results of a benchmark: a row per candidate, with its speed, its ratio to plain decoding and more.

    Args:
        folder: The output folder of `ragspec benchmark`.

    Raises:
        ConfigError: There are no results, or pandas is not installed.
    """
    from ragspec.benchmark.details import table_of
    from ragspec.benchmark.results import read_results

    return _frame(table_of(read_results(Path(folder))), "method")


def benchmark(
    config: RunConfig | Mapping[str, Any] | str | PathLike[str],
    *,
    methods: str | Sequence[str] = (),
    batch_sizes: int | Sequence[int] = (),
    repeat: int = 3,
    limit: int | None = None,
    output: str | PathLike[str] | None = None,
    plugins: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
) -> Any:
    """Return how fast methods are on an input, as `ragspec benchmark` times them: a row per candidate.

    Args:
        config: What to run, as `Pipeline` takes it. It needs an `input`.
        methods: Methods to time; by default `none` and the config's.
        batch_sizes: Records at once; by default the config's.
        repeat: Timed passes per candidate.
        limit: Read only this many records.
        output: Folder for results, answers and report.html; by default a temporary one.
        plugins: Python files with drafters of yours, as for `--plugin`. Each candidate runs in a process of its own,
            which does not know what `register_drafter` has registered here.

    Raises:
        ConfigError: Something cannot be run, or pandas is not installed.
        ModelError: A candidate's process failed.
    """
    import sys

    from rich.console import Console

    from ragspec.benchmark.details import table_of
    from ragspec.benchmark.measure import run_benchmark
    from ragspec.benchmark.plan import make_plan
    from ragspec.run.inspect import with_columns
    from ragspec.run.local import checked_config
    from ragspec.run.runner_choice import choose_for_input
    from ragspec.speculation.methods import is_local, known_methods
    from ragspec.speculation.plugin_files import use_plugins

    _pandas()
    if plugins:
        use_plugins([str(path) for path in _each(plugins)], known_methods)
    chosen = choose_for_input(with_columns(checked_config(config))[0]).config
    plan = make_plan(chosen, _each(methods), _each(batch_sizes))
    for method in dict.fromkeys(candidate.config.speculation.method for candidate in plan):
        if is_local(method):
            raise ConfigError(
                f'method "{method}": it is registered in this process only, and a benchmark runs in others; save the '
                'drafter in a file and give plugins=["FILE.py"]'
            )
    with TemporaryDirectory() as folder:
        place = Path(folder if output is None else output)
        console = Console(file=sys.stderr, highlight=False, emoji=False)
        found = run_benchmark(plan, place, repeat=repeat, limit=limit, sequential=False, console=console)
        if output is not None:
            from ragspec.report.page import write_report

            write_report(found, place)
    return _frame(table_of(found), "method")


def evaluate(answers: str | PathLike[str], **given: Any) -> Any:
    """Return the scores of a run's answers: a row per score, with its mean, its 95% interval and its records.

    Args:
        answers: The run's output.
        given: `references` (a file of records), `against` (another output: adds the differences), `refusal` (a regular
            expression) and `judge` (a config), as for `ragspec evaluate`.

    Raises:
        ConfigError: A file cannot be read, or pandas is not installed.
    """
    from ragspec.quality.evaluate import evaluate as score

    _pandas()
    return _frame(score(str(answers), **given).rows(), "score")


def index(
    corpus: str | PathLike[str] | Sequence[str | PathLike[str]], index: str | PathLike[str], **settings: Any
) -> Any:
    """Build an index of documents, or bring it up to date; return what was done, in one row.

    Args:
        corpus: Files and folders.
        index: Folder of the index.
        settings: Other keys of the config's `retrieval`, such as `embedding_model`.

    Raises:
        ConfigError: Nothing can be indexed, or pandas is not installed.
    """
    from ragspec.config.sections import RetrievalConfig, validate
    from ragspec.retrieval.build import build

    _pandas()
    paths = [str(path) for path in _each(corpus)]
    config = validate(RetrievalConfig, {"index": str(index), "corpus": paths, **settings}, "index")
    assert isinstance(config, RetrievalConfig)
    done = build(config)
    counts = ("added", "changed", "unchanged", "removed", "skipped", "chunks", "seconds")
    return _frame([{"index": str(index), **{name: getattr(done, name) for name in counts}}], "index")


def _each(given: Any) -> list[Any]:
    """Return what may be given as one or as several."""
    return [given] if isinstance(given, str | PathLike | int) else list(given)


def _frame(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return rows as a frame whose index is column `name`."""
    return _pandas().DataFrame(list(rows)).set_index(name)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError('frames need pandas: pip install "ragspec[notebook]"') from None
    return pandas
