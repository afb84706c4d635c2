"""One method in a process of its own: loads once, then answers the whole input each time it is told to go.

Speaks JSON lines: a task in, then "go" per pass or "details"; `ready`, an answer to each, or `error` out. A pass is
the pipeline itself, so what is timed is what `ragspec generate` does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import orjson

from ragspec.benchmark.details import acceptance_by_record, roofline, samples
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig
from ragspec.errors import RagspecError
from ragspec.inputs.base import open_source
from ragspec.outputs.journal import Journal
from ragspec.run.local import LocalPass
from ragspec.run.session import prepare
from ragspec.runners.base import Runner


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Do one task: load, say `ready`, then one pass per "go" of `source` until it ends."""

    def say(message: dict[str, Any]) -> None:
        sink.write(orjson.dumps(message) + b"\n")
        sink.flush()

    try:
        task = orjson.loads(source.readline())
        config = build_config(task["config"], task["name"])
        with config.veil().over_errors():
            _answer(config, task, source, say)
    except RagspecError as error:
        say({"error": str(error), "exit_code": error.exit_code})


def _answer(config: RunConfig, task: dict[str, Any], source: IO[bytes], say: Callable[[dict[str, Any]], None]) -> None:
    """Load what `config` names, and do what `source` says."""
    session = prepare(config)
    runner = session.runner
    started = time.perf_counter()
    with runner:
        load_s = time.perf_counter() - started
        started = time.perf_counter()
        runner.warm_up()
        warmup_s = time.perf_counter() - started
        say(
            {
                "ready": session.about(),
                "load_s": load_s,
                "warmup_s": warmup_s,
                "notes": [config.veil()(note) for note in runner.notes],
                "remembers": runner.remembers,
            }
        )
        output = Path(task["output"])
        for command in source:
            if command.strip() == b"details":
                say({"details": details(runner, output)})
                continue
            output.unlink(missing_ok=True)
            with open_source(config.input or "") as rows, Journal(str(output)) as journal:
                executor = LocalPass(session, rows, journal, limit=task["limit"], keep_details=True)
                for _ in executor.stream():
                    pass
            # only now is it known: a runner may choose it by the records
            say({"result": executor.summary.to_json() | {"batch_size": runner.about().get("batch_size")}})


def details(runner: Runner, output: Path) -> dict[str, Any]:
    """Return what the report shows beside speeds; nothing of it is timed."""
    ran = runner.about()
    lines = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    answers = [line for line in lines if "token_ids" in line]
    return {
        "samples": samples(answers, runner.tokenizer),
        "acceptance_by_record": acceptance_by_record(answers),
        "step_cost": ran.get("step_cost"),
        "roofline": roofline(ran["device"], ran["dtype"]) if ran.get("step_cost") else None,
    }


if __name__ == "__main__":
    # libraries may print: only our own lines go to the real stdout
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, private)
