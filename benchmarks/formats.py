"""Whether the same records have the same answers whatever they are kept in.

    python benchmarks/formats.py RECORDS.jsonl [--config CONFIG] [--url s3://BUCKET/FOLDER]

Writes the records as JSONL (plain, .gz, .zst), CSV, TSV, Parquet, Arrow and a saved dataset, answers each with
`ragspec generate`, and prints one JSON line per format: answers, and how many are those of plain JSONL byte for byte.
--url: an address to keep the Parquet file at, too.
"""

import argparse
import csv
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIELDS = ("id", "query", "contexts")
Records = list[dict[str, Any]]


def main() -> None:
    """Convert, answer and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--config", default="sample_configs/quickstart.yaml")
    parser.add_argument("--url")
    args = parser.parse_args()
    records = [json.loads(line) for line in args.records.open()]
    records = [{key: record[key] for key in FIELDS if key in record} for record in records]
    with tempfile.TemporaryDirectory() as folder:
        inputs: list[str] = []
        for name, write in WRITERS.items():
            write(Path(folder, name), records)
            inputs.append(str(Path(folder, name)))
        if args.url:
            inputs.append(f"{args.url}/records.parquet")
            store(Path(folder, "records.parquet"), inputs[-1])
        expected: list[Any] = []
        for source in inputs:
            found = answers(args.config, source, Path(folder, "out.jsonl"))
            expected = expected or found
            same = sum(one == two for one, two in zip(found, expected, strict=True))
            print(json.dumps({"input": source.removeprefix(f"{folder}/"), "answers": len(found), "same": same}))


def answers(config: str, source: str, output: Path) -> list[Any]:
    """Return the ids, answers and prompt lengths of a run over `source`."""
    command = [sys.executable, "-m", "ragspec", "generate", "-c", config, "-i", source, "-o", str(output)]
    subprocess.run([*command, "--no-resume"], check=True, stderr=subprocess.DEVNULL)
    return [[line[key] for key in ("id", "output", "prompt_tokens")] for line in map(json.loads, output.open())]


def lines(records: Records) -> bytes:
    """Return records as JSON Lines."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def zipped(path: Path, records: Records) -> None:
    """Write .jsonl.zst."""
    import zstandard

    path.write_bytes(zstandard.ZstdCompressor().compress(lines(records)))


def delimited(delimiter: str) -> Callable[[Path, Records], None]:
    """Return what writes a table of text."""

    def write(path: Path, records: Records) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, delimiter=delimiter)
            writer.writeheader()
            for record in records:
                writer.writerow({**record, "contexts": json.dumps(record.get("contexts"))})

    return write


def parquet(path: Path, records: Records) -> None:
    """Write .parquet."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=16)


def arrow(path: Path, records: Records) -> None:
    """Write .arrow."""
    import pyarrow
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(records)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def dataset(path: Path, records: Records) -> None:
    """Save a dataset."""
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(path)


def store(path: Path, url: str) -> None:
    """Put a file at an address."""
    import fsspec

    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())


WRITERS: dict[str, Callable[[Path, Records], Any]] = {
    "records.jsonl": lambda path, records: path.write_bytes(lines(records)),
    "records.jsonl.gz": lambda path, records: path.write_bytes(gzip.compress(lines(records))),
    "records.jsonl.zst": zipped,
    "records.csv": delimited(","),
    "records.tsv": delimited("\t"),
    "records.parquet": parquet,
    "records.arrow": arrow,
    "records-dataset": dataset,
}

if __name__ == "__main__":
    main()
