import json
import re

import pytest
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.cli.tables import with_durations
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.inputs.feed import Feed
from ragspec.outputs.ledger import Ledger
from ragspec.records import Request, Sampling
from ragspec.run import plan as planning
from ragspec.run.budget import BudgetGate
from ragspec.run.generate import generate
from ragspec.run.plan import make_plan
from ragspec.run.price import Budget, Price
from ragspec.run.runner_choice import Timing, asks_of
from ragspec.run.session import prepare
from ragspec.stats import RunSummary, Spent
from tests.conftest import read_jsonl, write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))


def config_of(tmp_path, count=40, **more):
    records = [{"id": f"q{i}", "query": f"question {i:02}"} for i in range(count)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    return build_config({"runner": "fake", "input": source, "output": str(tmp_path / "out.jsonl")} | more)


def line(plan, what):
    return next(each for each in plan.lines if each.what == what)


# -- prices and budgets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "money"),
    [("2.5/h", 5.0), ("$2.50/h", 5.0), ("€0.3/kWh@500W", 0.3), ("0.6/Mtok", 1.8), ("$.6/mtok", 1.8)],
)
def test_a_price_is_what_its_unit_says(text, money):
    assert Price.of(text).money(7200, 3_000_000) == pytest.approx(money)


@pytest.mark.parametrize("text", ["2.5", "$5", "2.5/day", "/h", "x/h", "0.3/kWh", "2/h@5W", ""])
def test_a_price_without_a_unit_is_one_line(text):
    with pytest.raises(ConfigError, match="--price") as error:
        Price.of(text)
    assert "\n" not in str(error.value)


def test_a_budget_is_time_tokens_or_money_at_a_price():
    hour, million = Price.of("2/h"), Price.of("0.5/Mtok")
    assert Budget.of("2h", []).seconds == Budget.of("120m", []).seconds == Budget.of("$4", [hour]).seconds == 7200
    assert Budget.of("1Mtok", []).tokens == 1e6
    assert Budget.of("$4", [million]).tokens == 8e6
    assert Budget.of("$3", [Price.of("1/kWh@1000W")]).seconds == pytest.approx(3 * 3600)


@pytest.mark.parametrize("text", ["2", "$2h", "0h", "soon", "-2h", "$5"])
def test_what_is_no_budget_is_one_line(text):
    with pytest.raises(ConfigError, match="--budget"):
        Budget.of(text, [])


@pytest.mark.parametrize("price", ["0/h", "0/Mtok", "0.3/kWh@0W"])
def test_money_that_is_never_spent_is_one_line(price):
    with pytest.raises(ConfigError, match=f"--price {price}: with a price of zero"):
        Budget.of("$5", [Price.of(price)])


def test_a_budget_and_a_price_are_in_one_currency():
    with pytest.raises(ConfigError, match=r"^--budget \$5 and --price €2\.5/h are in different currencies"):
        Budget.of("$5", [Price.of("€2.5/h")])
    assert Budget.of("$5", [Price.of("2.5/h")]).seconds == Budget.of("€5", [Price.of("€2.5/h")]).seconds == 7200


def test_a_run_never_takes_more_tokens_than_its_budget_and_goes_on_with_a_larger_one(tmp_path):
    config = config_of(tmp_path, runner_args={"reverse": True, "batch_size": 4})
    summary = generate(config, budget=Budget("500tok", tokens=500))
    assert summary.stopped
    assert 0 < summary.records < 40
    assert 350 < summary.prompt_tokens + summary.output_tokens <= 500
    statistics = json.loads((tmp_path / "out.stats.json").read_text())
    assert (statistics["state"], statistics["input_records"]) == ("stopped", 40)
    more = generate(config, budget=Budget("900tok", tokens=900))
    assert 500 < more.totals.prompt_tokens + more.totals.output_tokens <= 900
    used = more.totals.prompt_tokens + more.totals.output_tokens
    for text, tokens in (("300tok", 300), ("all of it", used)):
        none = generate(config, budget=Budget(text, tokens=tokens))
        assert none.stopped == f"--budget {text} was spent before: the output took {used} tokens so far"
        assert (none.records, none.load_s) == (0, 0.0)
        assert not any("nothing to answer" in note for note in none.notes)
    rest = generate(config)
    assert summary.records + more.records + rest.records == 40
    assert [each["id"] for each in read_jsonl(tmp_path / "out.jsonl")] == [f"q{i}" for i in range(40)]
    assert not generate(config, budget=Budget("1tok", tokens=1)).stopped  # nothing is left to pay for


@pytest.mark.parametrize("sampling", [{"n": 4, "temperature": 1.0}, {"n": 4}, {"n": 20, "temperature": 1.0}])
def test_a_budget_counts_several_answers_to_a_record_and_is_reached(tmp_path, sampling):
    config = config_of(tmp_path, sampling={"max_new_tokens": 4, **sampling}, runner_args={"batch_size": 8})
    summary = generate(config, budget=Budget("800tok", tokens=800))
    assert summary.stopped
    assert 640 < summary.prompt_tokens + summary.output_tokens <= 800


def test_rows_that_are_no_records_are_not_taken_for_answers_under_way(tmp_path):
    config = config_of(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"nothing": 1}\n' * 50 + (tmp_path / "in.jsonl").read_text())
    config = config.model_copy(
        update={"input": config.input.model_copy(update={"path": [str(tmp_path / "bad.jsonl")]})}
    )
    summary = generate(config, budget=Budget("500tok", tokens=500))
    assert summary.failed == 50
    assert 350 < summary.prompt_tokens + summary.output_tokens <= 500


def test_a_budget_ends_a_run_whose_records_all_fail(tmp_path):
    config = config_of(tmp_path, runner_args={"fail_ids": [f"q{i}" for i in range(40)], "batch_size": 2})
    summary = generate(config, budget=Budget("300tok", tokens=300))
    assert summary.stopped
    assert 0 < summary.failed < 40


def test_an_update_that_stops_at_its_budget_leaves_the_output_as_it_was(tmp_path):
    generate(config_of(tmp_path))
    before = (tmp_path / "out.jsonl").read_bytes()
    config = config_of(tmp_path, sampling={"max_new_tokens": 3})
    summary = generate(config, update=True, budget=Budget("400tok", tokens=400))
    assert summary.stopped
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert generate(config, update=True).records == 40 - summary.records


def test_time_is_given_to_as_many_requests_as_it_lasts_for():
    now = [0.0]
    gate = BudgetGate([Budget("100s", seconds=100.0)], Ledger(), Spent(1, 10.0, 0.0, 20.0), clock=lambda: now[0])
    summary = RunSummary()
    records = ([Request(i, str(i), [1], Sampling())] for i in range(1000))
    feed = gate.watch(summary, Feed(records), lambda: summary.records)
    queue = 0
    while True:  # a runner that answers one request a second
        queue += len(feed.take(1000, wait=not queue))
        if not queue:
            break
        now[0] += 1.0
        summary.records += 1
        queue -= 1
    assert gate.stopped
    assert 60 <= now[0] <= 71  # 30 s were spent before


def test_a_record_that_may_take_more_time_than_is_left_is_not_begun():
    now, finished = [0.0], [0]
    gate, summary = BudgetGate([Budget("25s", seconds=25.0)], Ledger(), Spent(), clock=lambda: now[0]), RunSummary()
    gate.watch(summary, Feed([]), lambda: finished[0])
    record = [Request(0, "a", [1], Sampling())]
    for _ in range(2):  # ten seconds each
        assert gate.admits(record, summary, waiting=True)
        now[0] += 10.0
        finished[0] += 1
    assert gate.admits(record, summary, waiting=True) is False
    assert gate.why == "--budget 25s: the next record does not fit in the 5 s left"


def test_the_first_of_several_budgets_that_is_spent_ends_the_run(tmp_path):
    config = config_of(tmp_path, runner_args={"batch_size": 4})
    summary = generate(config, budget=[Budget("1h", seconds=3600), Budget("500tok", tokens=500)])
    assert summary.stopped.startswith("--budget 500tok")
    assert 350 < summary.prompt_tokens + summary.output_tokens <= 500
    more = generate(config, budget=[Budget("0s", seconds=1e-9), Budget("900tok", tokens=900)])
    assert more.stopped.startswith("--budget 0s was spent before")


def test_records_under_way_are_waited_for_unless_the_runner_cannot_go_on_without_more():
    gate, summary = BudgetGate([Budget("30tok", tokens=30)], Ledger(), Spent()), RunSummary()
    record = [Request(0, "a", [1] * 10, Sampling(max_new_tokens=10))]
    assert gate.admits(record, summary, waiting=True)
    assert gate.admits(record, summary, waiting=False) is None
    assert not gate.stopped
    assert gate.admits(record, summary, waiting=True) is False
    assert gate.stopped


def test_the_command_stops_like_an_interrupted_one(tmp_path):
    config = config_of(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude={"retrieval", "structured", "scale"})))
    command = ["generate", "-c", str(path), "--budget"]
    done = CliRunner().invoke(app, [*command, "500tok", "--budget", "1h"])
    assert done.exit_code == 130
    said = " ".join(done.stderr.split())
    assert re.search(r"stopped: --budget 500tok: the next record does not fit in the \d+ tokens left; finished", said)
    done = CliRunner().invoke(app, [*command, "300tok"])
    assert done.exit_code == 130
    assert "stopped: --budget 300tok was spent before: the output took" in " ".join(done.stderr.split())
    done = CliRunner().invoke(app, ["generate", "-c", str(path), "--budget", "$5"])
    assert "needs one --price" in str(done.exception)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_prompt_tokens_are_exact_where_all_prompts_are_built(tmp_path):
    config = config_of(tmp_path)
    plan = make_plan(config)
    summary = generate(config)
    found = line(plan, "prompt tokens")
    assert found.value == found.low == found.high == summary.prompt_tokens
    assert line(plan, "records").value == 40


def test_prompt_tokens_of_a_sample_have_an_interval_that_holds_them(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "SAMPLED", 50)
    records = [{"id": f"q{i}", "query": "x" * (1 + i % 97)} for i in range(1000)]
    config = config_of(tmp_path, input=write_jsonl(tmp_path / "many.jsonl", records))
    found = line(make_plan(config), "prompt tokens")
    assert found.low < generate(config).prompt_tokens < found.high
    assert found.high - found.low < found.value


def test_what_the_output_has_is_not_planned_again(tmp_path):
    config = config_of(tmp_path)
    generate(config, limit=15)
    assert line(make_plan(config), "records").value == 25
    assert line(make_plan(config, limit=20), "records").value == 5


def test_a_sample_measures_and_the_run_is_compared_with_the_plan(tmp_path):
    config = config_of(tmp_path)
    assert generate(config, limit=1).planned == ""
    plan = make_plan(config, sample=10)
    summary = generate(config)
    found = line(plan, "output tokens")
    assert found.value == pytest.approx(summary.output_tokens, rel=0.01)
    assert "prompt tokens +0%, output tokens +0%" in summary.planned


def test_a_run_of_a_part_is_not_compared_with_the_plan_of_all(tmp_path):
    config = config_of(tmp_path)
    make_plan(config, sample=10)
    assert generate(config, limit=20).planned == ""
    assert generate(config).planned == ""
    make_plan(config)  # nothing is left
    more = config_of(tmp_path, count=80)
    make_plan(more)
    other = more.model_copy(update={"output": more.output.model_copy(update={"path": str(tmp_path / "other.jsonl")})})
    assert generate(other).planned == ""  # the plan was of the 40 that out.jsonl lacks
    assert generate(more).planned


def test_loading_is_compared_as_a_whole(tmp_path, monkeypatch):
    plan = {"records": 100, "prompt_tokens": 100.0, "output_tokens": 100.0, "load_s": 50.0, "answer_s": 10.0}
    monkeypatch.setattr(planning.PLANS, "read", lambda *_: {**plan, "output": "-"})
    session = prepare(config_of(tmp_path))
    done = RunSummary(records=80, prompt_tokens=80, output_tokens=80, load_s=45.0, warmup_s=5.0, generate_s=8.0)
    assert "time +0%, for 80% of the planned records" in planning.compared(session, done)


def test_the_range_of_times_is_of_loading_too(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    assert line(make_plan(config), "hours here").high > 2 * line(make_plan(config), "hours here").value  # a guess
    runs = [Timing(load, 1000, 1.0, asks_of(config), 10, 200, 4000) for load in (50.0, 51.0, 70.0)]
    monkeypatch.setattr(planning, "timings", lambda config: {planning.setting_of(config): runs})
    found = line(make_plan(config), "hours here")
    assert found.low <= 0.8 * found.value
    assert found.high >= max(1.2 * found.value, 70 / 3600)


def test_prompts_that_do_not_fit_are_told(tmp_path):
    config = config_of(tmp_path, runner_args={"context_length": 60}, sampling={"max_new_tokens": 4})
    assert not any("do not fit" in each.what for each in make_plan(config).lines)
    records = [{"id": f"q{i}", "query": "x" * (100 if i < 4 else 1)} for i in range(32)]
    config = config.model_copy(
        update={"input": config.input.model_copy(update={"path": [write_jsonl(tmp_path / "long.jsonl", records)]})}
    )
    plan = make_plan(config)
    found = line(plan, "prompts that do not fit")
    assert (found.value, line(plan, "records").value) == (4, 32)
    assert "of 32 built; they will be error lines; q0: the prompt has " in found.basis
    summary = generate(config)
    assert (summary.failed, line(plan, "prompt tokens").value) == (4, summary.prompt_tokens)
    assert "for 8" not in summary.planned


def test_the_method_is_the_configs(tmp_path):
    assert line(make_plan(config_of(tmp_path)), "method").basis.startswith("the default; ")
    found = line(make_plan(config_of(tmp_path, speculation={"method": "prompt_lookup"})), "method")
    assert (found.value, found.basis.partition(";")[0]) == ("prompt_lookup", "as configured")


def test_figures_are_rounded_and_times_readable(tmp_path):
    lines = [planning.Line("hours here", 0.0065, 0.1 + 0.01381 - 0.1, 2.0), planning.Line("cost", 0.113810000000001)]
    rows = planning.Plan(lines, []).rows()
    assert [rows[0]["low"], rows[1]["expected"]] == [0.01381, 0.11381]
    shown = with_durations(rows)
    assert [shown[0][name] for name in ("what", "expected", "low", "high")] == ["time here", "23 s", "50 s", "2:00:00"]
    assert shown[1] == rows[1]
    source = write_jsonl(tmp_path / "in.jsonl", [{"query": "one"}])
    done = CliRunner().invoke(app, ["plan", "--runner", "fake", "-i", source])
    assert "| time here | " in done.stdout


def test_earlier_runs_are_what_a_plan_goes_by(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    asks = asks_of(config)
    slow = Timing(2.0, 1000, 10.0, asks, 10, 200, 4000, 0, 1.0, 4.0, 4.0)
    other = Timing(9.0, 1000, 90.0, "another", 10, 900, 90_000)
    monkeypatch.setattr(planning, "timings", lambda config: {planning.setting_of(config): [slow, other]})
    plan = make_plan(config, prices=[Price.of("3600/h"), Price.of("1000000/Mtok")])
    prompts = line(plan, "prompt tokens").value
    assert line(plan, "output tokens").value == 20 * 40
    seconds = 3.0 + 1.25 * (4.0 / 800 * prompts + 4.0 / 200 * 800)
    assert line(plan, "hours here").value == pytest.approx(seconds / 3600)
    assert line(plan, "cost at 3600/h").value == pytest.approx(seconds)
    assert line(plan, "cost at 1000000/Mtok").value == pytest.approx(prompts + 800)


def test_a_plan_is_a_table_on_stdout(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"query": "one"}, {"query": "two"}])
    command = ["plan", "--runner", "fake", "-i", source, "--price", "2/h", "--workers", "4", "--format", "json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = {row["what"]: row for row in json.loads(done.stdout)}
    assert rows["records"]["expected"] == 2
    assert {"hours, 4 workers", "cost at 2/h", "method", "runner"} <= rows.keys()
    assert "price" in str(CliRunner().invoke(app, [*command[:5], "--price", "2"]).exception)
