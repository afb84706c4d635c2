"""Numbers beyond 64 bits, decimals beyond doubles: from every input to prompt, metadata and output, digit by digit."""

import json
from decimal import Decimal

import pytest

from ragspec.config.load import build_config
from ragspec.run.generate import generate as run
from ragspec.run.local import Pipeline
from tests.conftest import read_jsonl

BIG, DECIMAL = "12345678901234567890123", "0.12345678901234567890123"
RECORD = (
    f'{{"id":{BIG},"query":"x","big":{BIG},"deep":{{"list":[{DECIMAL},-{BIG}]}},"small":1e-400,"large":1e400,'
    f'"contexts":[{{"id":{BIG},"text":"t","score":{DECIMAL}}}]}}'
)
TEMPLATE = "{{ metadata.big }} {{ metadata.deep.list[0] }} {{ contexts[0].id }} {{ contexts[0].score }}"
TEXT = f"{BIG} {DECIMAL} {BIG} {DECIMAL}"
METADATA = f'{{"big":{BIG},"deep":{{"list":[{DECIMAL},-{BIG}]}},"small":1e-400,"large":1e400}}'


def answered(folder, name, content, output="out.jsonl", **more):
    (folder / name).write_text(content)
    raw = {"runner": "fake", "sampling": {"max_new_tokens": 500}, "prompt": {"template": TEMPLATE}, **more}
    run(build_config({**raw, "input": str(folder / name), "output": str(folder / output)}))
    return folder / output


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", RECORD + "\n"),
        ("in.json", f"[{RECORD}]"),
        ("indented.json", json.dumps(["@"], indent=1).replace('"@"', RECORD)),
        (
            "in.csv",
            f'id,query,big,deep,small,large,contexts\n{BIG},x,"[{BIG}]","{{""list"":[{DECIMAL},-{BIG}]}}","[1e-400]","[1e400]","[{{""id"":{BIG},""text"":""t"",""score"":{DECIMAL}}}]"\n',
        ),
    ],
)
def test_numbers_keep_their_digits(tmp_path, name, content):
    more = {"prompt": {"template": TEMPLATE.replace("metadata.big", "metadata.big[0]")}} if name == "in.csv" else {}
    output = answered(tmp_path, name, content, **more)
    text = output.read_text()
    metadata = (
        METADATA.replace(f'"big":{BIG}', f'"big":[{BIG}]').replace("1e-400", "[1e-400]").replace("1e400", "[1e400]")
        if more
        else METADATA
    )
    assert f'"metadata":{metadata}' in text
    (line,) = read_jsonl(output)
    assert (line["id"], line["output"], line["contexts"]) == (BIG, TEXT, [BIG])
    assert f'"context_scores":[{DECIMAL}]' in text


def test_a_resumed_run_knows_such_lines(tmp_path):
    output = answered(tmp_path, "in.jsonl", RECORD + "\n")
    before = output.read_text()
    answered(tmp_path, "in.jsonl", RECORD + "\n")
    assert output.read_text() == before


def test_parquet_holds_them_as_text(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = answered(tmp_path, "in.jsonl", RECORD + "\n", output="out.parquet")
    (row,) = parquet.read_table(next(folder.glob("part-*.parquet"))).to_pylist()
    assert (row["id"], row["metadata"]) == (BIG, METADATA)


def test_a_programs_integers_keep_their_digits():
    with Pipeline(build_config({"runner": "fake"})) as pipeline:
        (line,) = pipeline.answers([{"id": int(BIG), "query": "x", "big": int(BIG)}])
    assert line["id"] == BIG
    assert line["metadata"] == {"big": int(BIG)}


def test_what_a_model_writes_keeps_its_digits_where_it_is_parsed(tmp_path):
    """The fake runner writes the end of its prompt."""
    answer = f'{{"n": {BIG}, "d": {DECIMAL}}}'
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "a", "prompt": answer}) + "\n")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "d": {"type": "number"}}}
    raw = {"runner": "fake", "sampling": {"max_new_tokens": len(answer)}, "structured": {"json_schema": schema}}
    run(build_config({**raw, "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}))
    (line,) = (json.loads(line, parse_float=Decimal) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert line["valid"]
    assert line["parsed"] == {"n": int(BIG), "d": Decimal(DECIMAL)}
