"""Mutated input lines: each of them is answered, or becomes one error line, and no other line is worse off.

Lines that are JSON still also come as the items of an array or of an object's list, and in other encodings.
"""

import json
import random
from collections import Counter
from pathlib import Path

from tests.campaign.damage import change_value, cut, flip
from tests.campaign.forked import ragspec

FILE = 500  # lines of one
RECORDS = [
    {"id": "q1", "query": "Why?", "contexts": ["a passage", {"id": "d7", "title": "T", "text": "x", "score": 0.9}]},
    {"id": "q2", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
    {"id": "q3", "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]},
    {"id": "q4", "prompt": "Why?", "metadata": {"source": "s"}, "tag": [1, 2.5, None, True]},
    {"custom_id": "q5", "body": {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 20, "top_p": 0.5}},
    {"custom_id": "q6", "body": {"prompt": "Why?", "temperature": 0.3, "stop": ["."], "seed": 4, "n": 1}},
    {
        "id": "q8",
        "query": "Why?",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
    },
    {"id": "q9", "query": "Why?", "structured": {"choice": ["yes", "no"]}, "chat_template_kwargs": {"thinking": False}},
    {
        "custom_id": "q10",
        "body": {
            "messages": [{"role": "developer", "content": "S."}, {"role": "user", "content": "Why?"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "none",
            "response_format": {"type": "json_object"},
            "logit_bias": {"7": 1.5},
            "stop_token_ids": [3],
            "min_tokens": 1,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "logprobs": None,
            "parallel_tool_calls": True,
        },
    },
    {"id": "q7", "error": {"type": "RecordError", "message": "of an earlier command"}},
]
KEYS = ["id", "query", "body", "contexts", "prompt", "metadata", "max_tokens", "zz", "type", "schema", "tools", "stop"]
VALUES = [
    *(None, True, False, 0, -1, 7, 2**53, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324),
    *("", " ", "x", "\0", "\ud800", "\u2028\u0085", "é" * 3000, [], {}, [[]], [{}], {"": ""}, {"id": {"id": 1}}),
]
BYTES = [
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1e",
    b"\r",
    b"\n",
    b"\x0b",
    b"\x0c",
    b"\x85",
    b'"',
    b"\\",
]


def campaign(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Send `count` lines through the fake runner; return what became of them."""
    totals: Counter[str] = Counter()
    for number, start in enumerate(range(0, count, FILE)):
        chance = random.Random(f"{seed} lines {number}")
        lines = [mutated(chance, place) for place in range(min(FILE, count - start))]
        form = chance.choice(list(FORMS)) if number else "lines"
        lines = lines if form == "lines" else [line for line in lines if _is_json(line)]
        content = FORMS[form](lines, chance.choice([b"", b"\n"]))
        numbers = [at for at, line in enumerate(b"\n".join(lines).split(b"\n"), 1) if line.strip()]
        if form in ("array", "object"):
            numbers = list(range(1, len(lines) + 1))
        totals += _check(folder / f"lines-{number}", content, numbers, f"{form}: {chance.choice(NAMES)}")
        totals[form] += 1
    return dict(totals)


def _is_json(line: bytes) -> bool:
    """Return whether a line is JSON for Python, and text: brackets and quotes show where it ends."""
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return b"\n" not in line


FORMS = {
    "lines": lambda lines, end: b"\n".join(lines) + end,
    "array": lambda lines, end: b"[%s]" % b",\n".join(lines) + end,
    "object": lambda lines, end: b'{"version": 1, "data":\n [%s], "n": [0]}' % b" ,".join(lines) + end,
    "utf-16": lambda lines, end: (b"\n".join(lines) + end).decode().encode("utf-16", "surrogatepass"),
    "utf-16-be": lambda lines, end: (b"\n".join(lines) + end).decode().encode("utf-16-be", "surrogatepass"),
    "utf-8-sig": lambda lines, end: b"\xef\xbb\xbf" + b"\n".join(lines) + end,
}
NAMES = ["in.jsonl", "IN.JSON", "in.csv", "in.gz", "in"]


def mutated(chance: random.Random, place: int) -> bytes:
    """Return a line: a good one now and then, else one that was damaged once or several times."""
    record = json.loads(json.dumps(chance.choice(RECORDS)))
    for key in ("id", "custom_id"):
        if key in record and chance.random() < 0.9:  # the others have an id that others have too
            record[key] = f"{record[key]}-{place}"
    for _ in range(chance.choice([0, 0, 1, 1, 3])):
        change_value(chance, record, VALUES, KEYS, 0.6)
    raw = json.dumps(record, ensure_ascii=chance.random() < 0.5, allow_nan=True).encode(errors="surrogatepass")
    for _ in range(chance.choice([0, 0, 0, 1, 1, 3])):
        raw = chance.choice(DAMAGES)(chance, raw)
    return raw


def _insert(chance, raw):
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + chance.choice(BYTES) + raw[at:]


def _nest(chance, raw):
    depth = chance.choice([5, 200, 300, 1100, 20_000])
    opened, closed = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opened * depth + (b"1" if closed == b"}" else b"") + closed * depth
    return raw.replace(b":", b': %s, "b": ' % inner, 1)


def _number(chance, raw):
    return raw.replace(b":", b': %s, "b": ' % chance.choice([b"1e999", b"-1e999", b"9" * 5000, b"NaN", b"Infinity"]), 1)


def _repeat(chance, raw):
    return raw + raw if chance.random() < 0.5 else raw.replace(b"{", b'{"id": "other", ', 1)


DAMAGES = [flip, flip, cut, _insert, _nest, _number, _repeat]


def _check(folder: Path, content: bytes, numbers: list[int], form: str) -> Counter:
    """Answer a file, twice. numbers: of the lines or records in it that are to be answered. form: its, and its name."""
    folder.mkdir()
    name = form.partition(": ")[2] if not form.startswith("lines") else "in.jsonl"
    (folder / name).write_bytes(content)
    (folder / "c.yaml").write_text("runner: fake\nrunner_args: {context_length: 4000, reverse: true}\n")
    command = ["generate", "-c", "c.yaml", "-i", name, "-o", "out.jsonl"]
    done = ragspec(folder, *command)
    where = f"{folder}, {form}: {done.stderr}"
    assert done.code in (0, 1), where
    assert "Traceback" not in done.stderr, where
    written = read_jsonl_bytes(folder / "out.jsonl")
    assert len(written) == len(numbers), f"{len(written)} output lines for {len(numbers)} lines; {where}"
    for line, number in zip(written, numbers, strict=True):
        assert ("output" in line) != ("error" in line), f"{line}; {where}"
        assert line.get("line", number) == number, f"{line} stands for line {number}; {where}"
    before = (folder / "out.jsonl").read_bytes()
    again = ragspec(folder, *command)
    assert again.code == done.code, f"{folder}: {again.stderr}"
    assert (folder / "out.jsonl").read_bytes() == before, f"{folder}: a second run changed the output"
    failed = sum("error" in line for line in written)
    return Counter(lines=len(numbers), answered=len(numbers) - failed, error_lines=failed, files=1)


def read_jsonl_bytes(path):
    """Return a file's values; lines end with a line feed and nothing else."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
