"""`ragspec run-batch`: OpenAI's batch files in and out, with the flags of `vllm run-batch`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ragspec.cli.flags import method_for, with_settings
from ragspec.cli.generate import run
from ragspec.cli.options import (
    Debug,
    Limit,
    LogEvery,
    LogFormat,
    MaxFailures,
    Metrics,
    Plugin,
    Quiet,
    Resume,
    RetryFailed,
    Set,
    Stats,
    Tracing,
    Verbose,
    failures_allowed,
    set_debug,
)
from ragspec.cli.run_log import RunLog

# what a body means that does not say: OpenAI's temperature, and room for a long answer
SAMPLING = {"temperature": 1.0, "default_new_tokens": 1024}


@with_settings("model", "runner", "method", "dtype", "revision", "seed", "trust_remote_code")
def run_batch(
    settings: list[str],
    input: Annotated[
        str,
        typer.Option("--input", "--input-file", "-i", metavar="FILE", help="OpenAI batch lines: a file or a URL."),
    ],
    output: Annotated[
        str, typer.Option("--output", "--output-file", "-o", metavar="PATH", help="Where OpenAI output lines go.")
    ],
    config: Annotated[
        str | None, typer.Option("--config", "-c", metavar="FILE", help="YAML config for everything else.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name in the output lines; by default, the model's own.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Batch size.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest answer, in tokens, if a body sets none (1024).")
    ] = None,
    limit: Limit = None,
    resume: Resume = True,
    retry_failed: RetryFailed = False,
    max_failures: MaxFailures = None,
    stats: Stats = None,
    plugin: Plugin = None,
    metrics: Metrics = None,
    tracing: Tracing = False,
    log_format: LogFormat = None,
    log_every: LogEvery = 30,
    quiet: Quiet = False,
    verbose: Verbose = False,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Answer an OpenAI batch file; run again to continue after an interruption."""
    from ragspec.cli.tables import stderr
    from ragspec.config.load import config_of, read_config
    from ragspec.config.translate.autogluon import is_autogluon

    set_debug(debug)
    raw, said = read_config(config) if config else ({}, [])
    given = {
        "sampling.max_new_tokens": max_tokens,
        "runner_args.batch_size": max_num_seqs,
        "output.model": served_model_name,
    }
    flags = [*settings, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    settings = [*(override or ()), *flags, "output.format=openai"]
    if not is_autogluon(raw):
        raw["sampling"] = SAMPLING | (raw.get("sampling") or {})
        settings = [*method_for([*_overrides_of(raw), *settings], config=False), *settings]
    run_config, notes = config_of(raw, config or "run-batch", settings, input=input, output=output)
    allowed = failures_allowed(max_failures)
    log = RunLog(stderr(), quiet=quiet, verbose=verbose, every_s=log_every)
    watch: dict[str, Any] = {"metrics": metrics, "tracing": tracing, "stats_path": stats}
    run(run_config, said + notes, allowed, log, limit=limit, resume=resume, retry_failed=retry_failed, **watch)


def _overrides_of(raw: dict[str, Any]) -> list[str]:
    """Return a config's sections, and its runner's arguments, as overrides."""
    args = raw.get("runner_args")
    within = {f"runner_args.{key}": value for key, value in args.items()} if isinstance(args, dict) else {}
    return [f"{key}={value}" for key, value in {**raw, **within}.items() if value is not None]
