"""Structured answers from a config or a record to a line: both backends, every form, what is cut off or refused."""

import json

import pytest
from jsonschema import validate

from ragspec.config.load import build_config
from ragspec.run.generate import generate as run
from tests.conftest import read_jsonl, write_jsonl

NEW = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "quote": {"$quote": True, "maxLength": 24},
        "sources": {"type": "array", "items": {"enum": {"$contexts": "id"}}, "minItems": 1, "maxItems": 2},
    },
    "required": ["sure", "quote", "sources"],
    "additionalProperties": False,
}
CONTEXTS = [{"id": "a1", "text": "Ann wrote Tides in 1911."}, {"id": "b2", "text": "The sea is salt and cold."}]
RECORDS = [{"id": f"q{i}", "query": f"Who wrote book {i}?", "contexts": CONTEXTS[: 1 + i % 2]} for i in range(6)]


def answered(tmp_path, model, records=RECORDS, name="out", **more):
    raw = {
        "model": str(model),
        "runner": "huggingface",
        "input": write_jsonl(tmp_path / f"{name}.in.jsonl", records),
        "output": str(tmp_path / f"{name}.jsonl"),
        "sampling": {"max_new_tokens": NEW, **more.pop("sampling", {})},
        **more,
    }
    summary = run(build_config(raw))
    return {line["id"]: line for line in read_jsonl(tmp_path / f"{name}.jsonl")}, summary


def stats(tmp_path, name="out"):
    return json.loads((tmp_path / f"{name}.stats.json").read_text())


def texts(lines):
    return {key: line["output"] for key, line in lines.items()}


def check(line, records=RECORDS):
    """Assert that an answer has its form, or says that it has not."""
    contexts = next(record["contexts"] for record in records if record["id"] == line["id"])
    if not line["valid"]:
        assert line["finish_reason"] == "length"
        assert line["parsed"] is None
        return 0
    assert line["parsed"] == json.loads(line["output"])
    parts = {"sources": {"items": {"enum": [each["id"] for each in contexts]}}, "sure": {"type": "boolean"}}
    validate(line["parsed"], {"type": "object", "properties": parts, "required": ["sure", "quote", "sources"]})
    assert any(line["parsed"]["quote"] in each["text"] for each in contexts)
    return 1


def test_answers_quote_and_cite_what_their_own_prompt_shows(tiny, tmp_path):
    lines, summary = answered(tmp_path, tiny, structured={"json_schema": SCHEMA}, sampling={"max_new_tokens": 90})
    valid = sum(check(line) for line in lines.values())
    assert valid > 0
    assert (summary.shaped, summary.valid, summary.truncated) == (6, valid, 6 - valid)
    assert stats(tmp_path)["structured"] == {"answers": 6, "valid": valid, "truncated": 6 - valid}


@pytest.mark.parametrize("method", ["context", "grammar", "prompt_lookup", "auto"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20}], ids=["greedy", "sampled"])
def test_no_method_changes_an_answer(tiny, tmp_path, method, sampling):
    settings = {"structured": {"json_schema": SCHEMA}, "sampling": sampling}
    plain, _ = answered(tmp_path, tiny, name="plain", **settings)
    lines, _ = answered(tmp_path, tiny, speculation={"method": method}, **settings)
    assert texts(lines) == texts(plain)
    told = stats(tmp_path)["runner"]["structured"]
    assert told["masks_s"] > 0
    if method == "grammar":
        assert told["forced_right"] > 0
        assert stats(tmp_path)["speculation"]["accepted"] > 0


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "form", [{"json_schema": SCHEMA}, {"regex": "[a-c]{2,40}"}, {"choice": ["yes", "no", "not so"]}]
)
def test_stock_generate_answers_the_same(tiny, tmp_path, form, batch_size):
    ours, _ = answered(tmp_path, tiny, name="ours", structured=form)
    theirs, summary = answered(
        tmp_path, tiny, structured=form, runner_args={"engine": "transformers", "batch_size": batch_size}
    )
    assert texts(theirs) == texts(ours)
    assert summary.shaped == 6


@pytest.mark.parametrize("draft", ["tiny_draft", "tiny_stranger"])
def test_stock_drafts_are_held_to_the_grammar_or_left_out(tiny, tmp_path, draft, request):
    folder = str(request.getfixturevalue(draft))
    ours, _ = answered(tmp_path, tiny, name="ours", structured={"json_schema": SCHEMA})
    speculation = {"method": "draft_model", "draft_model": folder}
    if draft == "tiny_stranger":
        speculation["draft_tokenizer"] = folder
    lines, _ = answered(
        tmp_path,
        tiny,
        structured={"json_schema": SCHEMA},
        speculation=speculation,
        runner_args={"engine": "transformers"},
    )
    assert texts(lines) == texts(ours)
    drafted = sum(line["speculation"]["drafted"] for line in lines.values())
    assert (drafted > 0) == (draft == "tiny_draft")
    if draft == "tiny_stranger":
        assert all("structured: stock generate() would hold" in line["speculation"]["off"] for line in lines.values())


@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
@pytest.mark.parametrize("sampling", [{}, {"stop_token_ids": [5]}], ids=["", "stop"])
@pytest.mark.parametrize("ends", [[], [-1, 5000]], ids=["none", "unknown"])
def test_stock_generate_answers_the_same_where_no_end_token_ends_an_answer(tiny, tmp_path, method, ends, sampling):
    settings = {"sampling": sampling | {"logit_bias": {"0": 4}}, "structured": {"regex": "(yes|no)( or (yes|no)){0,6}"}}
    runner_args = {"generate_args": {"eos_token_id": ends}, "batch_size": 1}
    ours, _ = answered(tmp_path, tiny, name="ours", runner_args=runner_args, **settings)
    runner_args["engine"] = "transformers"
    theirs, _ = answered(tmp_path, tiny, runner_args=runner_args, speculation={"method": method}, **settings)
    assert texts(theirs) == texts(ours)
    assert all(line["valid"] for line in [*ours.values(), *theirs.values()] if line["finish_reason"] == "stop")
    assert {line["finish_reason"] for line in theirs.values()} == {line["finish_reason"] for line in ours.values()}
    assert len(set(texts(ours).values())) > 1


def test_records_bring_forms_of_their_own(tiny, tmp_path):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {"messages": [{"role": "user", "content": "Well?"}], "max_tokens": NEW}
    openai = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    records = [
        {"id": "config", "query": "Why?"},
        {"id": "free", "query": "Why?", "response_format": {"type": "text"}},
        {"id": "regex", "query": "Why?", "structured_outputs": {"regex": "[0-9]{3}"}},
        {"id": "own", "query": "Why?", "structured": {"json_schema": schema}},
        {"custom_id": "openai", "body": {**body, "response_format": openai}},
        {"custom_id": "vllm", "body": {**body, "structured_outputs": {"grammar": 'start: "one" | "two"'}}},
        {"id": "bad", "query": "Why?", "structured_outputs": {"regex": "(a"}},
        {"id": "refused", "query": "Why?", "structured": {"json_schema": {"enum": []}}},
        {"id": "file", "query": "Why?", "structured": {"grammar": "/etc/hosts.lark"}},
        {"id": "cites", "query": "Why?", "structured": {"json_schema": {"enum": {"$contexts": "id"}}}},
    ]  # fmt: skip
    lines, summary = answered(tmp_path, tiny, records, structured={"choice": ["yes", "no"]})
    assert lines["config"]["output"] in ("yes", "no")
    assert "valid" not in lines["free"]
    assert lines["regex"]["output"].isdigit()
    assert len(lines["regex"]["output"]) == 3
    assert set(lines["own"]["parsed"]) == set(lines["openai"]["parsed"]) == {"a"}
    assert lines["vllm"]["output"] in ("one", "two")
    told = {key: line["error"]["message"] for key, line in lines.items() if "error" in line}
    assert sorted(told) == ["bad", "cites", "file", "refused"]
    assert "structured.regex: " in told["bad"]
    assert "structured.json_schema: Unsatisfiable schema" in told["refused"]
    assert "neither Lark nor GBNF" in told["file"] or "structured.grammar: " in told["file"]
    assert "no passage in the prompt has one" in told["cites"]
    assert (summary.records, summary.failed, summary.shaped) == (6, 4, 5)


def test_an_answer_that_is_cut_off_is_marked(tiny, tmp_path):
    lines, summary = answered(tmp_path, tiny, structured={"json_schema": SCHEMA}, sampling={"max_new_tokens": 5})
    assert all(not line["valid"] and line["parsed"] is None for line in lines.values())
    assert all(line["finish_reason"] == "length" for line in lines.values())
    assert (summary.valid, summary.truncated) == (0, 6)


@pytest.mark.parametrize(
    "form",
    [{"json_schema": {"enum": [1, 2]}}, {"choice": ["x", "y"]}, {"regex": "[0-9]"}, {"grammar": 'start: "a" | "b"'}],
)
def test_an_answer_that_is_complete_as_its_tokens_are_used_up_is_valid(tiny, tmp_path, form):
    lines, summary = answered(tmp_path, tiny, structured=form, sampling={"max_new_tokens": 1})
    assert {line["finish_reason"] for line in lines.values()} == {"length"}
    assert all(line["valid"] for line in lines.values())
    if "json_schema" in form:
        assert {line["parsed"] for line in lines.values()} <= {1, 2}
    assert (summary.valid, summary.truncated) == (summary.shaped, 0)


def test_what_a_stop_string_cuts_off_is_not_valid(tiny, tmp_path):
    form, stop = {"regex": "[0-9]{3}"}, [str(digit) for digit in range(10)]
    lines, summary = answered(tmp_path, tiny, structured=form, sampling={"stop": stop})
    assert {line["finish_reason"] for line in lines.values()} == {"stop"}
    assert not any(line["valid"] for line in lines.values())
    assert (summary.valid, summary.truncated) == (0, 0)


def test_what_a_stop_token_cuts_off_is_not_valid(tiny, tmp_path):
    form = {"json_schema": {"type": "integer", "minimum": 100, "maximum": 999}}
    plain, _ = answered(tmp_path, tiny, structured=form)
    stop = tokens_of(tiny, {line["output"][2] for line in plain.values()})
    for engine in ("ragspec", "transformers"):
        args = {"engine": engine, "compile": "off"}
        lines, summary = answered(
            tmp_path, tiny, name=engine, structured=form, sampling={"stop_token_ids": stop}, runner_args=args
        )
        cut = [line for line in lines.values() if len(line["output"]) < 3]
        assert cut
        assert not any(line["valid"] or line["parsed"] for line in cut)
        assert summary.valid == len(lines) - len(cut)


def tokens_of(model, characters):
    """Return the tokens that contain one of the characters."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [at for at in range(len(tokenizer)) if set(tokenizer.decode([at])) & characters]


@pytest.mark.parametrize("engine", ["ragspec", "transformers"])
@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
def test_an_answer_that_other_settings_keep_from_its_form_is_no_answer(tiny, tmp_path, engine, method):
    digits = tokens_of(tiny, set("0123456789"))
    args = {"engine": engine, "compile": "off", "generate_args": {"suppress_tokens": digits}}
    spec = {"method": method}
    for name, form in {"all": {"regex": "[0-9]{3}"}, "later": {"choice": ["ab1", "ab2"]}}.items():
        lines, summary = answered(tmp_path, tiny, name=name, structured=form, runner_args=args, speculation=spec)
        assert all("suppress_tokens" in line["error"]["message"] for line in lines.values())
        assert summary.valid == 0
    forced = {**args, "generate_args": {"forced_eos_token_id": 0}}
    lines, _ = answered(
        tmp_path, tiny, structured={"regex": "[0-9]{30}"}, runner_args=forced, sampling={"max_new_tokens": 6}
    )
    assert {(line["valid"], line["finish_reason"]) for line in lines.values()} == {(False, "length")}


@pytest.mark.parametrize("engine", ["ragspec", "transformers"])
def test_settings_that_exclude_all_that_a_form_allows_are_named(tiny, tmp_path, engine):
    given = {"eos_token_id": 5, "begin_suppress_tokens": list(range(399))}
    args = {"engine": engine, "batch_size": 1, "generate_args": given}
    lines, _ = answered(tmp_path, tiny, structured={"choice": ["yes", "no"]}, runner_args=args)
    assert all("begin_suppress_tokens" in line["error"]["message"] for line in lines.values())


def test_several_answers_are_told_one_by_one(tiny, tmp_path):
    form = {"json_schema": {"type": "boolean"}}
    lines, _ = answered(tmp_path, tiny, structured=form, sampling={"n": 3, "temperature": 1.0})
    for line in lines.values():
        assert [json.loads(text) for text in line["outputs"]] == line["parsed"]
        assert line["valid"] is True


def test_openai_lines_and_parquet_hold_structured_answers(tiny, tmp_path):
    import pyarrow.parquet

    form = {"json_schema": {"type": "boolean"}}
    answered(tmp_path, tiny, structured=form, name="a")
    config = build_config(
        {
            "model": str(tiny),
            "runner": "huggingface",
            "input": str(tmp_path / "a.in.jsonl"),
            "structured": form,
            "output": str(tmp_path / "parts.parquet"),
        }
    )
    run(config)
    rows = pyarrow.parquet.read_table(next((tmp_path / "parts.parquet").glob("*.parquet"))).to_pylist()
    assert [row["valid"] for row in rows] == [True] * 6
    assert all(json.loads(row["parsed"]) in (True, False) for row in rows)
    lines = run_openai(tmp_path, tiny, form)
    assert all(
        json.loads(line["response"]["body"]["choices"][0]["message"]["content"]) in (True, False) for line in lines
    )


def run_openai(tmp_path, model, form):
    body = {"messages": [{"role": "user", "content": "Well?"}]}
    source = write_jsonl(tmp_path / "b.jsonl", [{"custom_id": f"c{i}", "body": body} for i in range(2)])
    output = {"path": str(tmp_path / "b.out.jsonl"), "format": "openai"}
    raw = {"model": str(model), "runner": "huggingface", "input": source, "output": output, "structured": form}
    run(build_config(raw))
    return read_jsonl(tmp_path / "b.out.jsonl")


@pytest.mark.wide
@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.long), 0.8])
def test_verify_knows_grammars(tiny, tmp_path, temperature):
    from rich.console import Console

    from ragspec.audit.verify import run_verify

    raw = {
        "model": str(tiny),
        "runner": "huggingface",
        "input": write_jsonl(tmp_path / "in.jsonl", RECORDS),
        "structured": {"json_schema": SCHEMA},
        "sampling": {"max_new_tokens": NEW, "temperature": temperature},
        "speculation": {"method": "context"},
    }
    found = run_verify(build_config(raw), tmp_path / "v", limit=None, console=Console(quiet=True), reference=4)
    assert not found.left_out
    for comparison in found.comparisons:
        assert not comparison.audit.bugs
        assert comparison.audit.identical + len(comparison.audit.ties) >= 4
    assert len(found.comparisons) == 3
