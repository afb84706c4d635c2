"""What a model thinks is told apart from its answer: with our engine, with stock generate(), with vLLM."""

import json
from dataclasses import replace

import pytest
import torch

from ragspec.config.load import build_config
from ragspec.models.stopping import answer_start, split_reasoning, thinking_after_prompt, thinking_of
from ragspec.records import Thinking
from ragspec.run.generate import generate as run
from tests.conftest import read_jsonl, save_llama, train_tokenizer, write_jsonl
from tests.families import learn_by_heart

CHAT = (
    "{% set quiet = enable_thinking is defined and not enable_thinking %}{% if quiet %}[quiet] {% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]\n"
    "{% if quiet %}<think></think>\n\n{% endif %}{% endif %}"
)
LEAVES = CHAT  # the model opens its thought itself
OPENS = CHAT.replace("{% if quiet %}<think>", "{% if not quiet %}<think>\n{% else %}<think>")  # the template does
QUESTION = "Who built it?"
THOUGHT = "The text says: Ann. DONE"
ANSWER = 'Ann Smith built it. DONE "so"'
TEMPLATES = {"opened by the prompt": OPENS, "opened by the model": LEAVES}


def save_thinker(folder, texts, template, *, hidden=64):
    """Save a model that knows by heart what it thinks and answers, and one answer without a thought."""
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM

    tokenizer = train_tokenizer(380, texts)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in ("<think>", "</think>")])
    tokenizer.chat_template = template
    save_llama(folder, tokenizer, hidden=hidden, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    opened = "" if prompt.endswith("<think>\n") else "<think>\n"
    plain = f"[quiet] [user] {QUESTION}\n[assistant]\n<think></think>\n\n"
    learnt = [f"{prompt}{opened}{THOUGHT}\n</think>\n\n{ANSWER}<|end|>", f"{plain}{ANSWER}<|end|>"]
    assert learn_by_heart(model, tokenizer, learnt, steps=200) < 0.2
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=TEMPLATES)
def thinker(request, tmp_path_factory, sample_texts):
    folder = tmp_path_factory.mktemp("thinkers") / "model"
    return save_thinker(folder, [*sample_texts, THOUGHT, ANSWER], TEMPLATES[request.param])


def answered(folder, model, records=None, **more):
    records = records or [{"id": "q", "query": QUESTION}]
    output = folder / "out.jsonl"
    output.unlink(missing_ok=True)
    raw = {
        "model": model,
        "runner": "huggingface",
        "input": write_jsonl(folder / "in.jsonl", records),
        "output": str(output),
        "runner_args": more.pop("runner_args", {}) | ({} if "runner" in more else {"compile": "off"}),
        "sampling": {"max_new_tokens": 60, **more.pop("sampling", {})},
        **more,
    }
    run(build_config(raw), resume=False)
    return read_jsonl(output)


ENGINES = [{}, {"engine": "transformers"}]


@pytest.mark.parametrize("args", ENGINES, ids=["engine", "generate"])
def test_a_thought_is_told_apart_from_the_answer(thinker, tmp_path, args):
    (line,) = answered(tmp_path, thinker, runner_args=args)
    assert (line["reasoning"], line["output"]) == (THOUGHT, ANSWER)
    assert 0 < line["reasoning_tokens"] < line["output_tokens"]
    assert line["finish_reason"] == "stop"


def test_splitting_can_be_turned_off(thinker, tmp_path):
    (line,) = answered(tmp_path, thinker, prompt={"split_reasoning": False})
    assert "reasoning" not in line
    assert THOUGHT in line["output"]
    assert line["output"].endswith(ANSWER)


@pytest.mark.parametrize("args", ENGINES, ids=["engine", "generate"])
@pytest.mark.parametrize("where", ["config", "record"])
def test_a_template_is_told_not_to_think(thinker, tmp_path, where, args):
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    records = [{"id": "q", "query": QUESTION} | (told if where == "record" else {})]
    (line,) = answered(tmp_path, thinker, records, prompt=told if where == "config" else {}, runner_args=args)
    assert line["output"] == ANSWER
    assert "reasoning" not in line
    assert line["metadata"] == {}


@pytest.mark.parametrize("method", ["none", "prompt_lookup", "context"])
def test_a_stop_string_counts_in_the_answer_alone(thinker, tmp_path, method):
    (line,) = answered(tmp_path, thinker, sampling={"stop": "DONE"}, speculation={"method": method})
    assert (line["reasoning"], line["output"]) == (THOUGHT, "Ann Smith built it. ")
    assert line["finish_reason"] == "stop"


def test_a_stop_string_right_after_the_least_length_of_a_thinkers_answer_is_no_part_of_it(thinker, tmp_path):
    """The answer's text lacks the blanks that follow the thought."""
    (plain,) = answered(tmp_path, thinker, sampling={"logprobs": 0})
    tokens = [each["token"] for each in plain["logprobs"]]
    for at in range(plain["reasoning_tokens"] + 3, plain["reasoning_tokens"] + 6):
        (line,) = answered(tmp_path, thinker, sampling={"min_new_tokens": at, "stop": [tokens[at]]})
        assert line["output_tokens"] == at + 1
        assert line["output"] == "".join(tokens[plain["reasoning_tokens"] : at]).lstrip()


def test_a_stop_string_counts_in_the_answer_alone_for_stock_generate(thinker, tmp_path):
    (line,) = answered(tmp_path, thinker, sampling={"stop": "DONE"}, runner_args={"engine": "transformers"})
    assert (line["reasoning"], line["output"]) == (THOUGHT, "Ann Smith built it. ")


def test_a_thought_that_is_cut_off_is_no_answer(thinker, tmp_path):
    (line,) = answered(tmp_path, thinker, sampling={"max_new_tokens": 5})
    assert line["output"] == ""
    assert line["reasoning"]
    assert THOUGHT.startswith(line["reasoning"])
    assert line["finish_reason"] == "length"


SCHEMA = {
    "json_schema": {
        "type": "object",
        "properties": {"by": {"enum": ["Ann", "Bob"]}},
        "required": ["by"],
        "additionalProperties": False,
    }
}


@pytest.mark.parametrize("args", ENGINES, ids=["engine", "generate"])
def test_a_schema_shapes_the_answer_and_not_the_thought(thinker, tmp_path, args):
    (line,) = answered(tmp_path, thinker, structured=SCHEMA, runner_args=args)
    assert line["valid"], line
    assert line["parsed"]["by"] in ("Ann", "Bob")
    assert line["output"] == json.dumps(line["parsed"])
    assert line["reasoning"] == THOUGHT


def test_drafts_change_nothing_of_a_shaped_answer_after_a_thought(thinker, tmp_path):
    plain, drafted = (
        answered(tmp_path, thinker, structured=SCHEMA, speculation={"method": method})[0]
        for method in ("none", "context")
    )
    assert (plain["output"], plain["reasoning"]) == (drafted["output"], drafted["reasoning"])


def test_what_an_answer_copies_is_counted_from_the_answers_begin(thinker, tmp_path):
    records = [{"id": "q", "query": QUESTION, "contexts": ["Ann Smith built it."]}]
    template = "{{ query }}"  # what the model has learnt has no passages in it
    records[0]["contexts"] = [ANSWER]
    (line,) = answered(
        tmp_path, thinker, records, speculation={"method": "context", "num_tokens": 4}, prompt={"template": template}
    )
    assert line["output"] == ANSWER
    for span in line["copied"]:
        assert line["output"][span["start"] : span["end"]] in ANSWER


def test_openais_lines_have_the_reasoning_too_unless_it_is_not_wanted(thinker, tmp_path):
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    records = [
        {"custom_id": "a", "body": body},
        {"custom_id": "b", "body": {**body, "include_reasoning": False}},
        {"custom_id": "c", "body": {**body, "chat_template_kwargs": {"enable_thinking": False}}},
    ]
    output = {"path": str(tmp_path / "out.jsonl"), "format": "openai"}
    lines = answered(tmp_path, thinker, records, output=output)
    messages = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"] for line in lines}
    assert {message["content"] for message in messages.values()} == {ANSWER}
    assert messages["a"]["reasoning"] == THOUGHT
    assert "reasoning" not in messages["b"]
    assert "reasoning" not in messages["c"]
    usage = lines[0]["response"]["body"]["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


@pytest.mark.wide
@pytest.mark.vllm
def test_vllm_tells_thoughts_apart_and_stops_in_the_answer(tmp_path_factory, sample_texts, tmp_path):
    folder = tmp_path_factory.mktemp("thinkers") / "model"
    thinker = save_thinker(folder, [*sample_texts, THOUGHT, ANSWER], OPENS, hidden=256)  # heads that its kernels have
    args = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 36 << 20}
    for method in ("none", "context"):
        lines = answered(
            tmp_path,
            thinker,
            [{"id": "a", "query": QUESTION}],
            runner="vllm",
            runner_args=args,
            sampling={"stop": "DONE"},
            speculation={"method": method},
        )
        assert (lines[0]["reasoning"], lines[0]["output"]) == (THOUGHT, "Ann Smith built it. ")
        assert lines[0]["finish_reason"] == "stop"
        shaped = answered(
            tmp_path, thinker, runner="vllm", runner_args=args, structured=SCHEMA, speculation={"method": method}
        )
        assert shaped[0]["valid"]
        assert shaped[0]["reasoning"] == THOUGHT


# -- markers ----------------------------------------------------------------------------------------------------------


def tokenizer_with(words, template=None, special=True):
    from tokenizers import AddedToken

    tokenizer = train_tokenizer(270, ["some text to learn from, final analysis assistant"])
    tokenizer.add_tokens([AddedToken(word, special=special, normalized=False) for word in words])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<seed:think>", "</seed:think>"),
        ("◁think▷", "◁/think▷"),
        ("<|channel>", "<channel|>"),
    ],
)
def test_markers_of_several_families_are_found(opening, closing, special):
    from ragspec.models.tokenizer import HFTokenizer

    inner = tokenizer_with(["<|other|>", closing, opening], special=special)
    tokenizer = HFTokenizer(inner)
    thinking = tokenizer.thinking
    assert (thinking.opening, thinking.closing) == (opening, closing)
    label = "thought\n" if opening == "<|channel>" else "\n"
    ids = inner(f"{opening}{label}plan a{closing}\nthe answer")["input_ids"]
    assert split_reasoning(thinking, ids, tokenizer)[:2] == ("plan a", "the answer")


def test_a_tokenizer_without_markers_thinks_nothing():
    assert thinking_of(tokenizer_with(["<|other|>", "<think>"])) is None, "an opening that nothing closes"
    assert thinking_of(tokenizer_with([])) is None


def test_markers_that_only_the_template_writes_are_found_in_the_text():
    from ragspec.models.tokenizer import HFTokenizer

    tokenizer = HFTokenizer(tokenizer_with([], "{% if x %}<think>{% endif %}...{{ c.split('</think>')[-1] }}"))
    thinking = tokenizer.thinking
    assert thinking == Thinking("<think>", "</think>")
    ids = tokenizer.encode("<think>a plan</think>\n\nthe answer", special_tokens=False)
    reasoning, answer, start = split_reasoning(thinking, ids, tokenizer)
    assert (reasoning, answer) == ("a plan", "the answer")
    assert "</think>" in tokenizer.decode(ids[:start])
    assert "</think>" not in tokenizer.decode(ids[: start - 1])


def test_channels_count_as_thoughts_before_the_final_message():
    from ragspec.models.tokenizer import HFTokenizer

    words = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
    tokenizer = HFTokenizer(tokenizer_with(words))
    whole = "<|channel|>analysis<|message|>a plan<|end|><|start|>assistant<|channel|>final<|message|>the answer"
    ids = tokenizer.encode(whole, special_tokens=False)
    assert split_reasoning(tokenizer.thinking, ids, tokenizer)[:2] == ("a plan", "the answer")
    direct = tokenizer.encode("<|channel|>final<|message|>the answer", special_tokens=False)
    assert split_reasoning(tokenizer.thinking, direct, tokenizer)[:2] == ("", "the answer")
    cut = tokenizer.encode("<|channel|>analysis<|message|>a plan", special_tokens=False)
    assert split_reasoning(tokenizer.thinking, cut, tokenizer)[:2] == ("a plan", "")


def test_a_model_that_answers_where_its_prompt_opens_a_thought_has_answered():
    from ragspec.models.tokenizer import HFTokenizer

    tokenizer = HFTokenizer(tokenizer_with(["<think>", "</think>"]))
    thinking = replace(tokenizer.thinking, inside=True)
    ids = tokenizer.encode("the answer", special_tokens=False)
    assert split_reasoning(thinking, ids, tokenizer, ended=True) == ("", "the answer", 0)
    assert split_reasoning(thinking, ids, tokenizer, ended=False)[:2] == ("the answer", "")
    opened = tokenizer.encode("<think>a plan", special_tokens=False)
    assert split_reasoning(thinking, opened, tokenizer, ended=True)[:2] == ("a plan", "")


@pytest.mark.parametrize(
    ("prompt", "begun", "inside"),
    [
        ("[user] Why?\n<think>\n", "", True),
        ("[user] what is <think>?\n[assistant]\n", "", False),
        ("[user] Why?\n[assistant]\n<think>\n\n</think>\n\n", "", None),  # enable_thinking: false
        ("[user] Why?\n[assistant]\n<think>\nbegun", "<think>\nbegun", True),
        ("[user] Why?\n[assistant]\n<think>\nbegun", "begun", True),
        ("[user] what is <think>?\n[assistant]\nIt is", "It is", False),
        ("[user] what is </think>?\n[assistant]\nIt is", "It is ", False),
        ("[user] Why?\n[assistant]\n<think>\n\n</think>\n\nIt is", "It is", None),
        ("[user] Why?\n[assistant]\n<think>a plan</think>It is", "<think>a plan</think>It is", None),
    ],
)
def test_only_a_prompts_end_opens_or_closes_a_thought(prompt, begun, inside):
    found = thinking_after_prompt(Thinking("<think>", "</think>"), prompt, begun)
    assert found is None if inside is None else found.inside is inside


@pytest.mark.parametrize(
    ("inside", "ids", "start"),
    [(False, [5, 6], 0), (True, [5, 6], 2), (True, [5, 2, 6], 2), (False, [1, 5], 2), (False, [5, 2, 6], 2)],
)
def test_an_answer_starts_behind_the_marker_that_ends_a_thought(inside, ids, start):
    thinking = Thinking("<think>", "</think>", (1,), (2,), inside=inside)
    assert answer_start(thinking, ids, None) == start
    assert answer_start(None, ids, None) == 0
