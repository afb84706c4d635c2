"""Two workers answer one file, each with its own copy of the model. Needs `pip install "ragspec[ray]"`.

    python examples/ray_workers.py
    python examples/ray_workers.py --workers 8 --address auto      # on a running Ray cluster

The output is the same file that one process would write, even if a worker dies.
"""

import argparse
from pathlib import Path

import ragspec

SAMPLE = Path(__file__).resolve().parent.parent / "sample_data" / "questions.jsonl"


def main(argv: list[str] | None = None) -> None:
    """Answer the questions and print each worker's share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", default=str(SAMPLE))
    parser.add_argument("--output", default="out/workers.jsonl")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--address", default="local", help="local, auto, HOST:PORT or ray://HOST:PORT")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer, in tokens")
    args = parser.parse_args(argv)

    config = ragspec.load_config(
        {
            "model": args.model,
            "input": args.input,
            "output": args.output,
            "sampling": {"max_new_tokens": args.tokens},
            "speculation": {"method": "context"},
            "scale": {"workers": args.workers, "address": args.address},
        }
    )
    summary = ragspec.generate(config)
    print(f"{summary.records} answered in {summary.generate_s:.1f} s: {args.output}")
    for worker in summary.workers:
        print(f"  {worker.name} on {worker.host}: {worker.records} records, {worker.output_tokens} tokens")


if __name__ == "__main__":
    main()
