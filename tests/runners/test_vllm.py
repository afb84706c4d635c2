"""Real vLLM (its CPU build will do) with the real demo model."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest

from ragspec.config.load import build_config
from ragspec.config.run import to_sampling
from ragspec.errors import ConfigError
from ragspec.records import Failure, Passage, Request
from ragspec.run.generate import generate as run
from ragspec.structured.form import Form
from tests.cli.test_cli import RAGSPEC, ragspec, start_interruptible, wait_for_lines
from tests.conftest import SAMPLE, read_jsonl, wide, write_jsonl
from tests.speculation.test_plugins import install

pytestmark = pytest.mark.vllm
ARGS = {"enforce_eager": True, "max_model_len": 512, "batch_size": 4, "kv_cache_memory_bytes": 36 << 20, "lookahead": 8}
ARGS["disable_log_stats"] = False  # its counters are compared with ours
RECORDS = 4


def make_config(demo, *, runner="vllm", output=None, **speculation):
    return build_config(
        {
            "model": demo,
            "runner": runner,
            "input": str(SAMPLE),
            "output": str(output),
            "sampling": {"max_new_tokens": 24},
            "speculation": speculation,
            "runner_args": ARGS if runner == "vllm" else {"batch_size": 1},
        }
    )


@pytest.fixture(scope="module")
def expected(demo, tmp_path_factory):
    """The texts of plain decoding on Hugging Face."""
    output = tmp_path_factory.mktemp("expected") / "out.jsonl"
    run(make_config(demo, runner="huggingface", output=output), limit=RECORDS)
    return [line["output"] for line in read_jsonl(output)]


@pytest.fixture(scope="module")
def engine(demo):
    """An engine with our drafter, whose cache is so small that rows are preempted.

    The one engine of this process: once its n-gram drafter has imported numba, vLLM 0.32 cannot start another.
    """
    from ragspec.runners.vllm.runner import Runner

    runner = Runner(make_config(demo, method="context", num_tokens=6))
    runner.check()
    with runner:
        runner.warm_up()
        yield runner


def requests(engine, texts, **sampling):
    settings = to_sampling(build_config({"runner": "fake", "sampling": {"max_new_tokens": 24, **sampling}}).sampling)
    return [
        Request(i, f"r{i}", engine.tokenizer.encode(text, special_tokens=False), settings)
        for i, text in enumerate(texts)
    ]


TEXTS = [" ".join(passage["text"] for passage in record["contexts"]) for record in read_jsonl(SAMPLE)]


def counters(engine):
    found = {metric.name: metric for metric in engine.engine.get_metrics()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [found[f"vllm:spec_decode_{name}"].value for name in names]


def test_records_counts_add_up_to_the_engines_own(engine):
    before = counters(engine)
    generations = list(engine.generate(requests(engine, TEXTS)))
    after = counters(engine)
    assert len(generations) == len(TEXTS)
    specs = [generation.spec for generation in generations]
    steps, drafted, accepted = (a - b for a, b in zip(after, before, strict=True))
    assert (sum(s.drafted_steps for s in specs), sum(s.drafted for s in specs)) == (steps, drafted)
    # vLLM also counts what a last step accepted beyond the end of the answer
    assert 0 < sum(s.accepted for s in specs) <= accepted <= sum(s.accepted for s in specs) + len(specs) * 6
    for generation in generations:
        spec = generation.spec
        assert spec.steps + spec.accepted - spec.cut == len(generation.token_ids)
        assert 0 < generation.time_to_first_token_s <= generation.latency_s


@pytest.mark.wide
def test_whoever_leaves_early_leaves_nothing_to_the_next_run(engine):
    texts = [text[:200] for text in TEXTS]
    alone = {one.index: one.token_ids for one in engine.generate(requests(engine, texts[::-1]))}
    for _ in engine.generate(requests(engine, texts)):
        break
    again = {one.index: one.token_ids for one in engine.generate(requests(engine, texts[::-1]))}
    assert again == alone
    assert not engine.engine.has_unfinished_requests()


def test_a_prompt_of_which_all_but_one_token_is_cached_begins_without_drafts(engine):
    """vLLM would fill up its row with drafts of -1, and sample its first token among them."""
    block = engine.engine.vllm_config.cache_config.block_size
    (request,) = requests(engine, TEXTS[:1], max_new_tokens=1)
    plain = replace(request, token_ids=request.token_ids[: 2 * block + 1])
    (first,) = engine.generate([plain])
    unlike = next(token for token in range(100, 200) if token not in first.token_ids)
    wanted = replace(plain.sampling, logit_bias=((unlike, 100.0),))
    asked = [replace(plain, index=i, id=f"r{i}", sampling=wanted if i % 2 else plain.sampling) for i in range(12)]
    answers = {answer.index: answer for answer in engine.generate(asked)}
    assert any(answer.cached_prompt_tokens == 2 * block for answer in answers.values())
    for i, answer in answers.items():
        assert answer.token_ids == ([unlike] if i % 2 else first.token_ids)
        assert (answer.spec.steps, answer.spec.drafted) == (1, 0)


def test_a_refused_request_is_a_failure_and_the_others_are_answered(engine):
    asked = requests(engine, TEXTS[:3])
    asked[1] = Request(1, "long", [5] * 600, asked[1].sampling)
    outcomes = {outcome.index: outcome for outcome in engine.generate(asked)}
    assert [isinstance(outcomes[i], Failure) for i in range(3)] == [False, True, False]
    assert "vLLM rejects it" in outcomes[1].message
    assert outcomes[1].kind == "RecordError"


def test_requests_are_pulled_as_the_engine_has_room(engine):
    pulled = 0

    def endless():
        nonlocal pulled
        (request,) = requests(engine, ["Once"], max_new_tokens=2)
        while True:
            pulled += 1
            yield Request(pulled, f"r{pulled}", request.token_ids, request.sampling)

    answers = engine.generate(endless())
    for finished in range(1, 30):
        next(answers)
        assert pulled - finished <= 2 * ARGS["batch_size"] + ARGS["lookahead"]
    answers.close()
    engine.engine.abort_request([str(i) for i in range(pulled + 1)])


def test_a_shared_prefix_is_reported_as_cached(engine):
    prefix = " ".join(TEXTS)[:1200]
    first, second = requests(engine, [prefix + " One", prefix + " Two"], max_new_tokens=2)
    many = [first, *(Request(i + 2, f"x{i}", [9 + i] * 5, first.sampling) for i in range(9)), second]
    generations = {generation.index: generation for generation in engine.generate(many)}
    assert generations[0].cached_prompt_tokens == 0
    assert generations[1].cached_prompt_tokens >= 128


def settled(engine, texts, settings):
    """Return a request per text, the settings in turn."""
    asked = [requests(engine, texts, **each) for each in settings]
    return [asked[i % len(asked)][i] for i in range(len(texts))]


def by_index(outcomes):
    found = {outcome.index: outcome for outcome in outcomes}
    assert not [outcome for outcome in found.values() if isinstance(outcome, Failure)]
    return found


BIAS = {"28": 4.0, "198": 2.5, "260": -3.0}
SETTINGS = [
    {},
    {"presence_penalty": 1.3, "logprobs": 2},
    {"logit_bias": BIAS, "logprobs": 4},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"logprobs": 0},
    {"logit_bias": BIAS, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]


@pytest.mark.wide
def test_penalties_biases_and_logprobs_are_those_of_our_engine_in_one_batch_with_drafts(demo, engine):
    from ragspec.runners.huggingface import runner as huggingface

    texts = [f"{text} Again: {text[:300]}" for text in TEXTS[:6]] * 2
    asked = settled(engine, texts, SETTINGS)
    plain = huggingface.Runner(make_config(demo, runner="huggingface"))
    plain.check()
    with plain:
        expected = by_index(plain.generate(asked))
    found = by_index(engine.generate(asked))
    assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in expected.items()}
    assert sum(found[i].spec.accepted for i in range(len(texts)) if i % 6 in (0, 1, 3, 4)) > 0
    for request in asked:
        ours, theirs = expected[request.index], found[request.index]
        if request.sampling.logit_bias:
            assert theirs.undrafted.startswith("logit_bias: ")
            assert theirs.spec.drafted == 0
        else:
            assert theirs.undrafted == ""
        most = request.sampling.logprobs
        assert len(theirs.logprobs) == len(ours.logprobs) == (0 if most is None else len(ours.token_ids))
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert len(other.likeliest) == most
            values = [one.logprob, *(value for _, value in one.likeliest)]
            assert [other.logprob, *(value for _, value in other.likeliest)] == pytest.approx(values, abs=2e-3)


def test_what_vllm_would_get_wrong_in_drafts_is_answered_without_any_beside_others(engine):
    """Without the mended `expand_kernel` of vLLM 0.32's CPU build, the greedy rows would be judged by its leftovers."""
    drawn = {"temperature": 1.0, "top_k": 50, "min_p": 0.02}
    greedy = by_index(engine.generate(requests(engine, TEXTS)))
    alone = by_index(engine.generate([r for r in requests(engine, TEXTS, **drawn) if r.index % 2]))
    mixed = by_index(engine.generate(settled(engine, TEXTS, [{}, drawn])))
    for index, outcome in mixed.items():
        expected = alone if index % 2 else greedy
        assert outcome.token_ids == expected[index].token_ids
        assert (outcome.undrafted != "") == (index % 2 == 1)
    assert all(mixed[index].token_ids != greedy[index].token_ids for index in alone)
    assert sum(outcome.spec.drafted for outcome in alone.values()) == 0
    assert sum(outcome.spec.accepted for index, outcome in mixed.items() if not index % 2) > 0


def test_what_cannot_be_answered_without_drafts_is_refused_record_by_record(engine, monkeypatch):
    monkeypatch.setattr(vars(engine)["_plan"], "undraftable", False)
    asked = requests(engine, TEXTS[:2], logit_bias=BIAS) + requests(engine, TEXTS[:3])[2:]
    outcomes = {outcome.index: outcome for outcome in engine.generate(asked)}
    assert [isinstance(outcomes[i], Failure) for i in range(3)] == [True, True, False]
    assert outcomes[0].message == "logit_bias: vLLM does not apply it to drafts; use method: none, or remove it"


FORMS = [
    Form(
        "json_schema",
        {"type": "object", "properties": {"why": {"type": "string", "maxLength": 9}}, "required": ["why"]},
    ),
    None,
    Form("json_schema", {"type": "object", "properties": {"says": {"$quote": True}}, "required": ["says"]}),
    Form("regex", r"(In|At) [a-z ]{4,30}\."),
    Form("choice", ["It does not say.", "It says so."]),
    Form("json_schema", {"enum": {"$contexts": "id"}}),
]


def shaped(engine, texts, **sampling):
    """Return a request per text, the forms in turn; passages are the texts themselves."""
    for i, (request, text) in enumerate(zip(requests(engine, texts, **sampling), texts, strict=True)):
        form = FORMS[i % len(FORMS)]
        grammar = form.grammar([Passage("k1", text[:200]), Passage("k2", text[:80])]) if form else ""
        yield replace(request, grammar=grammar)


def test_structured_answers_are_those_of_our_engine_in_one_batch_with_drafts(demo, engine):
    from ragspec.runners.huggingface import runner as huggingface

    asked = list(shaped(engine, TEXTS[:6] * 2, max_new_tokens=32))
    there = by_index(engine.generate(asked))
    config = make_config(demo, runner="huggingface", method="none")
    runner = huggingface.Runner(config)
    runner.check()
    with runner:
        here = by_index(runner.generate(asked))
    assert {i: one.token_ids for i, one in there.items()} == {i: one.token_ids for i, one in here.items()}
    assert sum(there[i].spec.accepted for i in there if asked[i].grammar) > 0


def test_sampled_structured_answers_have_their_form(engine):
    asked = list(shaped(engine, TEXTS[:6], max_new_tokens=40, temperature=0.9))
    found = by_index(engine.generate(asked))
    assert engine.tokenizer.decode(found[5].token_ids) in ('"k1"', '"k2"')
    assert engine.tokenizer.decode(found[4].token_ids) in FORMS[4].spec
    for i in (0, 2):
        if found[i].finish_reason == "stop":
            assert list(json.loads(engine.tokenizer.decode(found[i].token_ids))) == [["why"], None, ["says"]][i]


def test_a_grammar_that_vllm_refuses_is_its_records_failure(engine):
    asked = requests(engine, TEXTS[:2])
    outcomes = {o.index: o for o in engine.generate([replace(asked[0], grammar="start: nothing"), asked[1]])}
    assert isinstance(outcomes[0], Failure)
    assert not isinstance(outcomes[1], Failure)


def test_logprobs_under_a_grammar_are_told_to_be_so(engine):
    asked = requests(engine, TEXTS[:1], logprobs=2)
    list(engine.generate(asked))
    assert not any("under their grammar" in note for note in engine.notes)
    list(engine.generate([replace(asked[0], grammar='start: "yes" | "no"')]))
    assert any("under their grammar (-9999: not allowed there)" in note for note in engine.notes)


def test_settings_that_vllm_refuses_are_their_records_fault_and_a_short_answer_has_no_least_length(engine):
    asked = settled(engine, TEXTS[:2], [{"temperature": 3.0}, {"min_new_tokens": 9, "max_new_tokens": 4}])
    outcomes = {outcome.index: outcome for outcome in engine.generate(asked)}
    assert outcomes[0].kind == "RecordError"
    assert "temperature must be in [0, 2]" in outcomes[0].message
    assert len(outcomes[1].token_ids) == 4


def test_a_bias_on_a_token_that_there_is_not_is_its_records_failure(engine):
    asked = settled(engine, TEXTS[:2], [{"logit_bias": {"999999": 1.0}}, {}])
    outcomes = {outcome.index: outcome for outcome in engine.generate(asked)}
    assert "out-of-vocab" in outcomes[0].message
    assert len(outcomes[1].token_ids) > 0


def test_the_ends_of_an_answer_are_its_records_own(engine):
    (plain,) = engine.generate(requests(engine, TEXTS[:1], max_new_tokens=64))
    at = next(i for i, token in enumerate(plain.token_ids) if i > 3 and plain.token_ids.index(token) == i)
    stop = plain.token_ids[at]
    (cut,) = engine.generate(requests(engine, TEXTS[:1], max_new_tokens=64, stop_token_ids=[stop]))
    assert (cut.token_ids, cut.finish_reason) == (plain.token_ids[: at + 1], "stop")
    (least,) = engine.generate(
        requests(engine, TEXTS[:1], max_new_tokens=64, stop_token_ids=[stop], min_new_tokens=at + 3)
    )
    assert len(least.token_ids) >= at + 3
    assert least.token_ids[:at] == plain.token_ids[:at]
    assert least.token_ids[at] != stop
    (ignoring,) = engine.generate(requests(engine, TEXTS[:1], max_new_tokens=90, ignore_eos=True))
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (90, "length")


def test_a_stop_string_ends_the_answer(engine):
    whole = next(iter(engine.generate(requests(engine, TEXTS[:1]))))
    text = engine.tokenizer.decode(whole.token_ids)
    stop = text[len(text) // 2 :][:4]
    cut = next(iter(engine.generate(requests(engine, TEXTS[:1], stop=[stop]))))
    assert cut.finish_reason == "stop"
    assert stop in engine.tokenizer.decode(cut.token_ids)
    assert stop not in engine.tokenizer.decode(cut.token_ids[:-1])
    assert len(cut.token_ids) < len(whole.token_ids)
    assert cut.spec.steps + cut.spec.accepted - cut.spec.cut == len(cut.token_ids)
    assert cut.spec.accepted <= cut.spec.drafted


def test_the_drafts_of_an_answer_that_a_stop_string_ends_are_counted(engine):
    text = TEXTS[0][:300]
    (whole,) = engine.generate(requests(engine, [f"{text} Again: {text[:60]}"], max_new_tokens=40, ignore_eos=True))
    assert whole.spec.accepted > 8
    stop = engine.tokenizer.decode(whole.token_ids)[-12:]
    (cut,) = engine.generate(
        requests(engine, [f"{text} Again: {text[:60]}"], max_new_tokens=64, ignore_eos=True, stop=[stop])
    )
    assert cut.finish_reason == "stop"
    assert cut.token_ids[:20] == whole.token_ids[:20]
    assert 0 < cut.spec.accepted <= cut.spec.drafted
    assert cut.spec.cut >= 0
    assert sum(cut.guessed) == cut.spec.accepted


def test_a_record_at_the_models_length_takes_no_drafts_from_the_others(engine):
    text = TEXTS[0][:300]
    asked = requests(engine, [f"{text} Again: {text[:60]}"], max_new_tokens=40, ignore_eos=True)
    (alone,) = engine.generate(asked)
    ids = engine.tokenizer.encode(" ".join(TEXTS), special_tokens=False)[: ARGS["max_model_len"] - 20]
    long = Request(1, "long", ids, replace(asked[0].sampling, max_new_tokens=20))
    found = by_index(engine.generate([*asked, long]))
    assert found[0].token_ids == alone.token_ids
    assert found[0].spec.steps < len(alone.token_ids) / 2
    for one in found.values():
        assert sum(one.guessed) == one.spec.accepted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runner_args": {"max_modellen": 4}}, 'runner_args.max_modellen" is not an argument of vLLM; did you mean'),
        ({"runner_args": {"max_model_len": 99999}}, "vLLM rejects the configuration"),
        ({"speculation": {"method": "draft_model", "draft_model": "tiny_stranger"}}, "the tokenizer of "),
        ({"speculation": {"method": "speculative_config", "speculative_config": {"method": "x"}}}, "vLLM rejects"),
    ],
)
def test_what_cannot_run_is_known_before_any_weights_load(demo, change, message, request):
    from ragspec.runners.vllm.runner import Runner

    raw = {"model": demo, "runner": "vllm", "speculation": {"method": "prompt_lookup"}} | change
    if raw["speculation"].get("draft_model"):
        raw["speculation"]["draft_model"] = request.getfixturevalue(raw["speculation"]["draft_model"])
    with pytest.raises(ConfigError) as caught:
        Runner(build_config(raw)).check()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tried", [True, False])
def test_settings_that_forbid_drafts_are_noted_or_refused_before_any_weights_load(demo, tried, monkeypatch):
    from ragspec.runners.vllm import plan
    from ragspec.runners.vllm.runner import Runner

    if not tried:  # its inside is not known
        monkeypatch.setattr(plan, "TRIED", {"0.1": ""})
    sampling = {"temperature": 0.5, "min_p": 0.1}
    config = {"model": demo, "runner": "vllm", "sampling": sampling, "speculation": {"method": "prompt_lookup"}}
    runner = Runner(build_config(config))
    if tried:
        runner.check()
        assert any("min_p" in note and "answered without drafts" in note for note in runner.notes)
    else:
        with pytest.raises(ConfigError, match=r"sampling\.min_p: vLLM .* use method: none"):
            runner.check()


def in_vllm(tmp_path, text, *args):
    config, output = tmp_path / "c.yaml", tmp_path / "out.jsonl"
    config.write_text(text)
    done = ragspec("generate", "-c", config, "-i", SAMPLE, "-o", output, "--limit", RECORDS, *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return read_jsonl(output), done.stderr


@pytest.mark.wide
def test_an_end_token_that_is_text_to_the_tokenizer_is_no_part_of_the_answer(demo, expected, tmp_path):
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(demo), tmp_path / "model"
    shutil.copytree(demo, model)
    end = tokenizer.encode(expected[0], add_special_tokens=False)[6]
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [tokenizer.eos_token_id, end]}))
    found, _ = in_vllm(tmp_path, NATIVE.format(model=model, method="none"))
    output = tmp_path / "huggingface.jsonl"
    run(make_config(str(model), runner="huggingface", output=output), limit=RECORDS)
    assert [line["output"] for line in found] == [line["output"] for line in read_jsonl(output)]
    assert found[0]["finish_reason"] == "stop"
    assert expected[0].startswith(found[0]["output"])
    assert len(tokenizer.encode(found[0]["output"], add_special_tokens=False)) <= 6


NATIVE = """
model: {model}
runner: vllm
sampling: {{max_new_tokens: 24}}
speculation: {{method: {method}}}
runner_args: {{enforce_eager: true, max_model_len: 512, batch_size: 4, kv_cache_memory_bytes: 536870912}}
"""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("none", marks=pytest.mark.long),
        *wide("prompt_lookup"),
        pytest.param("suffix", marks=pytest.mark.long),
        "context",
        pytest.param("auto", marks=pytest.mark.long),
    ],
)
def test_the_answers_are_those_of_hugging_face(demo, tmp_path, expected, method):
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("arctic-inference is not installed (make setup-vllm)")
    lines, _ = in_vllm(tmp_path, NATIVE.format(model=demo, method=method))
    assert [line["output"] for line in lines] == expected
    assert (sum(line["speculation"]["drafted"] for line in lines) > 0) == (method != "none")
    if method in ("context", "auto"):
        passages = {p["id"]: p["text"] for record in read_jsonl(SAMPLE) for p in record["contexts"]}
        for line in lines:
            for copy in line["copied"]:
                assert line["output"][copy["start"] : copy["end"]] in passages[copy["context"]]


@pytest.mark.wide
def test_samples_that_cannot_be_drafted_are_those_of_an_engine_that_does_not_speculate(demo, tmp_path):
    sampled = "temperature: 0.9, min_p: 0.03, seed: 3, logit_bias: {28: 1.5}, max_new_tokens: 24"
    texts = {}
    for method in ("none", "context"):
        folder = tmp_path / method
        folder.mkdir()
        config = NATIVE.format(model=demo, method=method).replace("max_new_tokens: 24", sampled)
        if method == "none":  # prompts in pieces, each with a token that is dropped: seeds must not notice
            config = config.replace("enforce_eager: true", "enforce_eager: true, max_num_batched_tokens: 64")
            assert "max_num_batched_tokens" in config
        lines, _ = in_vllm(folder, config)
        assert sum(line["speculation"]["drafted"] for line in lines) == 0
        texts[method] = [line["output"] for line in lines]
    assert texts["context"] == texts["none"]


@pytest.mark.wide
def test_a_drafter_of_another_package_drafts_in_vllm_and_changes_no_answer(demo, tmp_path, expected, monkeypatch):
    site = install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    lines, _ = in_vllm(tmp_path, NATIVE.format(model=demo, method="repeats"))
    assert [line["output"] for line in lines] == expected
    assert sum(line["speculation"]["drafted"] for line in lines) > 0


def with_passages(asked):
    return [Request(r.index, r.id, r.token_ids, r.sampling, ((0, len(r.token_ids)),)) for r in asked]


@pytest.mark.wide
def test_our_drafter_in_vllm_changes_no_answer_where_rows_are_preempted(demo, engine):
    from ragspec.runners.huggingface import runner as huggingface

    texts = [f"{text} Again: {text[:300]}" for text in TEXTS]
    asked = with_passages(requests(engine, texts, max_new_tokens=48))
    plain = huggingface.Runner(make_config(demo, runner="huggingface"))
    plain.check()
    with plain:
        expected = {outcome.index: outcome.token_ids for outcome in plain.generate(asked)}
    found = {outcome.index: outcome for outcome in engine.generate(asked)}
    assert {index: outcome.token_ids for index, outcome in found.items()} == expected
    metrics = {metric.name: metric for metric in engine.engine.get_metrics()}
    assert metrics["vllm:num_preemptions"].value > 0
    cited = 0
    for request in asked:
        outcome = found[request.index]
        assert len(outcome.guessed) == len(outcome.token_ids)
        assert abs(sum(outcome.guessed) - outcome.spec.accepted) <= 6  # vLLM counts beyond the answer's end
        for copy in outcome.copied:
            length = copy.end - copy.start
            assert outcome.token_ids[copy.start : copy.end] == request.token_ids[copy.source : copy.source + length]
            cited += length
    assert cited > 20
    (proposer,) = engine.engine.collective_rpc(lambda worker: worker.model_runner.drafter)
    assert proposer.known == 0


def test_records_that_begin_alike_are_answered_together(engine):
    heads = [" ".join(TEXTS[i : i + 2])[:900] for i in range(4)]
    asked = requests(engine, [f"{heads[i % 4]} {i}" for i in range(16)], max_new_tokens=2)
    generations = list(engine.generate(asked))
    assert {generation.index for generation in generations} == set(range(16))
    per_head = [len(asked[i].token_ids) // 32 * 32 - 32 for i in range(4)]
    cached = sum(generation.cached_prompt_tokens for generation in generations)
    assert cached >= 2 * sum(per_head)  # of the four of a head three at most can take it from the cache


def test_another_vllm_than_tried_drafts_by_prompt_lookup(demo, monkeypatch):
    from ragspec.runners.vllm import plan
    from ragspec.runners.vllm.runner import Runner

    monkeypatch.setattr(plan, "TRIED", {"0.1": ""})
    runner = Runner(make_config(demo, method="context"))
    runner.check()
    assert runner.method == "prompt_lookup"
    assert runner.engine_args["speculative_config"]["method"] == "ngram"
    assert "additional_config" not in runner.engine_args
    assert any("prompt_lookup is used instead" in note for note in runner.notes)


AUTOGLUON = """
generator_model_name: {model}
generator_model_platform: vllm
generator_model_platform_args:
  vllm_init_params: {{speculative_model: {draft}, num_speculative_tokens: 3, enforce_eager: true, max_model_len: 512}}
  vllm_sampling_params: {{max_tokens: 24, temperature: 0}}
"""


@pytest.mark.wide
def test_autogluons_vllm_example_runs_with_local_model_names(demo, demo_draft, tmp_path, expected):
    lines, stderr = in_vllm(tmp_path, AUTOGLUON.format(model=demo, draft=demo_draft))
    assert [line["output"] for line in lines] == expected
    assert {line["speculation"]["method"] for line in lines} == {"draft_model"}
    assert sum(line["speculation"]["drafted"] for line in lines) > 0
    assert "speculative_model: from vLLM before 0.8" in stderr


@pytest.mark.wide
def test_an_interruption_keeps_finished_answers_and_ends_the_process(demo, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"query": f"Count to {i}."} for i in range(500)])
    config, output = tmp_path / "c.yaml", tmp_path / "out.jsonl"
    config.write_text(NATIVE.format(model=demo, method="prompt_lookup"))
    command = [*RAGSPEC, "generate", "-c", str(config), "-i", source, "-o", str(output)]
    process = start_interruptible(command)
    wait_for_lines(output, 3, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "run the same command again to continue" in stderr
    assert 3 <= len(read_jsonl(output)) < 500


@pytest.mark.wide
def test_an_audit_of_vllm_has_stock_generate_beside_it(demo, tmp_path):
    config = tmp_path / "c.yaml"
    written = NATIVE.format(model=demo, method="context")
    config.write_text(written.replace("max_new_tokens: 24", "max_new_tokens: 12"))
    args = ["verify", "-c", config, "-i", SAMPLE, "--limit", "2", "--reference", "2", "-o", tmp_path / "v"]
    done = subprocess.run([*RAGSPEC, *args], capture_output=True, text=True)  # three models load
    assert done.returncode == 0, done.stderr
    audit = json.loads((tmp_path / "v" / "verify.json").read_text())
    found = {c["run"]: (c["records"], c["bugs"]) for c in audit["reference"]["comparisons"]}
    assert found == {"none": (2, []), "context": (2, [])}
    assert audit["not_compared"] == []


def test_a_secret_reaches_vllm_and_nothing_that_is_written(demo):
    from ragspec.config.redaction import revealed
    from ragspec.runners.vllm.runner import Runner

    raw = make_config(demo, method="context").model_dump()
    raw["runner_args"] |= {"hf_token": "correct horse battery"}
    runner = Runner(build_config(raw))
    runner.check()
    assert revealed(runner.engine_args)["hf_token"] == "correct horse battery"
    assert "horse" not in json.dumps(runner.about())
    assert runner.about()["dtype"] == "float32"
