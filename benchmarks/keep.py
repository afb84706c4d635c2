"""Keeps the figures of a finished benchmark for docs/lab/performance.md:

    python benchmarks/keep.py out/benchmark quotesum-huggingface --question "QuoteSum, 8 and 16 at once" \
        --label QuoteSum --input "QuoteSum, first 32 records" \
        --command "ragspec benchmark --config benchmarks/rag.yaml ..."

writes benchmarks/results/quotesum-huggingface.json; `python docs/generate.py` puts it into the page. Answers and
passages are left out: they are other people's texts.
"""

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
KEPT = ("machine", "versions", "ratio_interval", "runs", "ratios", "quality")


def kept(results: dict, question: str, records: str, command: str, label: str | None) -> dict:
    """Return what is kept of a results.json. label: its records, in a word or two, for the overview."""
    figures = {key: results[key] for key in KEPT if key in results}
    head = {"question": question, "input": records, "command": command}
    return head | ({"label": label} if label else {}) | figures


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what --output of the benchmark was")
    parser.add_argument("name", help="of the file in benchmarks/results/; they are shown in this order")
    parser.add_argument("--question", required=True, help="what the table answers: its title")
    parser.add_argument("--input", required=True, help="which records these were")
    parser.add_argument("--command", required=True, help="what was run")
    parser.add_argument("--label", help="the records in a word or two; with it, the table is in the overview too")
    args = parser.parse_args()
    results = json.loads((args.folder / "results.json").read_text(encoding="utf-8"))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.name}.json"
    path.write_text(json.dumps(kept(results, args.question, args.input, args.command, args.label), indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
