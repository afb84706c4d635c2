"""Do structured answers have their form? Checked from outside, with jsonschema, on many records and three schemas.

    python benchmarks/validity.py RECORDS.jsonl [--limit 200] [--runner huggingface] [--model demo] [--new 96]
                                   [--schema cited]

Each schema is answered without speculation and with method context, greedy and sampled. Prints a line for each run:
answers that are whole, those of them that validate (a quote must be found in a passage, a source be one of them), those
that were cut off, and, against plain decoding with the same sampling, how many texts are the same. Exits with 1 if any
whole answer does not validate. Needs jsonschema.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jsonschema import ValidationError, validate

SENTENCE = {"type": "string", "maxLength": 120}
SCHEMAS: dict[str, dict[str, Any]] = {
    "cited": {
        "answer": SENTENCE,
        "quotes": {"type": "array", "items": {"$quote": True, "maxLength": 80}, "minItems": 1, "maxItems": 2},
        "sources": {"type": "array", "items": {"enum": {"$contexts": "id"}}, "minItems": 1, "maxItems": 2},
    },
    "judged": {
        "verdict": {"enum": ["yes", "no", "unknown"]},
        "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "reason": SENTENCE,
    },
    "facts": {
        "facts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 30}, "year": {"type": ["integer", "null"]}},
                "required": ["name", "year"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 3,
        }
    },
}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


def main() -> int:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--runner", default="huggingface")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--schema", action="append", choices=sorted(SCHEMAS), help="those to try; all by default")
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer at most")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in args.schema or SCHEMAS:
            properties = SCHEMAS[name]
            for sampling in SAMPLINGS:
                texts: dict[str, dict[str, str]] = {}
                for method in ("none", "context"):
                    lines = answered(args, Path(folder), properties, sampling, method)
                    whole = [line for line in lines if line["finish_reason"] == "stop"]
                    bad = [line["id"] for line in whole if not is_valid(line, properties, args.records)]
                    wrong += len(bad)
                    texts[method] = {line["id"]: line["output"] for line in lines}
                    same = sum(texts["none"].get(key) == text for key, text in texts[method].items())
                    found = {"runner": args.runner, "schema": name, "sampling": sampling, "method": method}
                    found |= {"answers": len(lines), "whole": len(whole), "valid": len(whole) - len(bad)}
                    print(json.dumps(found | {"cut_off": len(lines) - len(whole), "same_as_none": same}), flush=True)
    return 1 if wrong else 0


def answered(args: argparse.Namespace, folder: Path, properties: Any, sampling: str, method: str) -> list[Any]:
    """Return the output lines of one run."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    config = {
        "model": args.model,
        "runner": args.runner,
        "runner_args": {"max_model_len": 2048, "enforce_eager": True} if args.runner == "vllm" else {},
        "input": args.records,
        "output": str(folder / "out.jsonl"),
        "prompt": {"source": "query", "system": f"Answer as JSON with the keys {', '.join(properties)}."},
        "structured": {"json_schema": schema},
        "sampling": {"max_new_tokens": args.new, **SAMPLINGS[sampling]},
        "speculation": {"method": method},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "ragspec", "generate", "--config", str(path), "--no-resume"]
    subprocess.run([*command, "--limit", str(args.limit)], check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def is_valid(line: dict[str, Any], properties: Any, records: str) -> bool:
    """Return whether an answer validates, its quotes and sources by the passages that were in its prompt."""
    passages = _passages(records, line["id"])
    answer = json.loads(line["output"])
    parts = json.loads(json.dumps(properties))
    if "quotes" in parts:
        parts["quotes"]["items"] = {"type": "string"}
        parts["sources"]["items"] = {"enum": line["contexts"]}
        if not all(any(quote in passages[key] for key in line["contexts"]) for quote in answer["quotes"]):
            return False
    schema = {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
    try:
        validate(answer, schema)
    except ValidationError:
        return False
    return bool(line["valid"]) and line["parsed"] == answer


def _passages(records: str, name: str, known: dict[str, dict[str, str]] = {}) -> dict[str, str]:  # noqa: B006 - read once
    if not known:
        for number, line in enumerate(Path(records).read_text().splitlines(), 1):
            record = json.loads(line)
            found = [each if isinstance(each, dict) else {"text": each} for each in record.get("contexts", [])]
            texts = {str(each.get("id", place)): each["text"] for place, each in enumerate(found, 1)}
            known[str(record.get("id", number))] = texts
    return known[name]


if __name__ == "__main__":
    sys.exit(main())
