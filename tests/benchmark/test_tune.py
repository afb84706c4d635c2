"""Tuning: speculation has to win every pair, or off wins; and what it writes is a config."""

import yaml
from rich.console import Console

from ragspec.benchmark.plan import Candidate
from ragspec.benchmark.tune import candidates, choose, tune, write_config
from ragspec.config.load import build_config
from tests import warm
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE


def plan(*methods):
    return [Candidate(m, build_config({"model": "m", "input": "x", "speculation": {"method": m}})) for m in methods]


def winner(**speeds):
    return choose(plan(*speeds), speeds).winner.name


def test_the_fastest_wins():
    assert winner(none=[10.0, 10.0], context=[15.0, 14.0], prompt_lookup=[12.0, 12.0]) == "context"


def test_off_wins_where_the_gain_is_small_or_not_sure():
    assert winner(none=[10.0, 10.0], context=[10.2, 10.2]) == "none"
    assert winner(none=[10.0, 10.0, 10.0], context=[14.0, 14.0, 9.9]) == "none"
    assert winner(none=[10.0], context=[None]) == "none"


def test_the_verdict_says_how_sure_it_is_and_what_may_be_as_fast():
    def verdict(**speeds):
        return choose(plan(*speeds), speeds).verdict

    sure = verdict(none=[10.0, 10.1, 10.0], context=[15.0, 15.1, 15.0], prompt_lookup=[12.0, 12.1, 12.0])
    assert sure == "context is chosen: 1.50x (1.49 to 1.51) the speed of none"
    chance = verdict(none=[10.0, 10.0], context=[15.0, 11.0], prompt_lookup=[13.0, 11.0])
    assert chance == (
        "context is chosen: 1.30x (0.18 to 9.21) the speed of none, which may be chance after 2 passes; "
        "a larger --budget would tell; not clearly slower: prompt_lookup"
    )
    assert "1.50x (one pass) the speed of none, which may be chance after 1 pass;" in verdict(
        none=[10.0], context=[15.0]
    )
    assert verdict(none=[10.0], context=[9.0]).startswith("none is chosen: nothing else was faster in every pass")
    assert (
        "context: 15.0 tokens/s, 1.50x (one pass) the speed of none, 1 pass"
        in choose(plan("none", "context"), {"none": [10.0], "context": [15.0]}).evidence
    )


def test_what_the_budget_left_no_time_for_is_said_to_be_untimed():
    tuned = choose(plan("none", "context", "prompt_lookup"), {"none": [10.0], "context": [], "prompt_lookup": []})
    assert tuned.verdict == "none is chosen: nothing else was timed within the budget; give a larger --budget"
    assert tuned.evidence == [
        "none: 10.0 tokens/s, 1 pass",
        "context: not timed: too little of the budget was left",
        "prompt_lookup: not timed: too little of the budget was left",
    ]
    assert [row["method"] for row in tuned.figures] == ["none"]
    some = choose(plan("none", "context", "prompt_lookup"), {"none": [10.0], "context": [9.0], "prompt_lookup": []})
    assert some.verdict.startswith("none is chosen: nothing else was faster")
    assert some.evidence[-1] == "prompt_lookup: not timed: too little of the budget was left"


def test_candidates_are_what_the_runner_can_do():
    config = build_config({"model": "m", "input": "x", "speculation": {"method": "prompt_lookup", "num_tokens": 3}})
    assert [c.name for c in candidates(config)] == ["none", "prompt_lookup", "context"]
    assert candidates(config)[1].config.speculation.num_tokens == 3
    names = [c.name for c in candidates(build_config({"model": "m", "runner": "vllm", "input": "x"}))]
    assert names[:4] == ["none", "context", "prompt_lookup-k4", "prompt_lookup-k8"]


def test_tune_writes_a_config_that_runs(tiny, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {tiny}\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 12}}\nprompt: {{max_prompt_tokens: 300}}"
    )
    out = tmp_path / "tuned.yaml"
    done = warm.ragspec(tmp_path, "tune", "-c", config, "--limit", 2, "--budget", 5, "-o", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text.startswith("# Chosen by `ragspec tune`: ")
    assert "none: " in text
    assert yaml.safe_load(text)["speculation"]["method"] in ("none", "context", "prompt_lookup")
    again = warm.ragspec(tmp_path, "generate", "-c", out, "--limit", 1, "-o", tmp_path / "a.jsonl")
    assert again.returncode == 0, again.stderr


def test_a_budget_for_nothing_else_is_said_in_the_written_config(tiny, tmp_path):
    config = build_config({"model": str(tiny), "input": str(SAMPLE), "sampling": {"max_new_tokens": 4}})
    tuned = tune(config, tmp_path, budget_s=0, limit=1, console=Console(quiet=True))
    write_config(tuned, tmp_path / "tuned.yaml", "one record")
    text = (tmp_path / "tuned.yaml").read_text()
    assert "#   context: not timed: too little of the budget was left\n" in text
    assert "#   none is chosen: nothing else was timed within the budget; give a larger --budget\n" in text


def test_tune_without_choice_is_one_line(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"runner: fake\ninput: {SAMPLE}")
    done = ragspec("tune", "-c", config)
    assert done.returncode == 2
    assert "has no method to try without further settings" in done.stderr


def test_tune_says_first_that_its_config_cannot_be_written(tmp_path):
    records = tmp_path / "q.jsonl"
    records.write_bytes(SAMPLE.read_bytes())
    (tmp_path / "c.yaml").write_text(f"runner: fake\ninput: {records}\noutput: {tmp_path / 'a.jsonl'}\n")
    (tmp_path / "notes.yaml").write_text("runner: fake\n")
    for name, words in (
        ("q.jsonl", "is the input or output of the config"),
        ("a.jsonl", "is the input or output of the config"),
        ("notes.yaml", "exists and is no config of `ragspec tune`"),
        ("", "is a folder"),
    ):
        done = ragspec("tune", "-c", tmp_path / "c.yaml", "-o", tmp_path / name)
        assert done.returncode == 2
        assert words in done.stderr
    assert records.read_bytes() == SAMPLE.read_bytes()
