"""Compare two models, or one model with two settings, on the same questions: which answers better?

    python examples/evaluate_two_models.py                          # the demo model in float32 and in bfloat16
    python examples/evaluate_two_models.py --models Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-1.5B-Instruct --set ""

The records need a `reference`. Differences are second minus first, record by record, with 95% intervals.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import ragspec

SAMPLE = Path(__file__).resolve().parent.parent / "sample_data" / "questions.jsonl"


def main(argv: list[str] | None = None) -> None:
    """Answer with both models and compare the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs=2, default=["demo", "demo"], metavar=("FIRST", "SECOND"))
    parser.add_argument("--set", default="runner_args.dtype=bfloat16", help="a setting of the second model")
    parser.add_argument("--input", default=str(SAMPLE))
    parser.add_argument("--output", default="out/models", help="folder for the answers")
    parser.add_argument("--limit", type=int, help="answer only the first N records")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer, in tokens")
    args = parser.parse_args(argv)

    files = [f"{args.output}/first.jsonl", f"{args.output}/second.jsonl"]
    for model, output, settings in zip(args.models, files, ([], [args.set] if args.set else []), strict=True):
        raw = {"model": model, "input": args.input, "output": output, "speculation": {"method": "context"}}
        config = ragspec.load_config(raw, [f"sampling.max_new_tokens={args.tokens}", *settings])
        ragspec.generate(config, limit=args.limit, resume=False)

    command = [sys.executable, "-m", "ragspec", "evaluate", files[1], "--against", files[0]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # the table goes to stderr
    found = json.loads(done.stdout)["against"]["differences"]["f1"]
    print(f"F1, second minus first: {found['mean']:+.1f} ({found['low']} to {found['high']})")


if __name__ == "__main__":
    main()
