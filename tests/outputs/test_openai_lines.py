"""Lines of OpenAI's Batch API, through the pipeline, read by the official package's types."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from ragspec.config.load import build_config
from ragspec.outputs.ledger import Finished
from ragspec.run.generate import generate
from ragspec.run.local import Pipeline
from tests.conftest import read_jsonl, write_jsonl

RECORDS = [
    {"custom_id": "chat", "body": {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 3}},
    {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "Once upon", "max_tokens": 4, "seed": 1}},
    {"custom_id": "many", "body": {"prompt": ["one", "three"], "n": 2, "max_tokens": 3, "logprobs": 2}},
    {
        "custom_id": "told",
        "body": {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 2},
    },
    {"custom_id": "stream", "body": {"prompt": "p", "stream": True}},
    {"custom_id": "fails", "body": {"prompt": "p"}},
    {"id": "own", "query": "Who?", "contexts": ["Ann."]},
]


@pytest.fixture
def answered(tmp_path):
    def run(records=RECORDS, **more):
        output = {"path": str(tmp_path / "out.jsonl"), "format": "openai"} | more.pop("output", {})
        raw = {
            "runner": "fake",
            "runner_args": {"fail_ids": ["fails"]},
            "input": write_jsonl(tmp_path / "in.jsonl", records),
            "output": output,
        }
        return generate(build_config(raw | more)), read_jsonl(tmp_path / "out.jsonl")

    return run


def test_every_line_is_what_the_official_package_reads(answered):
    _, lines = answered()
    assert [line["custom_id"] for line in lines] == ["chat", "text", "many", "told", "stream", "fails", "own"]
    read = 0
    for line in lines:
        assert line.keys() == {"id", "custom_id", "response", "error"}
        response = line["response"]
        assert response.keys() == {"status_code", "request_id", "body"}
        if response["status_code"] == 200:
            kind = Completion if response["body"]["object"] == "text_completion" else ChatCompletion
            body = kind.model_validate(response["body"], strict=True)
            assert not body.model_extra
            assert all(not choice.model_extra for choice in body.choices)
            read += 1
        else:
            assert line["error"]["message"] == response["body"]["error"]["message"]
    assert read == 5


def test_answers_are_counted_and_placed(answered):
    _, lines = answered()
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines}
    chat = bodies["chat"]
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "hy?", "refusal": None}
    assert chat["usage"]["completion_tokens"] == 3
    assert chat["usage"]["total_tokens"] == 3 + chat["usage"]["prompt_tokens"]
    assert [choice["text"] for choice in bodies["many"]["choices"]] == ["one", "one", "ree", "ree"]
    assert [choice["index"] for choice in bodies["many"]["choices"]] == [0, 1, 2, 3]
    assert bodies["many"]["usage"]["prompt_tokens"] == len("one") + len("three")
    assert bodies["many"]["usage"]["completion_tokens"] == 12


def test_errors_have_a_status(answered):
    _, lines = answered()
    found = {line["custom_id"]: line for line in lines}
    assert found["stream"]["response"]["status_code"] == 400
    assert '"body.stream" is not supported' in found["stream"]["error"]["message"]
    assert found["fails"]["response"]["status_code"] == 500


def test_a_run_that_goes_on_knows_its_lines(answered):
    first, lines = answered()
    assert (first.records, first.failed) == (5, 2)
    second, again = answered()
    assert (second.records, second.skipped, second.failed_before) == (0, 7, 2)
    assert again == lines


def test_another_model_is_said_once(answered):
    summary, _ = answered(output={"model": "served"})
    assert [note for note in summary.notes if "records ask for" in note] == ["records ask for m; None answers them"]
    summary, _ = answered(RECORDS[:1], output={"model": "m"})
    assert not [note for note in summary.notes if "records ask for" in note]


@pytest.mark.parametrize(
    "line",
    [b"", b"[1]", b"{}", b'{"id": "x", "custom_id": "c"}', b'{"id": "batch_req_1"}', b'{"id": 3, "custom_id": "c"}'],
)
def test_a_line_of_somebody_elses_finishes_nothing(line):
    assert Finished.of(line) == Finished()


def test_a_line_finishes_its_record():
    line = {"id": "batch_req_ab", "custom_id": "c", "response": None, "error": {"code": "x"}}
    assert Finished.of(json.dumps(line).encode()) == Finished("ab", "c", True)
    assert Finished.of(json.dumps(line | {"error": None}).encode()) == Finished("ab", "c", False)


def test_several_answers_on_a_native_line(tmp_path):
    raw = {
        "runner": "fake",
        "input": write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "prompt": "one"}]),
        "output": str(tmp_path / "out.jsonl"),
        "sampling": {"n": 2, "temperature": 1.0, "max_new_tokens": 2},
    }
    summary = generate(build_config(raw))
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert (line["output"], line["outputs"], line["finish_reasons"]) == ("ne", ["ne", "ne"], ["length", "length"])
    assert (line["output_tokens"], line["prompt_tokens"]) == (4, 3)
    assert (summary.records, summary.output_tokens) == (1, 4)


def test_what_is_cached_of_a_prompt_with_several_answers_is_counted_once(tiny):
    sampling = {"n": 4, "temperature": 1.0, "max_new_tokens": 3}
    settings = {"model": tiny, "runner": "huggingface", "sampling": sampling, "prompt": {"chat": False}}
    text = "The lighthouse stands on a cliff. " * 12
    with Pipeline(settings) as pipeline:
        lines = list(pipeline.answers([{"id": "a", "prompt": text}, {"id": "b", "prompt": f"{text} Why?"}]))
    summary = pipeline.summary
    assert summary.cached_prompt_tokens == sum(line["cached_prompt_tokens"] for line in lines) > 0
    assert summary.cached_prompt_tokens < summary.prompt_tokens == sum(line["prompt_tokens"] for line in lines)


def test_greedy_answers_are_written_once(tmp_path):
    raw = {
        "runner": "fake",
        "input": write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "prompt": "one"}]),
        "output": str(tmp_path / "out.jsonl"),
        "sampling": {"n": 3, "max_new_tokens": 2},
    }
    summary = generate(build_config(raw))
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert line["outputs"] == ["ne"] * 3
    assert line["output_tokens"] == 6
    assert summary.output_tokens == 2  # of which tokens per second are made
    assert summary.totals.output_tokens == 6  # what the output has
    assert generate(build_config(raw)).totals.output_tokens == 6


def test_prompt_tokens_from_the_cache_count_once_for_several_answers(tmp_path, tiny):
    records = [{"id": i, "prompt": "The tower was " * 20 + str(i)} for i in range(3)]
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "input": write_jsonl(tmp_path / "in.jsonl", records),
        "output": str(tmp_path / "out.jsonl"),
        "sampling": {"n": 4, "temperature": 1.0, "max_new_tokens": 2},
        "runner_args": {"compile": "off"},
    }
    summary = generate(build_config(raw))
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert 0 < summary.cached_prompt_tokens < summary.prompt_tokens
    assert summary.cached_prompt_tokens == sum(line["cached_prompt_tokens"] for line in lines)


def test_a_line_that_is_wrong_keeps_its_own_name(answered):
    records = [{"id": "mine", "custom_id": "theirs", "body": {"prompt": "p", "stream": True}}]
    _, lines = answered(records)
    assert lines[0]["custom_id"] == "theirs"


def test_a_token_that_the_model_has_not_is_that_lines_error(answered):
    bodies = [{"prompt": [65, 256]}, {"prompt": [3_000_000_000]}, {"prompt": [65, 66]}]
    _, lines = answered([{"custom_id": f"c{i}", "body": body} for i, body in enumerate(bodies)])
    assert [line["response"]["status_code"] for line in lines] == [400, 400, 200]
    assert "the model has no token 256, only 0 to 255" in lines[0]["error"]["message"]


def test_a_benchmark_reads_its_own_form_of_lines(tmp_path):
    from ragspec.inputs.sources import open_source
    from ragspec.outputs.journal import Journal
    from ragspec.run.local import LocalPass
    from ragspec.run.session import prepare

    source = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "prompt": "one"}])
    raw = {"runner": "fake", "input": source, "output": {"path": "-", "format": "openai"}}
    session = prepare(build_config(raw))
    with open_source(source) as rows, Journal(str(tmp_path / "out.jsonl")) as journal:
        LocalPass(session, rows, journal, keep_details=True).answer()
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert line["token_ids"]
