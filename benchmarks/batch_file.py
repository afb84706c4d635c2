"""A file of OpenAI's Batch API with every field that ragspec does, and two answers to it compared.

    python benchmarks/batch_file.py make batch.jsonl [LINES]
    ragspec run-batch -i batch.jsonl -o ours.jsonl --model MODEL
    vllm run-batch -i batch.jsonl -o theirs.jsonl --model MODEL
    python benchmarks/batch_file.py compare batch.jsonl ours.jsonl theirs.jsonl

`compare` prints one JSON line per group of settings: lines, both answered, the same texts, the same logprobs (to a
hundredth), and what only one of the two answered, with the other's reason.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COUNTRIES = ["France", "Japan", "Kenya", "Peru", "Norway", "India", "Egypt", "Chile", "Nepal", "Cuba"]
ASKED = ["What is the capital of {}?", "Name a river in {}, and say where it flows.", "Describe the climate of {}."]
CALL = {"id": "call_1", "type": "function", "function": {"name": "capital", "arguments": '{"of": "Mars"}'}}
TOOLS = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Mars has none."},
]
NOTHING: dict[str, Any] = {
    "n": 1, "tools": None, "functions": None, "response_format": {"type": "text"}, "stream": False, "seed": None,
    "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "stop": [],
    "user": "", "metadata": {}, "store": False,
}  # fmt: skip
GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {"28": -100, "30": -100}},
    "stop": {"stop": [".", "\n"]},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "means nothing": NOTHING,
    "all": {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "logprobs": True,
        "top_logprobs": 1,
        "user": "u",
        "seed": 3,
    },
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    "json": {"response_format": {"type": "json_object"}},
}


def lines(count: int) -> Iterator[dict[str, Any]]:
    """Yield that many lines, the groups in turn."""
    groups = list(GROUPS)
    for number in range(count):
        group = groups[number % len(groups)]
        place = number // len(groups)
        question = ASKED[place % len(ASKED)].format(COUNTRIES[(number + place) % len(COUNTRIES)])
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if place % 4 == 1:
            messages.insert(0, {"role": "system", "content": "Answer in one sentence."})
        if place % 4 == 2:
            messages[-1] = {"role": "user", "name": "Ann", "content": [{"type": "text", "text": question}]}
        if place % 4 == 3:
            messages[:0] = [{"role": "user", "content": "What is the capital of Mars?"}, *TOOLS]
        body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0} | GROUPS[group]
        yield {"custom_id": f"{group}/{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def compare(asked: Path, ours: Path, theirs: Path) -> None:
    """Print what is the same."""
    answers = [{line["custom_id"]: line for line in map(json.loads, path.open())} for path in (ours, theirs)]
    found: dict[str, Counter[str]] = {}
    for key in (json.loads(line)["custom_id"] for line in asked.open()):
        seen = found.setdefault(key.partition("/")[0], Counter())
        seen["lines"] += 1
        mine, other = (side[key] for side in answers)
        if not (answered(mine) and answered(other)):
            for name, line, twin in (("only ours", mine, other), ("only theirs", other, mine)):
                if answered(line):
                    seen[f"{name}: {reason(twin)}"] += 1
            seen["neither"] += not (answered(mine) or answered(other))
            continue
        seen["both"] += 1
        seen["same texts"] += texts(mine) == texts(other)
        if logprobs(mine) or logprobs(other):
            seen["same logprobs"] += close(logprobs(mine), logprobs(other))
    for group, seen in found.items():
        print(json.dumps({"group": group, **{key: count for key, count in seen.items() if count}}))


def answered(line: dict[str, Any]) -> bool:
    """Return whether a line has an answer."""
    return bool(line["response"] and line["response"].get("status_code") == 200)


def reason(line: dict[str, Any]) -> str:
    """Return why it has none."""
    error = line["error"]
    error = error.get("error", error) if isinstance(error, dict) else {"message": error}
    return re.sub(r"^\S+:\d+: ", "", str(error["message"]))[:120]


def texts(line: dict[str, Any]) -> list[str]:
    """Return its answers."""
    return [choice["message"]["content"] for choice in line["response"]["body"]["choices"]]


def logprobs(line: dict[str, Any]) -> list[float]:
    """Return the logprobs of its first answer's tokens."""
    told = line["response"]["body"]["choices"][0]["logprobs"]
    return [token["logprob"] for token in told["content"]] if told else []


def close(mine: list[float], other: list[float]) -> bool:
    """Return whether two lists of logprobs are the same to a hundredth."""
    return len(mine) == len(other) and all(abs(one - two) < 0.01 for one, two in zip(mine, other, strict=True))


def main() -> None:
    """Make or compare."""
    verb, *rest = sys.argv[1:] or ["help"]
    if verb == "make":
        count = int(rest[1]) if len(rest) > 1 else 200
        Path(rest[0]).write_text("".join(json.dumps(line) + "\n" for line in lines(count)))
    elif verb == "compare":
        compare(*map(Path, rest))
    else:
        print(__doc__)


if __name__ == "__main__":
    main()
