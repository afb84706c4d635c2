"""JSON answers that can only cite and quote the passages of their own record.

    python examples/structured_answers.py

Every answer that is not cut off is valid JSON; its `sources` are ids of passages in the prompt, and its `quote` appears
word for word in one of them. Keys and brackets that the grammar forces are drafted, too.
"""

import argparse
import json

import ragspec

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 60},
        "quote": {"$quote": True, "maxLength": 60},
        "sources": {"type": "array", "items": {"enum": {"$contexts": "id"}}, "minItems": 1, "maxItems": 2},
    },
    "required": ["answer", "quote", "sources"],
    "additionalProperties": False,
}
PASSAGES = [
    {"id": "d1", "text": "The brick mill at Aldby was built by Ann Smith in 1871."},
    {"id": "d2", "text": "Mills grind grain into flour. The one at Aldby closed in 1953."},
]
QUESTIONS = ["Who built the mill?", "When did the mill close?"]


def main(argv: list[str] | None = None) -> None:
    """Answer the questions and print the parsed answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer, in tokens")
    args = parser.parse_args(argv)

    config = ragspec.load_config(
        {
            "model": args.model,
            "prompt": {"system": "Answer as JSON: answer, quote (word for word), sources (ids of passages)."},
            "sampling": {"max_new_tokens": args.tokens},
            "structured": {"json_schema": SCHEMA},
            "speculation": {"method": "context"},
        }
    )
    with ragspec.Pipeline(config) as pipeline:
        for answer in pipeline.answers({"query": query, "contexts": PASSAGES} for query in QUESTIONS):
            print(json.dumps(answer["parsed"]) if answer["valid"] else f"cut off: {answer['output']}")


if __name__ == "__main__":
    main()
