"""A judge: what it is asked, that it says yes or no, and what is made of it; not whether a tiny model judges well."""

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.quality.evaluate import _asked, evaluate, judge_config, verdicts
from ragspec.quality.graded import Graded
from tests.conftest import write_jsonl


def test_a_judge_that_thinks_may_do_so_as_its_config_says():
    raw = {"model": "demo", "sampling": {"max_new_tokens": 900}, "prompt": {"split_reasoning": True}}
    raw["prompt"]["chat_template_kwargs"] = {"enable_thinking": True}
    judge = judge_config(build_config(raw))
    assert judge.sampling.max_new_tokens == 900
    assert judge.prompt.chat_template_kwargs == {"enable_thinking": True}
    assert judge.structured.choice == ["yes", "no"]
    assert (
        judge_config(build_config({"model": "demo", "sampling": {"max_new_tokens": 2}})).sampling.max_new_tokens == 16
    )


def test_a_judge_sees_question_references_and_answer():
    answers = {"q1": Graded("It was Ann.", ("Ann", "Ann Smith"), False), "q2": Graded("x", (), False)}
    asked = list(_asked(answers, {"q1": "Who?", "q2": "Why?"}))
    assert [each["id"] for each in asked] == ["q1"]
    assert all(text in asked[0]["query"] for text in ("Who?", "- Ann\n- Ann Smith", "It was Ann."))


def test_a_judge_is_the_model_alone():
    config = build_config(
        {
            "runner": "fake",
            "retrieval": {"index": "i"},
            "prompt": {"order": "shared", "template": "{{ contexts }} {{ query }}", "system": "Be strict."},
            "sampling": {"temperature": 1.0, "n": 3},
        }
    )
    judge = judge_config(config)
    assert judge.retrieval is None
    assert (judge.prompt.order, judge.prompt.system, judge.sampling.temperature, judge.sampling.n) == (
        *("rank", "Be strict."),
        *(0.0, 1),
    )


def test_real_verdicts_are_yes_or_no_and_agreement_is_told(tmp_path, tiny):
    judge = build_config({"model": str(tiny), "runner": "huggingface"})
    texts = ["Ann", "Bob", "salt", "no"]
    graded = {f"q{i}": Graded(text, ("Ann",), False) for i, text in enumerate(texts)}
    found = verdicts(judge, graded, dict.fromkeys(graded, "Who?"))
    assert set(found) == set(graded)
    answers = write_jsonl(tmp_path / "out.jsonl", [{"id": name, "output": one.text} for name, one in graded.items()])
    records = [{"id": name, "query": "Who?", "reference": "Ann"} for name in graded]
    records += [{"id": "q9", "query": "Not answered"}]
    said = evaluate(answers, references=write_jsonl(tmp_path / "in.jsonl", records), judge=judge)
    right = [found[name] == (one.text == "Ann") for name, one in graded.items()]
    assert said.agreement.mean == pytest.approx(100 * sum(right) / 4)
    assert said.scores["judged_right"].mean == pytest.approx(100 * sum(found.values()) / 4)


def test_a_judge_that_says_nothing_usable_is_told_of(tmp_path):
    answers = write_jsonl(tmp_path / "out.jsonl", [{"id": "q0", "output": "Ann"}])
    records = write_jsonl(tmp_path / "in.jsonl", [{"id": "q0", "query": "Who?", "reference": "Ann"}])
    said = evaluate(answers, references=records, judge=build_config({"runner": "fake"}))  # it knows no grammars
    assert "the judge gave no verdict on 1 answers" in said.notes
    assert "judged_right" not in said.scores
    with pytest.raises(ConfigError, match="--judge needs the questions"):
        evaluate(answers, judge=build_config({"runner": "fake"}))
