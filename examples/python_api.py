"""Answers in memory: load a model once and ask it as often as you like.

    python examples/python_api.py
    python examples/python_api.py --model Qwen/Qwen2.5-0.5B-Instruct

The default, `--model demo`, is the small model that `make demo` installs.
"""

import argparse

import ragspec

RECORDS = [
    {
        "id": "mill",
        "query": "Who built the mill, and when?",
        "contexts": ["The brick mill at Aldby was built by Ann Smith in 1871.", "Mills grind grain into flour."],
    },
    {"id": "grain", "query": "What do mills do?", "contexts": ["Mills grind grain into flour."]},
]


def main(argv: list[str] | None = None) -> None:
    """Answer the records and print what speculation did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="hub id, folder, .gguf file, or demo")
    parser.add_argument("--tokens", type=int, default=32, help="longest answer, in tokens")
    args = parser.parse_args(argv)

    config = ragspec.load_config(
        {
            "model": args.model,
            "sampling": {"max_new_tokens": args.tokens},
            "speculation": {"method": "context"},  # copy drafts from the passages
        }
    )
    with ragspec.Pipeline(config) as pipeline:  # loads the model
        for answer in pipeline.answers(RECORDS):
            print(f"{answer['id']}: {answer.get('output', answer.get('error'))}")
            for span in answer.get("copied", []):
                print(f"    copied from passage {span['context']}: {answer['output'][span['start'] : span['end']]!r}")
        summary = pipeline.summary
    print(f"{summary.spec.accepted} of {summary.spec.drafted} drafted tokens accepted")


if __name__ == "__main__":
    main()
