"""`ragspec ask`: one question, answered on the screen; without one, question after question."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.cli.flags import with_settings
from ragspec.cli.options import (
    ConfigIfAny,
    Debug,
    MaxNewTokens,
    Plugin,
    Set,
    overrides,
    quiet_pipe,
    set_debug,
    settings_of,
    unused_plugins,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ragspec.cli.answer_view import AnswerView
    from ragspec.config.run import RunConfig
    from ragspec.errors import RecordError
    from ragspec.run.local import Pipeline

LONGEST = 256  # tokens of an answer, unless it is said


@with_settings(
    *("model", "runner", "dtype", "device", "trust_remote_code", "index", "top_k", "system", "schema"),
    *("temperature", "seed", "method", "draft_model"),
)
def ask(
    settings: list[str],
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="The question. Without one, ragspec prompts for questions.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option("--corpus", metavar="FOLDER", help="Find passages in these documents; repeatable."),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--context", metavar="FILE|-", help="Answer from this whole file, or stdin; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON line with the passages instead.")] = False,
    config: ConfigIfAny = None,
    max_new_tokens: MaxNewTokens = None,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Answer a question on the terminal, and show its passages."""
    from ragspec.cli.answer_view import AnswerView, stdout
    from ragspec.cli.tables import complain_of, loaded, print_notes, stderr
    from ragspec.errors import ConfigError
    from ragspec.run.ask import checked_question, context_passages, for_questions, indexes

    set_debug(debug)
    question = None if question is None else checked_question(question)
    if context and "-" in context and question is None:
        raise ConfigError("--context -: stdin cannot be both the context and the questions; give a QUESTION")
    settings = [*overrides(override, max_new_tokens), *settings]
    by_index = any(each.startswith("retrieval.index=") for each in settings)
    if sum([bool(corpus), bool(context), by_index]) > 1:
        raise ConfigError("--index, --corpus and --context: give only one of them")
    console = stderr()
    if config is None and not any(each.startswith(("model=", "runner=fake")) for each in settings):
        settings.append("model=demo")
        console.print("note: no --model given: using demo (SmolLM2, 135M: fast, and often wrong)", style="dim")
    if config is None:
        settings.insert(0, f"sampling.default_new_tokens={LONGEST}")
    if corpus:
        settings.append(f"retrieval.index={indexes()}")
    run_config, notes, _ = settings_of(config, settings)
    notes += unused_plugins(run_config, plugin)
    if corpus:
        run_config, more = _over_corpus(run_config, corpus, console)
        notes += more
    passages = context_passages(context, partial(complain_of, console)) if context else None
    run_config = for_questions(run_config, passages=bool(passages or run_config.retrieval))
    print_notes(console, notes)
    view = None if json else AnswerView(stdout(), console)
    with quiet_pipe(), loaded(console, run_config) as pipeline:
        asked = [question] if question is not None else _questions(console)
        stops = _only_the_answer if question is None and sys.stdin.isatty() else nullcontext
        failed = count = 0
        for each in asked:
            count += 1
            with stops(console):
                failed += not _answer(pipeline, each, passages, console, view, searched=bool(run_config.retrieval))
    if not count and not sys.stdin.isatty():
        raise ConfigError("stdin holds no question; give one as an argument, or one per line")
    if failed and (question is not None or not sys.stdin.isatty()):
        raise typer.Exit(1)


def _answer(
    pipeline: Pipeline,
    question: str | RecordError,
    passages: list[dict[str, Any]] | None,
    console: Console,
    view: AnswerView | None,
    *,
    searched: bool,
) -> bool:
    """Answer one question on the screen, or as a line without a view; return whether there is an answer.

    searched: whether passages are retrieved.
    """
    from ragspec.errors import RecordError
    from ragspec.json_text import dumps

    if view is not None:
        view.begin()
    if isinstance(question, RecordError):
        lines: Iterator[Any] = iter([{"error": {"type": "RecordError", "message": str(question)}}])
    else:
        record = {"query": question} | ({} if passages is None else {"contexts": passages})
        lines = pipeline.answers([record], hear=view.hear if view is not None else None)
    for line in lines:
        if searched and line.get("contexts") == []:
            console.print("note: no passage was found; the model answers from what it knows", style="dim")
        if view is None:
            sys.stdout.write(dumps(line).decode() + "\n")
            sys.stdout.flush()
        elif "error" in line:
            console.print(f"error: {line['error']['message']}", markup=False)
        else:
            view.finish(line)
    return "error" not in line


@contextmanager
def _only_the_answer(console: Console) -> Iterator[None]:
    """Make Ctrl-C stop an answer, not the program: the model stays loaded for the next question."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("\nstopped; an empty line quits", style="dim")


def _questions(console: Console) -> Iterator[str | RecordError]:
    """Yield questions as they are typed, or the lines of a pipe; an error for a line that is no text."""
    if not sys.stdin.isatty():
        from ragspec.errors import RecordError
        from ragspec.inputs.text import TextSource

        with TextSource("-", format="text") as source:
            for row in source:
                failed = isinstance(row.value, RecordError)
                yield RecordError(f"{source.where(row.number)}: {row.value}") if failed else row.value["query"]
        return
    with suppress(ImportError):  # it lets input() edit lines and recall them
        import readline  # noqa: F401
    console.print("Ask a question; an empty line quits.", style="dim")
    with suppress(EOFError):
        while question := console.input("> ", markup=False).strip():
            yield question


def _over_corpus(config: RunConfig, corpus: list[str], console: Console) -> tuple[RunConfig, list[str]]:
    """Return a config that finds passages in these documents, and notes."""
    from ragspec.cli.tables import build_progress
    from ragspec.run.ask import indexed

    assert config.retrieval is not None
    with build_progress(console) as (report, complain):
        retrieval, notes = indexed(corpus, config.retrieval, report, complain)
    return config.model_copy(update={"retrieval": retrieval}), notes
