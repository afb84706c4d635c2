"""What may be said of plain decoding: only where it ran, on the same runner and with as many records at once."""

import json
from dataclasses import replace

import pytest

from ragspec.benchmark.baseline import Setting, baselines, fewest_of, missing, plain_of
from ragspec.benchmark.plan import baseline_of, make_plan, setting_of
from ragspec.benchmark.results import Results, parse
from ragspec.benchmark.table import print_results
from ragspec.cli.console import stderr
from ragspec.config.load import build_config
from ragspec.report.figures import figures
from ragspec.report.page import render
from ragspec.report.rows import rows
from ragspec.report.words import summary
from tests import warm
from tests.conftest import SAMPLE
from tests.report.test_report import ratio, results, run  # noqa: F401 (a fixture)


def plan_of(methods, sizes=(), runner="fake", **more):
    return make_plan(build_config({"runner": runner, "input": "x", **more}), methods, sizes)


@pytest.mark.parametrize(
    ("other", "comparable"),
    [
        (Setting("none", "vllm", "none", 8), True),
        (Setting("none", "vllm", "none", 4), False),
        (Setting("none", "huggingface", "none", 8), False),
        (Setting("first", "vllm", "context", 8), False),
        (Setting("peer", "vllm", "none", 8, peer=True), False),
    ],
)
def test_only_plain_decoding_of_the_same_kind_is_a_baseline(other, comparable):
    assert plain_of(Setting("s", "vllm", "suffix", 8), [other]) == (0 if comparable else None)


def test_runs_on_workers_are_compared_with_as_many_and_with_the_fewest():
    plan = make_plan(build_config({"runner": "fake", "input": "x"}), ["none", "prompt_lookup"], workers=[2, 1, 4])
    names = ["none-w2", "none-w1", "none-w4", "prompt_lookup-w2", "prompt_lookup-w1", "prompt_lookup-w4"]
    assert [candidate.name for candidate in plan] == names
    assert plan[2].config.scale.workers == 4
    assert [baseline_of(candidate, plan).name for candidate in plan] == [*names[:3], *names[:3]]
    settings = [setting_of(candidate) for candidate in plan]
    assert [fewest_of(setting, settings) for setting in settings] == [1, None, 1, 4, None, 4]
    alone = Setting("none", "fake", "none", None)
    assert fewest_of(settings[0], [*settings, alone]) == 6  # one process is fewer than one worker


def test_a_plan_without_plain_decoding_has_no_baseline():
    plan = plan_of(["prompt_lookup"], [1, 2])
    assert [baseline_of(candidate, plan) for candidate in plan] == [None, None]
    plan = plan_of(["none", "prompt_lookup"], [1, 2])
    assert [baseline_of(candidate, plan).name for candidate in plan] == ["none-b1", "none-b2", "none-b1", "none-b2"]


def test_what_ran_with_another_batch_size_than_asked_for_is_not_compared():
    """Stock generate() speculates one record at a time, whatever was asked for."""
    plan = plan_of(["none", "prompt_lookup"], [4])
    assert baseline_of(plan[1], plan, {"none-b4": 4, "prompt_lookup-b4": 1}) is None
    assert "--batch-size 1 adds it" in missing(
        Setting("prompt_lookup-b4", "huggingface", "prompt_lookup", 1), [Setting("none-b4", "huggingface", "none", 4)]
    )


def benchmark(tmp_path, config, *args):
    path, out = tmp_path / "c.yaml", tmp_path / "b"
    path.write_text(f"{config}\ninput: {SAMPLE}\nsampling: {{max_new_tokens: 4}}")
    done = warm.ragspec(tmp_path, "benchmark", "-c", path, "--repeat", 1, "--limit", 3, "-o", out, *args)
    assert done.returncode == 0, done.stderr
    return done, json.loads((out / "results.json").read_text()), (out / "report.html").read_text()


def test_a_benchmark_without_plain_decoding_claims_nothing_of_it(tmp_path):
    done, found, page = benchmark(tmp_path, "runner: fake", "-m", "prompt_lookup", "--batch-size", 1, "--batch-size", 2)
    assert [run["identical"] for run in found["runs"]] == [None, None]
    assert found["ratios"] == []
    for name, size in (("prompt_lookup-b1", 1), ("prompt_lookup-b2", 2)):
        note = f"{name} is not compared with plain decoding, which did not run on fake at batch size {size}; "
        assert any(said.startswith(note) and said.endswith("--method none adds it") for said in found["notes"])
        assert note in done.stderr
        assert note in page
        (line,) = [line for line in done.stderr.splitlines() if line.startswith(f"{name} ") and "compared" not in line]
        assert line.split()[2] == "-"
        assert line.split()[-1] == "-"
    assert "of plain decoding" not in page
    assert "3 of 3" not in page


@pytest.mark.wide
def test_a_method_that_came_to_run_alone_is_not_held_against_batches(tiny, tmp_path):
    """Stock generate() answers eight at once without drafts and one at a time with them."""
    stock = f"model: {tiny}\nprompt: {{max_prompt_tokens: 100}}\nrunner_args: {{engine: transformers}}"
    _, found, page = benchmark(tmp_path, stock, "-m", "none", "-m", "prompt_lookup")
    by_name = {run["name"]: run for run in found["runs"]}
    assert (by_name["none"]["batch_size"], by_name["prompt_lookup"]["batch_size"]) == (8, 1)
    assert (by_name["none"]["identical"], by_name["prompt_lookup"]["identical"]) == (3, None)
    assert found["ratios"] == []
    assert any(note.endswith("--batch-size 1 adds it") for note in found["notes"])
    assert "token for token" not in summary(parse(Results, found))[1]
    assert "nothing to compare" in page


def test_a_report_of_older_results_follows_the_same_rule(results, capsys, tmp_path):  # noqa: F811
    """Ratios and counts against whatever came first were written before; they are not drawn."""
    older = replace(
        results,
        runs=(run("context", "context", 20.0), run("prompt_lookup", "prompt_lookup", 30.0)),
        ratios=(ratio("prompt_lookup", "context", 1.5, 1.4, 1.6),),
    )
    assert baselines(older.runs) == {"context": None, "prompt_lookup": None}
    sentences = " ".join(summary(older))
    assert "nothing to compare" in sentences
    assert "1.50" not in sentences
    assert "token for token, that" not in sentences
    assert [(row.ratio, row.run.identical) for row in rows(older)] == [(None, None)] * 2
    assert not [figure for figure in figures(older) if figure.title.startswith("Speed-up")]
    assert "10 of 10" not in render(older)
    print_results(stderr(), older, tmp_path)
    assert "1.50x" not in capsys.readouterr().err


def test_the_summary_names_whose_answers_were_compared(results):  # noqa: F811
    alone = run("context-b1", "context", 9.0, batch_size=1, identical=None)
    sentences = summary(replace(results, runs=(*results.runs, alone)))
    assert sentences[1] == "Every answer of context is, token for token, that of plain decoding."
    assert "plain decoding" not in " ".join(summary(replace(results, runs=results.runs[:1])))


def test_a_peer_is_no_baseline_and_still_held_against(results):  # noqa: F811
    peer = run("peer-hf", "none", 10.0, peer=True, identical=None)
    beside = replace(
        results,
        runs=(run("context", "context", 30.0, identical=None), peer),
        ratios=(ratio("context", "peer-hf", 3.0, 2.9, 3.1),),
    )
    sentences = summary(beside)
    assert "context is 3.00 times (2.90 to 3.10) as fast as hf." in sentences
    assert "token for token" not in " ".join(sentences)
    assert [row.ratio for row in rows(beside)] == [None, None]
