"""Stock generate() on tiny real models: every method gives plain decoding's tokens, and counts what it did."""

import dataclasses
import gc

import pytest
import torch
from transformers import GenerationMixin, GPT2LMHeadModel, LlamaForCausalLM

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.errors import ConfigError, ModelError
from ragspec.records import Failure, Request, Sampling
from ragspec.run.generate import generate as run
from ragspec.runners.huggingface import runner as huggingface
from ragspec.runners.huggingface import stock
from ragspec.runners.huggingface.assisted import MAX_RECORDS, Comparison
from tests.conftest import SAMPLE, read_jsonl, save_gpt2, train_tokenizer, wide

PROMPTS = [
    f"{record['contexts'][0]['text'][: 60 + 25 * i]}\n\nQuestion: {record['query']}"
    for i, record in enumerate(read_jsonl(SAMPLE)[:5])
]


def make_runner(model, method="none", sampling=None, runner_args=None, **spec):
    raw = {
        "model": model,
        "sampling": {"max_new_tokens": 24, **(sampling or {})},
        "speculation": {"method": method, **spec},
        "runner_args": {"engine": "transformers", **(runner_args or {})},
    }
    config = build_config(raw)
    runner = huggingface.Runner(config)
    runner.check()
    return runner, to_sampling(config.sampling)


def make_requests(runner, sampling, prompts=PROMPTS):
    return [
        Request(i, f"r{i}", runner.tokenizer.encode(prompt, special_tokens=True), sampling)
        for i, prompt in enumerate(prompts)
    ]


def answer(model, method="none", prompts=PROMPTS, **settings):
    runner, sampling = make_runner(model, method, **settings)
    with runner:
        return list(runner.generate(make_requests(runner, sampling, prompts)))


def tokens(generations):
    assert not [outcome for outcome in generations if isinstance(outcome, Failure)]
    return [generation.token_ids for generation in generations]


METHODS = [
    ("prompt_lookup", {}),
    ("prompt_lookup", {"num_tokens": 3, "ngram_max": 1}),
    ("draft_model", {"draft_model": "tiny_draft"}),
    ("draft_model", {"draft_model": "tiny", "confidence_threshold": 0.0}),
    ("draft_model", {"draft_model": "tiny_padded"}),
    ("draft_model", {"draft_model": "tiny_gpt2", "draft_tokenizer": "tiny_gpt2"}),
    ("draft_model", {"draft_model": "tiny_stranger", "draft_tokenizer": "tiny_stranger"}),
    ("early_exit", {"early_exit_layer": 1}),
]


MOST_KINDS = [METHODS[i] for i in (0, 2, 6, 7)]


@pytest.fixture(
    params=[*MOST_KINDS, *wide(*((m,) for m in METHODS if m not in MOST_KINDS))],
    ids=lambda m: "-".join([m[0], *map(str, m[1].values())]),
)
def speculation(request):
    method, spec = request.param
    folders = {key: request.getfixturevalue(value) for key, value in spec.items() if str(value).startswith("tiny")}
    return {"method": method, **spec, **folders}


def test_every_method_gives_the_tokens_of_plain_decoding(tiny, speculation):
    plain = answer(tiny, runner_args={"batch_size": 1})
    drafted = answer(tiny, **speculation)
    assert tokens(drafted) == tokens(plain)
    assert sum(len(ids) for ids in tokens(drafted)) == 5 * 24


def test_counts_add_up_to_the_tokens_that_came_out(tiny, speculation):
    for generation in answer(tiny, **speculation):
        assert generation.spec.steps + generation.spec.accepted == len(generation.token_ids)
        assert generation.spec.drafted >= generation.spec.accepted
    assert sum(generation.spec.drafted for generation in answer(tiny, **speculation)) > 0


def test_a_model_that_drafts_for_itself_is_always_right(tiny):
    for generation in answer(tiny, "draft_model", draft_model=tiny, num_tokens=5, confidence_threshold=0.0):
        assert generation.spec.acceptance_rate == 1.0
        assert generation.spec.mean_acceptance_length > 5


def test_sampling_works_with_every_method_and_repeats_under_one_seed(tiny, speculation):
    settings = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 3}
    one, two = (answer(tiny, sampling=settings, **speculation) for _ in range(2))
    assert not [g for g in one if isinstance(g, Failure)]
    assert tokens(one) == tokens(two)
    assert tokens(one) != tokens(answer(tiny, sampling=settings | {"seed": 4}, **speculation))


@pytest.mark.parametrize(
    ("method", "spec"),
    [("prompt_lookup", {}), ("draft_model", {"draft_model": "self"}), ("early_exit", {"early_exit_layer": 1})],
)
def test_num_tokens_is_set_where_transformers_reads_it(tiny, method, spec):
    spec = {key: tiny if value == "self" else value for key, value in spec.items()}
    for length in (1, 3):
        generations = answer(
            tiny,
            method,
            num_tokens=length,
            **({} if method == "prompt_lookup" else {"confidence_threshold": 0.0}),
            **spec,
        )
        assert max(len(g.spec.drafted_at) - 1 for g in generations) == length


def held(kind, but=()):
    """Return the models of a kind that anything in this process still holds; but: others."""
    gc.collect()
    known = set(map(id, but))
    return [found for found in gc.get_objects() if type(found) is kind and id(found) not in known]


def test_draft_knobs_land_on_the_drafts_own_generation_config(tiny, tiny_gpt2):
    runner, _ = make_runner(
        tiny,
        "draft_model",
        draft_model=tiny_gpt2,
        draft_tokenizer=tiny_gpt2,
        schedule="heuristic_transient",
        confidence_threshold=0.2,
        num_tokens=4,
        extra={"assistant_lookbehind": 6, "target_lookbehind": 7},
    )
    others = held(GPT2LMHeadModel)
    with runner:
        (draft,) = held(GPT2LMHeadModel, others)
        knobs = draft.generation_config
        assert (knobs.num_assistant_tokens, knobs.num_assistant_tokens_schedule) == (4, "heuristic_transient")
        assert (knobs.assistant_confidence_threshold, knobs.assistant_lookbehind, knobs.target_lookbehind) == (
            0.2,
            6,
            7,
        )


@pytest.mark.parametrize(
    ("draft", "difference"),
    [("tiny_stranger", "tokens differ: token "), ("tiny_gpt2", "the draft reads only 300 tokens")],
)
def test_a_draft_of_other_tokens_is_refused_before_any_weights_load(tiny, draft, difference, request):
    folder = request.getfixturevalue(draft)
    with pytest.raises(ConfigError) as caught:
        make_runner(tiny, "draft_model", draft_model=folder)
    message = str(caught.value)
    assert "the tokenizer of " in message
    assert difference in message
    assert f"add `draft_tokenizer: {folder}`" in message


def test_padded_embeddings_are_no_other_vocabulary(tiny, tiny_padded):
    runner, _ = make_runner(tiny, "draft_model", draft_model=tiny_padded)
    assert runner.about()["draft_vocabulary"] == "same"
    runner, _ = make_runner(tiny, "draft_model", draft_model=tiny_padded, draft_tokenizer=tiny_padded)
    assert "not needed" in runner.notes[0]


def test_greedy_records_are_untouched_by_sampled_ones_in_universal_decoding(tiny, tiny_gpt2):
    spec = {"draft_model": tiny_gpt2, "draft_tokenizer": tiny_gpt2}
    runner, greedy = make_runner(tiny, "draft_model", **spec)
    _, sampled = make_runner(tiny, "draft_model", sampling={"temperature": 1.0}, **spec)
    with runner:
        before = list(runner.generate(make_requests(runner, greedy)))
        list(runner.generate(make_requests(runner, sampled)))
        after = list(runner.generate(make_requests(runner, greedy)))
    assert tokens(before) == tokens(after)
    assert [g.spec for g in before] == [g.spec for g in after]


@pytest.mark.parametrize("universal", [False, True])
def test_a_record_longer_than_the_draft_can_read_goes_on_without_drafts(tiny, tmp_path, sample_texts, universal):
    tokenizer = train_tokenizer(300 if universal else 400, sample_texts)
    short = save_gpt2(tmp_path / "short", tokenizer, positions=48)
    spec = {"draft_model": short, "num_tokens": 4} | ({"draft_tokenizer": short} if universal else {})
    runner, sampling = make_runner(tiny, "draft_model", **spec)
    with runner:
        requests = make_requests(runner, sampling, ["A kiln.", *PROMPTS[:2]])
        generations = list(runner.generate(requests))
    plain = answer(tiny, prompts=["A kiln.", *PROMPTS[:2]], runner_args={"batch_size": 1})
    assert tokens(generations) == tokens(plain)
    assert [g.spec.drafted > 0 for g in generations] == [True, False, False]
    assert "outgrew the draft model's 48 tokens" in runner.notes[-1]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_padded_batches_answer_as_single_records_do(tiny, batch_size):
    assert tokens(answer(tiny, runner_args={"batch_size": batch_size})) == tokens(
        answer(tiny, runner_args={"batch_size": 1})
    )


def test_a_sampled_answer_does_not_depend_on_the_records_before_it(tiny):
    runner, sampling = make_runner(tiny, sampling={"temperature": 1.0}, runner_args={"batch_size": 1})
    with runner:
        requests = make_requests(runner, sampling)
        forward = {g.index: g.token_ids for g in runner.generate(requests)}
        backward = {g.index: g.token_ids for g in runner.generate(requests[::-1])}
    assert forward == backward


def test_a_stop_string_ends_the_answer_wherever_it_falls_in_a_draft(tiny, speculation):
    runner, _ = make_runner(tiny)
    whole = answer(tiny, runner_args={"batch_size": 1}, prompts=PROMPTS[:1])[0].token_ids
    text = runner.tokenizer.decode(whole)
    for start in (1, len(text) // 3, len(text) // 2):
        stop = {"stop": [text[start : start + 3]], "max_new_tokens": 24}
        plain = answer(tiny, sampling=stop, prompts=PROMPTS[:1])[0]
        drafted = answer(tiny, sampling=stop, prompts=PROMPTS[:1], **speculation)[0]
        assert drafted.token_ids == plain.token_ids
        assert (plain.finish_reason, drafted.finish_reason) == ("stop", "stop")
        assert text[start : start + 3] in runner.tokenizer.decode(plain.token_ids)
        assert text[start : start + 3] not in runner.tokenizer.decode(plain.token_ids[:-1])


def test_any_of_several_eos_tokens_ends_the_answer(tiny, speculation):
    whole = answer(tiny, runner_args={"batch_size": 1}, prompts=PROMPTS[:1])[0].token_ids
    for at in (0, 5, 11):
        args = {"generate_args": {"eos_token_id": [whole[at], 0]}}
        end = whole.index(whole[at]) + 1
        for settings in ({}, speculation):
            generation = answer(tiny, runner_args=args, prompts=PROMPTS[:1], **settings)[0]
            assert generation.token_ids == whole[:end]
            assert generation.finish_reason == "stop"


@pytest.mark.parametrize("length", [1, 2, 7])
def test_max_new_tokens_may_fall_inside_a_draft(tiny, speculation, length):
    generations = answer(tiny, sampling={"max_new_tokens": length}, **speculation)
    assert tokens(generations) == tokens(
        answer(tiny, sampling={"max_new_tokens": length}, runner_args={"batch_size": 1})
    )
    assert {g.finish_reason for g in generations} == {"length"}


def test_repetition_penalty_is_the_same_with_and_without_drafts(tiny, speculation):
    settings = {"repetition_penalty": 1.3}
    assert tokens(answer(tiny, sampling=settings, **speculation)) == tokens(
        answer(tiny, sampling=settings, runner_args={"batch_size": 1})
    )


def test_a_record_without_memory_costs_itself_alone(tiny, monkeypatch):
    runner, sampling = make_runner(tiny)
    with runner:
        requests, original = make_requests(runner, sampling), GenerationMixin.generate
        poison = next(token for token in range(400) if all(token not in request.token_ids for request in requests))
        requests[2] = Request(2, "bad", [5, poison, 7], sampling)

        def generate(self, input_ids, **kwargs):
            if (input_ids == poison).any():
                raise torch.OutOfMemoryError("no room")
            return original(self, input_ids, **kwargs)

        monkeypatch.setattr(GenerationMixin, "generate", generate)
        outcomes = list(runner.generate(requests))
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, False, True, False, False]
    assert "OutOfMemoryError: no room" in outcomes[2].message


@pytest.mark.parametrize("engine", ["ragspec", *wide("transformers")])
def test_a_device_that_fails_ends_the_run_with_one_line_and_loses_no_answer(tiny, tmp_path, monkeypatch, engine):
    """It computes nothing more in this process: neither records nor what would free its memory."""
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "input": str(SAMPLE),
        "output": str(tmp_path / "out.jsonl"),
        "sampling": {"max_new_tokens": 8},
        "speculation": {"method": "none"},
        "runner_args": {"engine": engine, "batch_size": 2, "compile": "off"},
    }
    forward, failing = LlamaForCausalLM.forward, [False]

    def fail(*args, **kwargs):
        if failing[0]:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return forward(*args, **kwargs) if args else None

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    monkeypatch.setattr("ragspec.models.memory.free_memory", fail)

    def answered():
        return (tmp_path / "out.jsonl").read_text().count('"output"')

    def report(summary, total):
        failing[0] = summary.records >= 4

    with pytest.raises(
        ModelError, match=r"^the device has failed: CUDA error: .*; finished answers are kept, run again"
    ):
        run(build_config(raw), report=report)
    assert 4 <= answered() < 10
    failing[0] = False
    run(build_config(raw))
    assert answered() == 10


def test_records_of_other_sampling_begin_a_new_batch(tiny):
    runner, sampling = make_runner(tiny)
    _, longer = make_runner(tiny, sampling={"max_new_tokens": 30})
    with runner:
        requests = make_requests(runner, sampling)
        requests[1] = Request(1, "r1", requests[1].token_ids, longer)
        assert [len(g.token_ids) for g in runner.generate(requests)] == [24, 30, 24, 24, 24]


def test_arguments_of_autogluon_reach_transformers(tiny):
    args = {
        "model_args": {"attn_implementation": "eager"},
        "tokenizer_args": {"model_max_length": 77},
        "encode_args": {"truncation": True, "max_length": 5},
        "generate_args": {"suppress_tokens": list(range(200))},
        "num_gpus": 0,
    }
    runner, sampling = make_runner(tiny, runner_args=args)
    others = held(LlamaForCausalLM)
    with runner:
        (model,) = held(LlamaForCausalLM, others)
        assert model.config._attn_implementation == "eager"
        assert runner.tokenizer.inner.model_max_length == 77
        requests = make_requests(runner, sampling)
        assert {len(request.token_ids) for request in requests} == {5}
        assert all(token >= 200 for g in runner.generate(requests) for token in g.token_ids)
        assert runner.about()["device"] == "cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"runner_args": {"generate_args": {"num_beams": 4}}, "method": "prompt_lookup"},
            "num_beams: 4 cannot be combined",
        ),
        ({"runner_args": {"generate_args": {"temprature": 1}}}, 'temprature" is not known; did you mean "temperature"'),
        ({"runner_args": {"generate_args": {"do_sample": True}}}, "generate_args.do_sample: ragspec sets this itself"),
        ({"runner_args": {"encode_args": {"bogus": 1}}}, 'runner_args.encode_args.bogus" is not known'),
        ({"runner_args": {"device": "banana"}}, 'runner_args.device: "banana" is not known'),
        ({"runner_args": {"generate_args": {"num_return_sequences": 2}}}, "num_return_sequences: must be 1"),
        ({"method": "early_exit", "early_exit_layer": 2}, "early_exit_layer: 2 must be less than"),
        ({"method": "prompt_lookup", "extra": {"lookback": 3}}, "speculation.extra.lookback: is not known"),
        (
            {"method": "draft_model", "draft_model": "no/such-draft"},
            'speculation.draft_model: "no/such-draft": is not a local folder',
        ),
    ],
)
def test_what_does_not_combine_is_known_before_any_weights_load(tiny, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_runner(tiny, **settings)


def test_a_batch_size_that_cannot_count_is_said_to_be_without_effect(tiny):
    runner, _ = make_runner(tiny, "prompt_lookup", runner_args={"batch_size": 4})
    with runner:
        assert "has no effect" in runner.notes[0]


def test_prefill_and_decode_times_are_kept_apart(tiny):
    runner, sampling = make_runner(tiny)
    with runner:
        runner.warm_up()
        generations = list(runner.generate(make_requests(runner, sampling)))
    assert runner.prefill_s > 0
    assert runner.decode_s > 0
    assert runner.decode_tokens == sum(len(g.token_ids) - 1 for g in generations)
    assert all(0 < g.time_to_first_token_s < g.latency_s for g in generations)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_stop_string_is_noticed_in_the_step_that_completes_it(step):
    import torch

    from ragspec.runners.fake import ByteTokenizer
    from ragspec.runners.huggingface.stock import StopText

    prompt, text = list(b"stop stop "), list(b"one two stop three")
    criterion = StopText(ByteTokenizer(), [Request(0, "a", prompt, Sampling(stop=("stop",)))], len(prompt))
    for end in range(step, len(text) + step, step):
        stopped = bool(criterion(torch.tensor([prompt + text[:end]]), None)[0])
        assert stopped == (end >= len("one two stop"))
        if stopped:
            break


def test_auto_names_the_method_that_answered(tiny, tmp_path):
    raw = {
        "model": tiny,
        "input": str(SAMPLE),
        "output": str(tmp_path / "out.jsonl"),
        "sampling": {"max_new_tokens": 4},
        "speculation": {"method": "auto"},
        "runner_args": {"engine": "transformers"},
    }
    summary = run(build_config(raw), limit=1)
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert summary.method == line["speculation"]["method"] == "prompt_lookup"
    assert any("method auto: prompt_lookup, unless" in note for note in summary.notes)


@pytest.mark.parametrize(("drafted_s", "slower"), [(4.0, True), (1.0, False)])
def test_speculation_that_is_slower_than_plain_decoding_is_said_so(drafted_s, slower):
    compared = Comparison("prompt_lookup")
    assert not compared.slower
    for _ in range(2):
        assert not compared.done
        compared.add(20, drafted_s / 2, 20, 1.0)
    assert compared.done
    assert compared.slower == slower
    if slower:
        assert "10.0 tokens/s against 20.0" in compared.note("so it is")


@pytest.mark.parametrize("times", [(0.5, 1.5), (0.7, 1.2), (0.9, 1.4)])
def test_a_comparison_that_may_be_chance_takes_more_records_and_then_says_nothing(times):
    compared = Comparison("prompt_lookup")
    while not compared.done:
        compared.add(20, times[compared.records % 2], 20, 1.0)
    assert compared.records == MAX_RECORDS
    assert not compared.slower


@pytest.mark.parametrize(("temperature", "left"), [(0.0, 2), (0.9, 0)])
def test_auto_leaves_stock_speculation_that_is_slower(tiny, monkeypatch, temperature, left):
    """Four records: two show that it is slower, two go on without. Sampled answers do not depend on a clock."""
    monkeypatch.setattr(Comparison, "slower", True)
    sampling = {"max_new_tokens": 12, "temperature": temperature}
    runner, asked = make_runner(tiny, "auto", sampling=sampling)
    with runner:
        requests = make_requests(runner, asked)[:4]
        outcomes = list(runner.generate(requests))
    assert [bool(outcome.undrafted) for outcome in outcomes] == [False] * (4 - left) + [True] * left
    assert any("answers greedy records without it from here on" in note for note in runner.notes)
    plain, _ = make_runner(tiny, "none", sampling=sampling)
    with plain:
        if temperature == 0:
            assert tokens(list(plain.generate(requests))) == tokens(outcomes)


def test_a_clock_decides_for_no_sampled_record_among_greedy_ones(tiny, monkeypatch):
    monkeypatch.setattr(Comparison, "slower", True)
    runner, greedy = make_runner(tiny, "auto", sampling={"max_new_tokens": 12})
    with runner:
        warm = dataclasses.replace(greedy, temperature=0.9, seed=1)
        requests = [
            dataclasses.replace(request, sampling=sampling)
            for request, sampling in zip(make_requests(runner, greedy), [greedy, greedy, warm, greedy], strict=False)
        ]
        outcomes = list(runner.generate(requests))
    assert [bool(outcome.undrafted) for outcome in outcomes] == [False, False, False, True]


def test_a_runner_that_was_left_holds_no_weights(tiny):
    runner, asked = make_runner(tiny, "prompt_lookup", runner_args={"engine": "auto"})
    others = held(LlamaForCausalLM)
    with runner:
        assert list(runner.generate(make_requests(runner, asked)))
        assert len(held(LlamaForCausalLM, others)) == 1
    assert held(LlamaForCausalLM, others) == []


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}])
def test_the_first_records_are_answered_both_ways_and_nobody_sees_it(tiny, sampling, monkeypatch):
    """Answers, counts and tokens are those of the drafted run; the records are the first ones."""
    compared, found, counts = Comparison("prompt_lookup"), [], []
    for comparison in (None, compared):
        monkeypatch.setattr(stock, "Comparison", lambda method, made=comparison: made)
        runner, asked = make_runner(tiny, "prompt_lookup", sampling={"max_new_tokens": 12, **sampling})
        with runner:
            found.append(list(runner.generate(make_requests(runner, asked))))
            counts.append(runner.decode_tokens)
    alone, beside = found
    assert counts[0] == counts[1]
    assert tokens(beside) == tokens(alone)
    assert [outcome.spec for outcome in beside] == [outcome.spec for outcome in alone]
    assert compared.records >= 2
    assert compared.tokens == sum(len(outcome.token_ids) for outcome in beside[: compared.records])
    assert compared.plain_tokens > 0 < compared.plain_s
