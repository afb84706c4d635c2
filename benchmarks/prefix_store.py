"""What runner_args.prefix_store saves: runs without a store, the run that fills one, and the next, which reads it.

    python benchmarks/long_shared.py corpus.jsonl corpus_queries.jsonl 8 > long.jsonl
    python benchmarks/prefix_store.py long.jsonl [--passes 3] [FLAGS OF ragspec generate]

Runs take turns, each in a process of its own, and write answers as they finish. Prints one JSON line for each kind, of
medians: seconds from the start of the process to the first answer and to its end, seconds of answering (after loading
and warm-up), prompt tokens computed and loaded, and how many answers are those of the first run without a store.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

KINDS = ("without", "first", "second")


def main() -> None:
    """Run and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records")
    parser.add_argument("--passes", type=int, default=3)
    args, flags = parser.parse_known_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(args.passes):
        with tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                found[kind].append(answered(args.records, flags, Path(folder), stored=kind != "without"))
                print(kind, {key: value for key, value in found[kind][-1].items() if key != "answers"}, file=sys.stderr)
    expected = found["without"][0]["answers"]
    for kind, runs in found.items():
        figures: dict[str, Any] = {"kind": kind, "passes": len(runs), "answers": len(expected)}
        for key in runs[0].keys() - {"answers"}:
            figures[key] = round(median(run[key] for run in runs), 3)
        same = [sum(run["answers"][key] == text for key, text in expected.items()) for run in runs]
        print(json.dumps(figures | {"same_answers": min(same)}))


def answered(records: str, flags: list[str], folder: Path, *, stored: bool) -> dict[str, Any]:
    """Answer all records in a new process; return its figures."""
    stats = folder / "stats.json"
    command = [sys.executable, "-m", "ragspec", "generate", "-c", str(Path(__file__).with_name("rag.yaml"))]
    command += ["-i", records, "-o", "-", "--stats", str(stats), "-q", "--order", "finish", *flags]
    command += ["--set", f"runner_args.prefix_store={folder / 'store'}"] if stored else []
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        first_answer_s = time.perf_counter() - started
        lines = [json.loads(line) for line in [first, *process.stdout] if line]
        process_s = time.perf_counter() - started
    assert process.returncode == 0, f"exit code {process.returncode}"
    told = json.loads(stats.read_text())
    return {
        "first_answer_s": first_answer_s,
        "process_s": process_s,
        "answering_s": told["generate_s"],
        "computed": told["runner"]["prompt_tokens_computed"],
        "loaded": told["runner"].get("prefix_store", {}).get("loaded_tokens", 0),
        "answers": {line["id"]: line["output"] for line in lines},
    }


if __name__ == "__main__":
    main()
