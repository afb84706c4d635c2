"""`ragspec evaluate --gate`: what an interval decides, the exit codes, and gates that cannot be decided."""

import csv
import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.errors import ConfigError
from ragspec.quality.evaluate import evaluate
from ragspec.quality.gates import check_computed, decide, exit_code, parse_gate
from ragspec.quality.metrics import Estimate, estimate
from ragspec.quality.trackers import TRACKERS, figures_of
from tests.conftest import read_jsonl, write_jsonl


@pytest.mark.parametrize(
    ("gate", "low", "high", "outcome"),
    [
        ("f1 >= 90", 90.0, 95.0, "passed"),
        ("f1 >= 90", 85.0, 89.9, "worse"),
        ("f1 >= 90", 85.0, 90.0, "unclear"),
        ("f1 > 90", 90.0, 95.0, "unclear"),
        ("f1 > 90", 85.0, 90.0, "worse"),
        ("f1 >= -0.5", -0.5, 0.3, "passed"),
        ("f1 >= -0.5", -2.0, -0.6, "worse"),
        ("f1 >= -0.5", -0.6, 3.0, "unclear"),
        ("f1>=+0", 0.0, 0.0, "passed"),
        ("f1 >= - 0", -0.1, 0.0, "unclear"),
        ("output_tokens <= +10", 2.0, 10.0, "passed"),
        ("output_tokens <= +10", 10.1, 12.0, "worse"),
        ("output_tokens < 120.5", 100.0, 120.5, "unclear"),
        ("refusals <= 5%", 1.0, 5.0, "passed"),
        ("output_tokens <= +10", 0.0, 0.0, "passed"),
    ],
)
def test_an_interval_decides_a_gate(gate, low, high, outcome):
    assert parse_gate(gate).decide(Estimate((low + high) / 2, low, high, 50)) == outcome


def test_few_records_cannot_tell():
    """A bootstrap over equal values has no width, however few they are."""
    gate = parse_gate("f1 >= 90")
    assert gate.decide(Estimate(100.0, 100.0, 100.0, 9)) == "unclear"
    assert gate.decide(Estimate(95.0, 94.0, 96.0, 9)) == "unclear"
    assert gate.decide(Estimate(95.0, 94.0, 96.0, 10)) == "passed"
    assert gate.decide(Estimate(100.0, None, None, 1)) == "unclear"
    assert gate.decide(Estimate(math.nan, math.nan, math.nan, 50)) == "unclear"


@pytest.mark.parametrize(
    ("gate", "value", "count", "outcome"),
    [
        ("refusals <= 0", 0.0, 24, "unclear"),
        ("refusals <= 12", 0.0, 24, "unclear"),
        ("refusals <= 12.5", 0.0, 24, "passed"),
        ("exact_match >= -0", 0.0, 24, "passed"),
        ("exact_match >= +1", 0.0, 24, "worse"),
        ("exact_match >= 13", 0.0, 24, "worse"),
        ("f1 >= 99", 100.0, 299, "unclear"),
        ("f1 >= 99", 100.0, 300, "passed"),
        ("f1 <= 100", 100.0, 24, "passed"),
        ("f1 >= -100", -100.0, 24, "passed"),
    ],
)
def test_equal_records_leave_room_for_others_that_differ(gate, value, count, outcome):
    """Rule of three: 0 of 24 may be 3 of 24 elsewhere."""
    assert parse_gate(gate).decide(Estimate(value, value, value, count)) == outcome
    exact = Estimate(value, value, value, count, exact=True)
    assert parse_gate(gate).decide(exact) in ("passed", "worse")


def test_equal_fractions_count_as_equal_and_the_verdict_shows_the_wider_interval():
    found = estimate([100 / 3] * 25)
    (verdict,) = decide([parse_gate("f1 >= 33")], {"f1": found}, {})
    assert verdict.formatted() == "gate f1 >= 33: undecided: 33.3 (21.3 to 45.3)"


def test_a_gate_that_fails_counts_more_than_one_that_cannot_tell():
    found = {"f1": Estimate(50.0, 40.0, 60.0, 20), "refusals": Estimate(5.0, 4.0, 6.0, 20)}
    failing, unclear, passing = (parse_gate(text) for text in ("f1 >= 61", "f1 >= 50", "refusals <= 6"))
    assert exit_code(decide([passing, unclear, failing], found, {})) == 1
    assert exit_code(decide([passing, unclear], found, {})) == 4
    assert exit_code(decide([passing], found, {})) == 0


def test_a_gate_on_what_a_judge_will_tell_waits_for_it():
    gates = [parse_gate("correct >= 90"), parse_gate("correct >= -1")]
    check_computed(gates, scores=[], others=["correct"], later=["correct"])
    with pytest.raises(ConfigError, match="was not computed: no answer has this score"):
        check_computed(gates, scores=[], others=["correct"], later=[])


@pytest.mark.parametrize(
    "text", ["f1", "f1 = 3", "f1 == 3", "f1 >= x", ">= 3", "f1 >= 1e3", "f1 >= 1,5", "f1 >= -", ""]
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match=r'is not a valid condition; write it like "f1 >= -0\.5"'):
        parse_gate(text)


@pytest.mark.parametrize("text", ["f1 >= 0", "f1 < 0.0"])
def test_a_gate_that_decides_nothing_is_refused(text):
    with pytest.raises(ConfigError, match=r'give the number a sign: "f1 (>=|<) -0"'):
        parse_gate(text)


@pytest.fixture
def runs(tmp_path):
    """Return the outputs of two runs: the first has one answer more right than the second, of 40."""

    def written(name, right):
        found = [
            {
                "id": f"q{i}",
                "output": "Ann" if i < right else "Bob",
                "output_tokens": 3,
                "metadata": {"reference": "Ann"},
            }
            for i in range(40)
        ]
        return write_jsonl(tmp_path / name, found)

    return written("new.jsonl", 31), written("old.jsonl", 30)


def run(*args):
    return CliRunner().invoke(app, ["evaluate", *args])


def test_exit_codes_say_what_the_gates_decided(runs):
    new, old = runs
    passed = run(new, "--against", old, "--gate", "f1 >= -0.5", "--gate", "exact_match >= 50")
    assert passed.exit_code == 0
    assert "gate f1 >= -0.5: passed: +2.5" in passed.stderr
    failed = run(old, "--against", new, "--gate", "f1 >= 99", "--gate", "f1 >= -0.5")
    assert failed.exit_code == 1
    assert "gate f1 >= 99: failed: 75.0" in failed.stderr
    unclear = run(old, "--against", new, "--gate", "f1 >= -0.5")
    assert unclear.exit_code == 4
    assert "gate f1 >= -0.5: undecided: -2.5 (" in unclear.stderr
    gates = json.loads(unclear.stdout)["gates"]
    assert [(each["gate"], each["outcome"]) for each in gates] == [("f1 >= -0.5", "unclear")]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--gate", "exact_mach >= 3"], '"exact_mach" is not a known score; did you mean "exact_match"?'),
        (["--gate", "f1 >= -0.5"], "a number with a sign is a difference; name the other run with --against"),
        (
            ["--gate", "judged_right >= 50"],
            "judged_right is not computed: it needs a judge: give its config with --judge",
        ),
    ],
)
def test_a_gate_that_cannot_be_decided_is_told_before_anything_is_read(args, why):
    done = run("/there/is/no/such/file.jsonl", *args)
    assert why in str(done.exception)
    assert isinstance(done.exception, ConfigError)


def test_a_gate_on_a_score_that_no_answer_has_is_told_before_a_judge_loads(tmp_path, runs, monkeypatch):
    monkeypatch.setattr("ragspec.quality.evaluate.verdicts", lambda *_: pytest.fail("the judge answers"))
    with pytest.raises(ConfigError, match="citation_recall was not computed: no answer has this score"):
        evaluate(runs[0], references=runs[0], judge=object(), gates=[parse_gate("citation_recall >= 3")])


def test_a_gate_on_a_score_that_the_other_run_lacks_is_told(tmp_path, runs):
    other = write_jsonl(tmp_path / "bare.jsonl", [{"id": f"q{i}", "output": "Ann"} for i in range(40)])
    with pytest.raises(ConfigError, match="f1 was not computed: no answer in the other run has this score"):
        evaluate(runs[0], against=other, gates=[parse_gate("f1 >= -3")])
    assert evaluate(runs[0], against=other, gates=[parse_gate("f1 >= 50")]).verdicts[0].outcome == "passed"


def test_rouge_without_its_library_is_no_gate(runs, monkeypatch):
    monkeypatch.setattr("ragspec.quality.evaluate.has_rouge", lambda: False)
    with pytest.raises(ConfigError, match="rougeL is not computed: it needs rouge-score"):
        evaluate(runs[0], gates=[parse_gate("rougeL >= 3")])


# -- by record, and trackers -----------------------------------------------------------------------


def test_the_scores_of_each_record_are_written(tmp_path, runs):
    new, old = runs
    assert run(new, "--against", old, "--by-record", str(tmp_path / "by.csv")).exit_code == 0
    with open(tmp_path / "by.csv") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert len(rows) == 40
    assert [rows["q30"][f"f1{end}"] for end in ("", "_against", "_difference")] == ["100.0", "0.0", "100.0"]
    assert run(new, "--by-record", str(tmp_path / "by.jsonl")).exit_code == 0
    found = read_jsonl(tmp_path / "by.jsonl")
    assert sum(row["f1"] for row in found) == 3100.0
    assert "f1_against" not in found[0]


def test_a_table_of_another_kind_is_refused(runs, tmp_path):
    assert "by.xlsx must end in .jsonl or .csv" in str(run(runs[0], "--by-record", str(tmp_path / "by.xlsx")).exception)
    assert "cannot be written" in str(run(runs[0], "--by-record", str(tmp_path / "no" / "by.csv")).exception)


def test_a_table_does_not_replace_what_is_read(runs, tmp_path):
    answers = Path(runs[0]).read_bytes()
    for more in ([], ["--against", runs[1]], ["--references", runs[1]]):
        read = more[-1] if more else runs[0]
        linked = tmp_path / "link.jsonl"
        linked.unlink(missing_ok=True)
        linked.symlink_to(read)
        for table in (read, str(linked)):
            failed = run(runs[0], *more, "--by-record", table)
            assert f"--by-record: {table} is read here, and would be overwritten" in str(failed.exception)
    assert Path(runs[0]).read_bytes() == answers


def test_a_tracker_that_is_missing_is_named_first(monkeypatch):
    monkeypatch.setattr("ragspec.quality.trackers.find_spec", lambda name: None)
    for name in TRACKERS:
        error = run("/there/is/no/such/file.jsonl", "--log-to", name).exception
        assert str(error) == f'--log-to {name} needs {name}: pip install "ragspec[{name}]"'
    assert 'did you mean "mlflow"?' in str(run("x", "--log-to", "mflow").exception)


def test_trackers_get_the_means_and_the_differences(runs):
    figures = figures_of(evaluate(runs[0], against=runs[1]))
    assert (figures["f1"], figures["f1_difference"], figures["records"]) == (77.5, 2.5, 40.0)
    assert figures["f1_difference_low"] <= 2.5 <= figures["f1_difference_high"]


@pytest.mark.slow
def test_mlflow_takes_the_figures(tmp_path, runs, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path / 'runs'}")
    done = run(runs[0], "--log-to", "mlflow", "--gate", "f1 >= 50")
    assert json.loads(done.stdout)["scores"], done.exception
    (logged,) = mlflow.search_runs(output_format="list")
    assert logged.data.metrics["f1"] == 77.5
    assert logged.data.tags["gates"] == "f1 >= 50: passed"


@pytest.mark.slow
def test_wandb_takes_the_figures(tmp_path, runs, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = run(runs[0], "--log-to", "wandb")
    assert json.loads(done.stdout)["scores"], done.exception
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert "wandb" in sys.modules


# -- records without an answer ---------------------------------------------------------------------


def failing(path, failed, *, of=40):
    """Write a run that answers rightly, apart from its first records, which fail."""
    right = {"output": "Ann", "output_tokens": 3, "metadata": {"reference": "Ann"}}
    return write_jsonl(path, [{"id": f"q{i}", **({"error": "no"} if i < failed else right)} for i in range(of)])


def test_a_gate_on_what_failed_does_not_pass_on_the_survivors(tmp_path):
    out = failing(tmp_path / "out.jsonl", 28)
    done = run(out, "--gate", "f1 >= 15", "--gate", "failed <= 2")
    assert done.exit_code == 1
    assert "gate f1 >= 15: passed on 12 of 40 records: 100.0 (75.0 to 100.0)\n" in done.stderr
    assert "gate failed <= 2: failed: 70.0\n" in done.stderr
    found = json.loads(done.stdout)
    assert [(each["count"], each["of"]) for each in found["gates"]] == [(12, 40), (40, 40)]
    assert found["scores"]["failed"] == {"mean": 70.0, "low": 70.0, "high": 70.0, "count": 40}
    assert run(out, "--gate", "failed <= 70").exit_code == 0
    assert run(failing(tmp_path / "few.jsonl", 0, of=3), "--gate", "failed <= 2").exit_code == 0  # it is a count


def test_what_failed_is_compared_and_records_that_are_missing_are_counted(tmp_path):
    new, old = failing(tmp_path / "new.jsonl", 2, of=20), failing(tmp_path / "old.jsonl", 4)
    done = run(new, "--against", old, "--gate", "failed <= +0", "--gate", "f1 >= -1")
    assert done.exit_code == 0
    assert "gate failed <= +0: passed on 20 of 40 records: +0.0\n" in done.stderr
    assert "gate f1 >= -1: passed on 16 of 40 records: +0.0" in done.stderr
    assert f"20 records of {old} are missing in {new}" in json.loads(done.stdout)["notes"]
    assert run(new, "--against", old, "--gate", "failed <= -1").exit_code == 1
    silent = failing(tmp_path / "silent.jsonl", 40)  # fails the gate, rather than having nothing to compare
    assert run(silent, "--against", old, "--gate", "failed <= +1").exit_code == 1


def test_the_table_has_what_failed_only_if_something_did(tmp_path):
    assert "failed" not in run(failing(tmp_path / "out.jsonl", 0), "--format", "csv").stdout
    assert "failed,50.0" in run(failing(tmp_path / "out.jsonl", 20), "--format", "csv").stdout
