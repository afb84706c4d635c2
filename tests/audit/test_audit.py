"""The losslessness audit: what is identical, what is a tie, what is a bug; and a planted bug that it must find."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ragspec.audit.lossless import SAFETY, Audit, compare_bits, divergences, judge
from ragspec.audit.referee import ModelReferee, Target, check_same_answers, sample, stock_config
from ragspec.benchmark.passes import Answer, Answers, fingerprints, read_answers
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.records import Request, Sampling
from tests import warm
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, wide, write_jsonl

GREEDY = Sampling(max_new_tokens=8)


def answer(name, ids, prompt=(1, 2), sampling=GREEDY):
    return Answer(name, ids, list(prompt), sampling)


def run_of(*answers, failed=()):
    return Answers({one.id: one for one in answers}, failed)


def parting_of(one, two):
    return next(divergences(run_of(one), run_of(two), Audit()))


class Fixed:
    def __init__(self, *values):
        self.values = values

    def judge(self, parting):
        return self.values


def test_answers_are_matched_by_id_and_compared_to_the_first_difference():
    audit = Audit()
    plain = [answer("a", [1, 2, 3]), answer("b", [1, 2, 3]), answer("c", [1, 2]), answer("e", [1])]
    other = [answer("b", [1, 9, 3]), answer("a", [1, 2, 3]), answer("c", [1, 2, 3]), answer("d", [1]), answer("f", [1])]
    found = list(divergences(run_of(*plain, failed=("d",)), run_of(*other), audit))
    assert audit.identical == 1
    assert [(p.id, p.position, p.plain, p.speculative) for p in found] == [("b", 1, 2, 9), ("c", 2, None, 3)]
    assert found[0].common == [1]
    assert audit.unanswered == ["d", "e", "f"]


def test_a_repeated_id_does_not_hide_the_record_that_was_answered(tmp_path):
    """The repeated one is an error line with the same id."""
    whole = {"id": "a", "token_ids": [1, 2], "prompt_token_ids": [3], "sampling": asdict(GREEDY)}
    lines = [whole, {"id": "a", "error": {"type": "RecordError", "message": "again"}}]
    one = read_answers(Path(write_jsonl(tmp_path / "one.jsonl", lines)))
    two = read_answers(Path(write_jsonl(tmp_path / "two.jsonl", [{**whole, "token_ids": [1, 9]}, lines[1]])))
    audit = Audit()
    assert [parting.id for parting in divergences(one, two, audit)] == ["a"]
    assert audit.unanswered == ["a"]


@pytest.mark.parametrize(
    ("values", "tie"),
    [
        ((0.0, 1e-6, 1e-6), True),
        ((SAFETY * 0.9e-6, 0.0, 1e-6), True),
        ((SAFETY * 1.1e-6, 0.0, 1e-6), False),
        ((0.0, SAFETY * 1.1e-6, 1e-6), False),  # plain decoding was wrong: a bug all the same
    ],
)
def test_a_tie_lies_within_what_shapes_alone_do(values, tie):
    parting = parting_of(answer("b", [1, 2]), answer("b", [1, 3]))
    assert judge(parting, lambda: Fixed(*values)).tie is tie


def test_an_answer_that_ends_early_is_never_a_tie():
    parting = parting_of(answer("b", [1, 2]), answer("b", [1]))
    assert not judge(parting, lambda: Fixed(0.0, 0.0, 1.0)).tie


@pytest.fixture(scope="module")
def target(tiny):
    return Target(build_config({"model": str(tiny)}), {})


@pytest.fixture(scope="module")
def referee(target):
    return ModelReferee(target.model, target.rules)


@pytest.mark.parametrize("sampling", [GREEDY, replace(GREEDY, repetition_penalty=1.3)])
def test_the_referee_knows_the_models_choice(target, referee, sampling):
    prompt = list(range(5, 30))
    logits = target.model(torch.tensor([prompt])).logits[0, -1]
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(prompt)
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.3, logits[seen] / 1.3)
    best, worst = int(logits.argmax()), int(logits.argmin())
    parting = parting_of(answer("x", [best], prompt, sampling), answer("x", [worst], prompt, sampling))
    shortfall, plain_shortfall, noise = referee.judge(parting)
    assert plain_shortfall <= noise
    assert shortfall == pytest.approx(float(logits.max() - logits.min()), rel=1e-3)
    assert shortfall > 100 * SAFETY * noise


def test_the_referee_draws_as_the_engine_does(target, referee):
    """The token that the record's own noise chooses has no shortfall; its neighbours have one."""
    from ragspec.engine.sampling import Noise, draw
    from tests.chances import probabilities

    sampling = replace(GREEDY, temperature=1.0, seed=7)
    prompt = list(range(5, 30))
    logits = target.model(torch.tensor([prompt])).logits[:, -1].float()
    weights = probabilities(logits.detach(), sampling)
    chosen = draw(weights, [Noise(7, "x").at(0)])[0]
    other = (chosen + 3) % weights.shape[1]
    parting = parting_of(answer("x", [chosen], prompt, sampling), answer("x", [other], prompt, sampling))
    shortfall, plain_shortfall, noise = referee.judge(parting)
    assert plain_shortfall <= noise
    assert shortfall > SAFETY * noise


def config_of(tiny, tmp_path, **more):
    config = {
        "model": str(tiny),
        "input": str(SAMPLE),
        "sampling": {"max_new_tokens": 24},
        "prompt": {"max_prompt_tokens": 300},
        "speculation": {"method": "prompt_lookup", "num_tokens": 4},
    }
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(config | more))
    return path


def test_verify_finds_a_planted_wrong_verifier(tiny, tmp_path):
    """A verifier that accepts every draft unseen: answers change, and the audit must call that a bug."""
    fault = "import ragspec.engine.sampling as verify\nverify.agreement = lambda draft, chosen: len(draft)\n"
    done, audit, _ = verify_with(fault, config_of(tiny, tmp_path), tmp_path)
    assert done.returncode == 1, done.stderr
    assert "BUG: " in done.stderr
    assert audit["bugs"]
    assert all(bug["shortfall"] > bug["noise"] for bug in audit["bugs"] if bug["shortfall"] is not None)
    reproducer = json.loads(next((tmp_path / "v" / "bugs").iterdir()).read_text())
    assert reproducer["config"]["speculation"]["method"] == "prompt_lookup"
    assert reproducer["prompt_token_ids"]


SELF_CHECK_OFF = """
import ragspec.models.compat as rounding
rounding.tolerance = lambda dtype: float("inf")
"""
FAULTS = {
    "attention 1.05 times too sharp": """
import ragspec.engine.model.attention as attention
attend = attention.attend
attention.attend = lambda module, query, *args, **kwargs: attend(module, query * 1.05, *args, **kwargs)
""",
    "another base of the rotary positions": """
import ragspec.engine.model.forward as forward
class Model(forward.Model):
    def __init__(self, inner, *more):
        super().__init__(inner, *more)
        inner.model.rotary_emb.inv_freq *= 0.97
forward.Model = Model
""",
}


def verify_with(fault, config, tmp_path, *args):
    (tmp_path / "sitecustomize.py").write_text(fault)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ["verify", "-c", config, "--limit", 4, "-o", tmp_path / "v", *args]
    done = warm.ragspec(tmp_path, *command, env={**os.environ, "PYTHONPATH": path})
    audit = json.loads((tmp_path / "v" / "verify.json").read_text())
    return done, audit, {c["run"]: c for c in audit["reference"]["comparisons"]}


@pytest.mark.parametrize(
    ("fault", "temperature"),
    [
        ("attention 1.05 times too sharp", 0.0),
        pytest.param("attention 1.05 times too sharp", 0.8, marks=pytest.mark.long),
        *wide(("another base of the rotary positions", 0.0)),
    ],
)
@pytest.mark.wide
def test_a_fault_of_the_engine_itself_is_found(tiny, tmp_path, fault, temperature):
    """It changes plain decoding and speculation alike: held against each other they are identical."""
    config = config_of(tiny, tmp_path, sampling={"max_new_tokens": 24, "temperature": temperature})
    done, audit, against = verify_with(SELF_CHECK_OFF + FAULTS[fault], config, tmp_path)
    assert done.returncode == 1, done.stderr
    assert (audit["run"], audit["against"], audit["identical"], audit["bugs"]) == ("prompt_lookup", "none", 4, [])
    for name in ("none", "prompt_lookup"):
        assert against[name]["against"] == "stock generate()"
        assert against[name]["bugs"]
        assert all(bug["shortfall"] > SAFETY * bug["noise"] for bug in against[name]["bugs"])
        assert f"{name} against stock generate(): {against[name]['identical']} of 4" in done.stderr
        names = {path.name for path in (tmp_path / "v" / "bugs").iterdir()}
        assert {f"{name}-stock-{bug['id']}.json" for bug in against[name]["bugs"]} <= names
    assert "BUG: " in done.stderr


@pytest.mark.parametrize("temperature", [*wide(0.0), 0.8])
def test_verify_proves_that_nothing_changed(tiny, tmp_path, temperature):
    sampling = {"max_new_tokens": 24, "temperature": temperature, "top_p": 0.9, "repetition_penalty": 1.1}
    done, audit, against = verify_with("", config_of(tiny, tmp_path, sampling=sampling), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prompt_lookup against none: 4 of 4 answers are identical" in done.stderr
    assert (audit["records"], audit["identical"], audit["ties"], audit["bugs"]) == (4, 4, [], [])
    assert len(audit["reference"]["records"]) == 4
    for name in ("none", "prompt_lookup"):
        assert (against[name]["records"], against[name]["bugs"]) == (4, [])
        assert f"{name} against stock generate(): " in done.stderr
    assert audit["not_compared"] == []
    drafted, accepted = audit["tested"]["drafted"], audit["tested"]["accepted"]
    assert drafted > 0
    assert f"{accepted} of {drafted} drafted tokens were accepted" in done.stderr


def test_verify_says_that_a_drafter_that_fails_tested_nothing(tiny, tmp_path):
    plugin = tmp_path / "broken.py"
    plugin.write_text(
        "class Broken:\n    def __init__(self, settings):\n        pass\n\n"
        "    def open(self, prompt, passages=()):\n        raise KeyError('lost')\n"
    )
    config = config_of(tiny, tmp_path)
    args = ["--plugin", plugin, "--method", "broken", "--reference", 0]
    done, audit, _ = verify_with("", config, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert "no token was drafted, so speculation was not tested" in done.stderr
    assert audit["tested"]["drafted"] == 0
    assert any("broken failed in open (KeyError" in note for note in audit["tested"]["notes"]), audit["tested"]


@pytest.mark.wide
def test_the_reference_can_be_left_out(tiny, tmp_path):
    fault = SELF_CHECK_OFF + FAULTS["attention 1.05 times too sharp"]
    done, _, against = verify_with(fault, config_of(tiny, tmp_path), tmp_path, "--reference", 0)
    assert done.returncode == 0
    assert against == {}
    assert "stock generate()" not in done.stderr


def answers_of(lengths):
    return [answer(f"r{i}", [1], [1] * length) for i, length in enumerate(lengths)]


def test_the_sample_holds_the_longest_and_the_shortest_prompt():
    answers = answers_of([5, 9, 2, 7, 3, 8, 4, 6])
    draws = set()
    for seed in range(20):
        chosen = [one.id for one in sample(answers, 4, seed)]
        assert len(chosen) == 4
        assert {"r1", "r2"} <= set(chosen)
        assert chosen == sorted(chosen), "in the order of the run"
        assert chosen == [one.id for one in sample(answers, 4, seed)]
        draws.add(tuple(chosen))
    assert len(draws) > 5
    assert [one.id for one in sample(answers, 1, 0)] == ["r1", "r2"]
    assert [one.id for one in sample(answers, 99, 0)] == [f"r{i}" for i in range(8)]
    assert sample([], 8, 0) == []


def test_the_model_is_loaded_as_the_run_loads_it(tiny):
    args = {"dtype": "bfloat16", "model_args": {"attn_implementation": "eager"}, "generate_args": {"eos_token_id": 7}}
    target = Target(build_config({"model": str(tiny), "runner_args": args}), {})
    assert target.model.dtype == torch.bfloat16
    assert target.model.config._attn_implementation == "eager"
    request = Request(0, "a", [5, 6, 7], Sampling(max_new_tokens=2))
    assert len(next(iter(target.answers([request]))).token_ids) <= 2
    vllm = build_config({"model": str(tiny), "runner": "vllm", "runner_args": {"max_model_len": 128}})
    assert Target(vllm, {"dtype": "bfloat16"}).model.dtype == torch.bfloat16


def test_revision_and_trust_reach_the_reference():
    raw = {"model": "m", "runner_args": {"revision": "abc", "trust_remote_code": True}}
    for runner in ("huggingface", "vllm"):
        args = stock_config(build_config(raw | {"runner": runner}), {"dtype": "float16"}).args()
        assert (args.revision, args.trust_remote_code, args.engine, args.batch_size) == (
            *("abc", True, "transformers"),
            1,
        )


@pytest.mark.parametrize(
    ("args", "ran", "message"),
    [
        ({"hf_overrides": {"rope_theta": 5}}, {}, "runner_args.hf_overrides exists only in vLLM"),
        ({"sampling_args": {"min_tokens": 5}}, {}, "runner_args.sampling_args exists only in vLLM"),
        ({}, {"quantized": True}, "vLLM quantizes the weights"),
    ],
)
def test_what_transformers_would_answer_otherwise_is_no_reference(args, ran, message):
    with pytest.raises(ConfigError, match=message):
        check_same_answers(build_config({"model": "m", "runner": "vllm", "runner_args": args}), ran)
    check_same_answers(build_config({"model": "m", "runner": "vllm", "runner_args": {"max_model_len": 99}}), {})


def test_a_run_without_a_reference_says_why(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"runner: fake\ninput: {SAMPLE}\nspeculation: {{method: prompt_lookup}}")
    done = ragspec("verify", "-c", config, "--limit", 3, "-o", tmp_path / "v")
    assert done.returncode == 0, done.stderr
    assert "prompt_lookup against none: 3 of 3 answers are identical" in done.stderr
    why = "stock generate(): runner fake has no model that transformers could load"
    assert f"not compared: {why}" in done.stderr
    assert json.loads((tmp_path / "v" / "verify.json").read_text())["not_compared"] == [why]


@pytest.mark.wide
def test_sampled_records_of_a_draft_model_are_left_out_and_said_so(tiny, tiny_draft, tmp_path):
    """They have the same distribution with a draft model, and another text."""
    body = {"prompt": "A kiln is", "max_tokens": 8}
    records = [{"custom_id": "hot", "body": body | {"temperature": 1.0}}, {"custom_id": "cold", "body": body}]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    speculation = {"method": "draft_model", "draft_model": str(tiny_draft), "num_tokens": 3}
    done, audit, _ = verify_with("", config_of(tiny, tmp_path, input=source, speculation=speculation), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (audit["records"], audit["reference"]["records"]) == (1, ["cold"])
    assert "1 sampled answers: with draft_model they have the same distribution" in audit["not_compared"][0]


def test_all_answers_of_a_record_are_compared(tiny, tmp_path):
    several = {"custom_id": "a", "body": {"prompt": "A kiln is", "max_tokens": 6, "temperature": 1.0, "n": 3}}
    prompts = {"custom_id": "b", "body": {"prompt": ["A kiln is", "A lamp was"], "max_tokens": 6, "n": 2}}
    source = write_jsonl(tmp_path / "in.jsonl", [several, prompts])
    done, audit, against = verify_with("", config_of(tiny, tmp_path, input=source), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prompt_lookup against none: 5 of 5 answers are identical" in done.stderr
    assert sorted(audit["reference"]["records"]) == ["a", "a#1", "a#2", "b", "b#1"]
    assert against["prompt_lookup"]["identical"] + len(against["prompt_lookup"]["ties"]) == 5


def test_another_second_answer_is_another_answer(tmp_path):
    def run(*others):
        first = {"id": "a", "token_ids": [1], "prompt_token_ids": [3], "sampling": asdict(GREEDY)}
        line = first | {"others": [first | {"id": f"a#{at}", "token_ids": ids} for at, ids in enumerate(others, 1)]}
        path = Path(write_jsonl(tmp_path / "one.jsonl", [line]))
        return fingerprints(path), read_answers(path).each()

    (one, plain), (two, other) = run([1, 2], [3]), run([1, 9], [3])
    audit = Audit()
    assert [parting.id for parting in divergences(plain, other, audit)] == ["a#1"]
    assert audit.identical == 2
    assert one["a"] != two["a"]


@pytest.mark.wide
def test_a_check_that_compares_nothing_fails(tiny, tiny_draft, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"custom_id": "a", "body": {"prompt": "A", "temperature": 1.0}}])
    speculation = {"method": "draft_model", "draft_model": str(tiny_draft), "num_tokens": 3}
    done, audit, _ = verify_with("", config_of(tiny, tmp_path, input=source, speculation=speculation), tmp_path)
    assert audit["records"] == 0
    assert "no answer could be compared" in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"speculation": {"method": "none"}}, "with method none there is nothing to verify"),
        ({"sampling": {"temperature": 0.7}, "runner_args": {"engine": "transformers"}}, "same distribution"),
    ],
)
def test_verify_refuses_what_it_cannot_compare(tiny, tmp_path, more, message):
    done = ragspec("verify", "-c", config_of(tiny, tmp_path, runner="huggingface", **more), "-o", tmp_path / "v")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.wide
def test_sampled_records_of_a_draft_of_other_tokens_are_compared(tiny, tiny_gpt2, tmp_path):
    """They are drawn with the noise of their places: one seed, one text."""
    records = [{"id": f"r{i}", "query": f"A kiln is {i}", "reference": "hot"} for i in range(3)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    drafting = {"method": "draft_model", "draft_model": tiny_gpt2, "draft_tokenizer": tiny_gpt2, "num_tokens": 3}
    config = config_of(
        tiny, tmp_path, input=source, speculation=drafting, sampling={"temperature": 0.9, "max_new_tokens": 8}
    )
    done, audit, _ = verify_with("", config, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (audit["records"], audit["identical"]) == (3, 3)
    assert set(audit["quality"]) == {"none", "draft_model"}
    assert audit["quality"]["draft_model"]["differences"]["f1"]["mean"] == 0
    assert "none: F1" in done.stderr


# -- bits ------------------------------------------------------------------------------------------

EXACT = {"attention": "flex", "graphs": "emulate", "exact": True, "batch_size": 4}
OFF_BY_A_BIT = """
from dataclasses import replace
import ragspec.engine.acceptance as acceptance
note = acceptance._note_logprobs
def noted(places, chosen, logits):
    note(places, chosen, logits)
    for place in places:
        if place.item.draft.token_ids:  # a step that verifies
            place.item.logprobs = [replace(one, logprob=one.logprob * (1 + 1e-6)) for one in place.item.logprobs]
acceptance._note_logprobs = noted
"""


def test_exact_runs_are_compared_bit_for_bit(tiny, tmp_path):
    done, audit, _ = verify_with("", config_of(tiny, tmp_path, runner_args=EXACT), tmp_path, "--reference", 0)
    assert done.returncode == 0, done.stderr
    assert audit["bits"] == {"records": 4, "same": 4, "promised": True, "first": []}
    assert "4 of 4 answers have the same log-probabilities, bit for bit" in done.stderr


@pytest.mark.parametrize("promised", [True, pytest.param(False, marks=pytest.mark.long)])
def test_another_bit_is_a_fault_where_none_is_promised(tiny, tmp_path, promised):
    config = config_of(tiny, tmp_path, runner_args=EXACT | {"exact": promised})
    done, audit, _ = verify_with(OFF_BY_A_BIT, config, tmp_path, "--reference", 0, "--bits")
    assert (audit["identical"], audit["bugs"]) == (4, []), "tokens are the same"
    assert audit["bits"]["same"] < 4
    name, position, plain, other = audit["bits"]["first"][0]
    assert plain != other
    assert f'{"BUG" if promised else "rounding"}: "{name}", token {position}: {other} instead of {plain}' in done.stderr
    assert done.returncode == int(promised)


def test_bits_differ_where_tokens_or_log_probabilities_do():
    def run(*logprobs, ids=(1, 2)):
        return run_of(replace(answer("a", list(ids)), token_logprobs=list(logprobs)))

    assert compare_bits(run(-0.5, -1.0), run(-0.5, -1.0), True).same == 1
    assert compare_bits(run(-0.5, -1.0), run(-0.5, -1.25), True).first == [("a", 1, -1.0, -1.25)]
    assert compare_bits(run(-0.5, -1.0), run(-0.5, -1.0, ids=(1, 3)), True).same == 0
    assert compare_bits(run(-0.5, ids=(1,)), run(-0.5, -1.0), False).first == [("a", 1, None, -1.0)]
