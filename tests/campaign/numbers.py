"""Random numbers of any length: each of them comes out digit by digit, or its record says by name why not.

They go through records (metadata, an unknown field, a score), a CSV, a config's schema, and the grammar of a schema.
"""

import csv
import json
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path

from ragspec.errors import RecordError
from ragspec.json_text import dumps, loads
from ragspec.structured.form import Form
from ragspec.structured.grammars import is_complete, problem_of
from tests.campaign.forked import ragspec

FILE = 200  # records of one
NEAR = [2**53, 2**63, 2**64, 10**15, 10**16, 10**17, 10**19, 10**20, 10**21, 0]
LIMITS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]


def campaign(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Send `count` numbers through every place; return what became of them."""
    totals: Counter[str] = Counter(numbers=count)
    for number, start in enumerate(range(0, count, FILE)):
        chance = random.Random(f"{seed} numbers {number}")
        texts = [literal(chance) for _ in range(min(FILE, count - start))]
        place = folder / f"numbers-{number}"
        place.mkdir()
        (place / "c.yaml").write_text("runner: fake\n")
        _check_records(place, texts)
        _check_table(place, texts)
        for text in texts:
            totals += _check_schema(text, chance)
    return dict(totals)


def literal(chance: random.Random) -> str:
    """Return a number as JSON writes it."""
    if chance.random() < 0.3:
        text = str(abs(chance.choice(NEAR) + chance.randrange(-3, 4)))
    else:
        text = str(chance.randrange(10 ** chance.choice([1, 5, 15, 16, 17, 18, 19, 20, 25, 60, 310])))
    if chance.random() < 0.4:
        text += "." + "".join(chance.choices("0123456789", k=chance.choice([1, 2, 15, 17, 30])))
    if chance.random() < 0.2:
        text += chance.choice("eE") + chance.choice(["", "+", "-"]) + str(chance.choice([0, 1, 22, 99, 308, 324, 5000]))
    return ("-" if chance.random() < 0.3 else "") + text


def _check_records(folder: Path, texts: list[str]) -> None:
    rows = [
        f'{{"id": "q{at}", "query": "Why?", "metadata": {{"n": {text}}}, "zz": [{text}], '
        f'"contexts": [{{"text": "x", "id": "p", "score": {text}}}]}}'
        for at, text in enumerate(texts)
    ]
    (folder / "in.jsonl").write_text("\n".join(rows) + "\n")
    done = ragspec(folder, "generate", "-c", "c.yaml", "-i", "in.jsonl", "-o", "out.jsonl")
    assert done.code in (0, 1), f"{folder}: {done.stderr}"
    lines = [json.loads(line, parse_int=Decimal, parse_float=Decimal) for line in _lines(folder / "out.jsonl")]
    assert len(lines) == len(texts), f"{folder}: {done.stderr}"
    for text, line in zip(texts, lines, strict=True):
        where = f"{folder}: {text} became {line}"
        if "error" in line:
            assert "score" in line["error"]["message"], where
            continue
        assert line["metadata"]["n"] == Decimal(text), where
        assert line["metadata"]["zz"] == [Decimal(text)], where


def _check_table(folder: Path, texts: list[str]) -> None:
    """Cells stay text; the columns that ids and questions come from too."""
    with (folder / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "query", "n"])
        writer.writerows((f"{at}.{text}", text, text) for at, text in enumerate(texts))
    done = ragspec(folder, "generate", "-c", "c.yaml", "-i", "in.csv", "-o", "table.jsonl")
    assert done.code == 0, f"{folder}: {done.stderr}"
    for at, (text, raw) in enumerate(zip(texts, _lines(folder / "table.jsonl"), strict=True)):
        line = json.loads(raw)
        assert (line["id"], str(line["metadata"]["n"])) == (f"{at}.{text}", text), f"{folder}: {text} became {raw}"


def _check_schema(text: str, chance: random.Random) -> Counter:
    """A schema's number is the one that was written, to the grammar too, or is refused by name."""
    key = chance.choice([*LIMITS, "const", "enum"])
    raw = f'{{"type": "number", "{key}": {f"[{text}]" if key == "enum" else text}}}'
    schema = loads(raw)
    kept = json.loads(dumps(schema), parse_int=Decimal, parse_float=Decimal)[key]
    assert (kept[0] if key == "enum" else kept) == Decimal(text), f"{raw} became {dumps(schema)}"
    grammar, problem = _grammar(schema)
    if problem:
        assert any(word in problem for word in (key, "inimum", "multiple", "nested")), f"{raw}: {problem}"
        return Counter(refused=1)
    if key in ("const", "enum"):
        said = [each for each in _spellings(text) if is_complete(grammar, each)]
        assert said, f"{raw}: the grammar does not take it"
        assert not is_complete(grammar, said[0] + "1"), f"{raw}: the grammar takes more than {said[0]}"
    return Counter(kept=1)


def _grammar(schema: dict) -> tuple[str, str]:
    """Return a schema's grammar, or "" and why it has none."""
    try:
        grammar = Form("json_schema", schema).grammar()
    except RecordError as error:
        return "", str(error)
    return grammar, problem_of(grammar)


def _spellings(text: str) -> set[str]:
    """Return how JSON may write the number `text`."""
    value = Decimal(text) or Decimal(0)
    found = {text, dumps(loads(text)).decode(), *([] if value else ["-0"])}
    if abs(value.adjusted()) < 400:
        plain = f"{value:f}"
        found |= {plain, plain.partition(".")[0] if value == value.to_integral_value() else plain.rstrip("0")}
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
