"""How fast, and in how much memory, records stream through the pipeline without a model.

    python benchmarks/stream.py [RECORDS] [--input jsonl|parquet] [--output answers.jsonl|answers.parquet|...] \
        [--workers N]

Writes RECORDS (1,000,000) questions with one passage each into a temporary folder, answers them with the fake runner,
and prints one JSON line: records/s, microseconds a record, MB/s of lines, and of the process alone: its own time on a
core in microseconds a record, start included, and its peak memory. With --workers, that process only reads and writes:
a million over its own time a record is how many records/s it could bring to any number of workers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

GROUP = 10_000  # rows of a Parquet row group


def main() -> None:
    """Stream and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--input", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--output", default="answers.jsonl", help="the output's name")
    parser.add_argument("--workers", type=int, default=0, help="answer on so many (0: in one process)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, f"in.{args.input}"), Path(folder, args.output)
        (write_parquet if args.input == "parquet" else write_jsonl)(source, questions(args.records))
        config = Path(folder, "fake.yaml")
        config.write_text("runner: fake\nsampling: {max_new_tokens: 32}\n")
        command = [sys.executable, "-m", "ragspec", "generate", "-c", str(config), "-i", str(source), "-o", str(output)]
        command += ["--workers", str(args.workers)] if args.workers else []
        started = time.perf_counter()
        peak, cpu_s = watched(subprocess.Popen(command))
        seconds = time.perf_counter() - started
        answered, size = count(output), size_of(output)
        assert answered == args.records, f"{answered} answers to {args.records} records"
    figures = {"input": args.input, "output": args.output, "workers": args.workers, "records": args.records}
    figures |= {"seconds": round(seconds, 1), "records_per_s": round(args.records / seconds)}
    figures |= {"mb_per_s": round(size / seconds / 1e6, 1)}
    figures |= {"us_per_record": round(seconds / args.records * 1e6, 1)}
    figures |= {"own_us_per_record": round(cpu_s / args.records * 1e6, 1), "peak_mib": round(peak)}
    print(json.dumps(figures))


def watched(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return the most memory that a process had, in MiB, and its seconds on a core. Raises RuntimeError if it fails."""
    peak = cpu_s = 0.0
    while process.poll() is None:
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            high = [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")]
            peak = max([peak, *high])  # a process that has just ended has none
            times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # user and system
            cpu_s = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        time.sleep(0.2)
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}")
    return peak, cpu_s


def size_of(output: Path) -> int:
    """Return the bytes of an output."""
    return sum(path.stat().st_size for path in ([output] if output.is_file() else output.iterdir()) if path.is_file())


def questions(records: int) -> Iterator[dict[str, Any]]:
    """Yield that many records."""
    for number in range(records):
        passage = f"Passage number {number} of a corpus that nobody has read."
        yield {"id": f"q{number}", "query": "What is this?", "contexts": [passage]}


def write_jsonl(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Write records as JSON Lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_parquet(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Write records as Parquet, a row group at a time."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    schema = pyarrow.schema([("id", text), ("query", text), ("contexts", pyarrow.list_(text))])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(records, GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def count(output: Path) -> int:
    """Return how many answers an output has."""
    if output.is_dir():
        return int(json.loads((output / "_manifest.json").read_text())["records"])
    with output.open("rb") as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    main()
