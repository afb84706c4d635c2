"""Where an answer ends: end tokens, tokens and strings of a record's own, a least length; and lengths that fit."""

import json
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.models.stopping import find_stop, trim
from ragspec.run.generate import generate as run
from ragspec.run.local import Pipeline
from ragspec.runners.fake import ByteTokenizer
from tests.conftest import read_jsonl, write_jsonl

PROMPTS = ["The granite tower was", "Once upon a time", "x"]
ENGINES = [
    {},
    {"engine": "transformers"},
    {"method": "prompt_lookup"},
    {"engine": "transformers", "method": "prompt_lookup"},
]
IDS = ["engine", "generate", "engine, drafts", "generate, drafts"]


def answers(folder, model, sampling, *, records=None, engine="auto", method="none", **more):
    records = records or [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    output = folder / "out.jsonl"
    output.unlink(missing_ok=True)
    raw = {
        "model": model,
        "runner": "huggingface",
        "input": write_jsonl(folder / "in.jsonl", records),
        "output": str(output),
        "sampling": {"max_new_tokens": 16, **sampling},
        "speculation": {"method": method},
        "runner_args": {"compile": "off", "engine": engine},
        **more,
    }
    run(build_config(raw), resume=False)
    return {line["id"]: line for line in read_jsonl(output)}


@pytest.mark.parametrize("way", ENGINES, ids=IDS)
def test_a_token_of_the_records_own_ends_its_answer_and_is_no_part_of_its_text(tiny, tmp_path, way):
    plain = answers(tmp_path, tiny, {"logprobs": 0}, **way)
    tokens = [each["token"] for each in plain["0"]["logprobs"]]
    at = next(i for i, token in enumerate(tokens) if i >= 3 and tokens.index(token) == i and "\ufffd" not in token)
    stop = ids_of_token(tiny, tokens[at])
    cut = answers(tmp_path, tiny, {"stop_token_ids": [stop]}, **way)["0"]
    assert cut["finish_reason"] == "stop"
    assert cut["output_tokens"] == at + 1
    assert plain["0"]["output"].startswith(cut["output"])
    assert cut["output"] == "".join(tokens[:at]) or "\ufffd" in plain["0"]["output"]


def ids_of_token(model, token):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == token)


@pytest.fixture(scope="module")
def brief(tiny, tmp_path_factory):
    """The tiny model, whose end token is one that it writes early on."""
    import shutil

    folder = tmp_path_factory.mktemp("brief")
    lines = answers(folder, tiny, {"logprobs": 0})
    tokens = [each["token"] for each in lines["0"]["logprobs"]]
    at = next(i for i, token in enumerate(tokens) if i >= 2 and tokens.index(token) == i and "\ufffd" not in token)
    model = folder / "model"
    shutil.copytree(tiny, model)
    config = model / "generation_config.json"
    end = ids_of_token(tiny, tokens[at])
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": end}))
    return str(model), at + 1


@pytest.mark.parametrize("way", ENGINES, ids=IDS)
def test_an_end_token_may_be_ignored(brief, tmp_path, way):
    model, length = brief
    assert answers(tmp_path, model, {}, **way)["0"]["output_tokens"] == length
    ignored = answers(tmp_path, model, {"ignore_eos": True}, **way)["0"]
    assert (ignored["output_tokens"], ignored["finish_reason"]) == (16, "length")


@pytest.mark.parametrize("way", ENGINES, ids=IDS)
def test_no_end_token_comes_before_the_least_length(brief, tmp_path, way):
    model, length = brief
    line = answers(tmp_path, model, {"min_new_tokens": length + 4}, **way)["0"]
    assert line["output_tokens"] >= length + 4


@pytest.mark.parametrize("way", ENGINES, ids=IDS)
def test_an_end_token_that_is_text_to_the_tokenizer_is_no_part_of_the_answer(brief, tmp_path, way):
    line = answers(tmp_path, brief[0], {"logprobs": 0}, **way)["0"]
    *tokens, end = [each["token"] for each in line["logprobs"]]
    assert line["finish_reason"] == "stop"
    assert line["output"] == "".join(tokens) or "\ufffd" in line["output"]
    assert not line["output"].endswith(end)


@pytest.mark.parametrize("own", [True, False])
def test_no_token_that_ends_an_answer_is_heard(brief, tiny, own):
    end = json.loads((Path(brief[0]) / "generation_config.json").read_text())["eos_token_id"]
    sampling = {"max_new_tokens": 16, **({"stop_token_ids": [end]} if own else {})}
    heard = []
    with Pipeline({"model": tiny if own else str(brief[0]), "runner": "huggingface", "sampling": sampling}) as pipeline:
        (line,) = pipeline.answers([{"id": "0", "prompt": PROMPTS[0]}], hear=heard.append)
    assert line["finish_reason"] == "stop"
    assert heard
    assert all(line["output"].startswith(partial.text) for partial in heard)


def test_all_ways_give_the_same_answers(brief, tmp_path):
    model, length = brief
    for sampling in ({"min_new_tokens": length + 4}, {"ignore_eos": True}, {"min_new_tokens": 6, "stop": ["e"]}):
        found = [answers(tmp_path, model, sampling, **way) for way in ENGINES]
        outputs = [{key: line["output"] for key, line in lines.items()} for lines in found]
        assert outputs[0] == outputs[1] == outputs[2] == outputs[3], sampling


def test_a_stop_string_counts_beyond_the_least_length_only():
    tokenizer, ids = ByteTokenizer(), list(b"a stop b stop c")
    assert trim(ids, frozenset(), ["stop"], tokenizer) == (list(b"a stop"), "stop")
    assert trim(ids, frozenset(), ["stop"], tokenizer, 5) == (list(b"a stop"), "stop"), "it ends beyond"
    assert trim(ids, frozenset(), ["stop"], tokenizer, 6) == (list(b"a stop b stop"), "stop")
    assert trim(ids, frozenset(), ["stop"], tokenizer, 13)[1] == "length"
    assert trim(ids, frozenset(b"b"), (), tokenizer, 3) == (list(b"a stop b"), "stop")
    assert find_stop("one two three", ("three", "two")) == 4
    assert find_stop("one", ("two",)) is None
    assert find_stop("aXbX", ("X",), 2) == 3


@pytest.mark.parametrize("key", ["ignore_eos", "min_new_tokens"])
def test_a_form_ends_an_answer_itself(tiny, tmp_path, key):
    line = answers(tmp_path, tiny, {key: True if key == "ignore_eos" else 4}, structured={"choice": ["yes", "no"]})["0"]
    assert f"sampling.{key}: has no effect on a structured answer" in line["error"]["message"]


@pytest.mark.parametrize("engine", ["auto", "transformers"])
@pytest.mark.parametrize("sampling", [{"stop_token_ids": [99999]}, {"logit_bias": {99999: 1.0}}])
def test_a_token_that_is_none_is_the_records_fault(tiny, tmp_path, engine, sampling):
    line = answers(tmp_path, tiny, sampling, engine=engine)["0"]
    assert line["error"]["type"] == "RecordError"
    assert "the model has no token 99999, only 0 to 399" in line["error"]["message"]


# -- lengths that fit -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tmp_path_factory, sample_texts):
    """A model of 64 tokens in all."""
    from tests.conftest import save_gpt2, train_tokenizer

    return save_gpt2(tmp_path_factory.mktemp("short") / "model", train_tokenizer(300, sample_texts), positions=64)


def test_a_default_length_shrinks_to_what_the_model_takes(short, tmp_path):
    sampling = {"max_new_tokens": None, "default_new_tokens": 1024, "ignore_eos": True}
    line = answers(tmp_path, short, sampling, records=[{"id": "a", "prompt": "tower"}])["a"]
    assert line["prompt_tokens"] + line["output_tokens"] == 64


def test_passages_leave_a_default_answer_a_quarter_of_the_context(short, tmp_path):
    contexts = [{"id": str(i), "text": "the tower is built of granite"} for i in range(12)]
    record = {"id": "a", "query": "why", "contexts": contexts}
    line = answers(tmp_path, short, {"max_new_tokens": None, "ignore_eos": True}, records=[record])["a"]
    assert line["contexts"]
    assert line["dropped_contexts"]
    assert 64 - 16 - 16 < line["prompt_tokens"] <= 64 - 16
    assert line["prompt_tokens"] + line["output_tokens"] == 64


def test_a_length_that_the_user_wrote_is_an_error_where_it_does_not_fit(short, tmp_path):
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens: 64 leaves no room for a prompt"):
        answers(tmp_path, short, {"max_new_tokens": 64})
    body = {"prompt": "tower " * 6, "max_tokens": 40}
    records = [{"custom_id": "a", "body": body}, {"custom_id": "b", "body": {"prompt": body["prompt"]}}]
    lines = answers(tmp_path, short, {"max_new_tokens": None, "ignore_eos": True}, records=records)
    assert "less max_new_tokens (40)" in lines["a"]["error"]["message"]
    assert lines["b"]["prompt_tokens"] + lines["b"]["output_tokens"] == 64


def test_a_prompt_that_leaves_no_room_at_all_is_an_error(short, tmp_path):
    records = [{"id": "a", "prompt": "tower of granite " * 40}]
    line = answers(tmp_path, short, {"max_new_tokens": None}, records=records)["a"]
    assert "the prompt has" in line["error"]["message"]


def test_an_output_begun_with_the_old_default_can_go_on(tiny, tmp_path):
    """`max_new_tokens: 128` was the default, and is what the state says."""
    from ragspec.config.run import RunConfig

    identity = RunConfig(model=tiny, runner="huggingface").identity()
    assert identity["sampling"]["max_new_tokens"] == 128
    assert not {"default_new_tokens", "min_new_tokens", "ignore_eos", "stop_token_ids"} & identity["sampling"].keys()
    assert not {"chat_template_kwargs", "split_reasoning"} & identity["prompt"].keys()
    assert "draft_model_args" not in identity["speculation"]


# -- echo -------------------------------------------------------------------------------------------------------------


def test_a_completion_may_begin_with_its_prompt(tiny, tmp_path):
    bodies = [{"prompt": "The tower"}, {"prompt": ["The tower", "It was"]}, {"prompt": [5, 6, 7]}]
    records = [
        {"custom_id": f"{i}{echo}", "body": {**body, "echo": echo}}
        for i, body in enumerate(bodies)
        for echo in (True, False)
    ]
    output = {"path": str(tmp_path / "out.jsonl"), "format": "openai"}
    raw = {"model": tiny, "runner": "huggingface", "sampling": {"max_new_tokens": 4}, "output": output}
    raw |= {"input": write_jsonl(tmp_path / "in.jsonl", records), "runner_args": {"compile": "off"}}
    run(build_config(raw))
    texts = {
        line["custom_id"]: [choice["text"] for choice in line["response"]["body"]["choices"]]
        for line in read_jsonl(tmp_path / "out.jsonl")
    }
    assert texts["0True"] == ["The tower" + texts["0False"][0]]
    assert texts["1True"] == [
        before + text for before, text in zip(["The tower", "It was"], texts["1False"], strict=True)
    ]
    assert texts["2True"][0].endswith(texts["2False"][0])
    assert len(texts["2True"][0]) > len(texts["2False"][0])
