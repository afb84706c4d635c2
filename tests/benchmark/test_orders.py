"""Orders of passages timed against each other, and the quality of their answers beside the speed."""

import json
from statistics import median

import pytest

from ragspec.benchmark.plan import make_plan
from ragspec.benchmark.results import read_results
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from tests.cli.test_cli import ragspec
from tests.conftest import write_jsonl

PASSAGES = [f"passage {i} " + "word " * (10 + i) for i in range(6)]


def config_of(tmp_path, **more):
    given = [[PASSAGES[i % 6], PASSAGES[i * 5 % 4]] for i in range(12)]
    records = [{"id": f"q{i}", "query": f"q {i}", "contexts": own, **more} for i, own in enumerate(given)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    config = tmp_path / "c.yaml"
    config.write_text(f"runner: fake\ninput: {source}\nsampling: {{max_new_tokens: 8}}")
    return config


def test_a_plan_has_every_order_and_peers_have_none():
    config = build_config(
        {"model": "m", "runner": "vllm", "input": "x", "prompt": {"order": "shared", "keep_first": 1}}
    )
    plan = make_plan(config, ["none"], peers=["vllm"], orders=["rank", "shared"])
    assert [candidate.name for candidate in plan] == ["none-rank", "none-shared", "peer-vllm"]
    orders = [(candidate.config.prompt.order, candidate.config.prompt.keep_first) for candidate in plan]
    assert orders == [("rank", 0), ("shared", 1), ("rank", 0)]
    with pytest.raises(ConfigError, match="--prompt-order"):
        make_plan(config, ["none"], orders=["best"])


def test_orders_are_compared_in_speed_and_quality(tmp_path):
    out = tmp_path / "b"
    orders = ["--prompt-order", "rank", "--prompt-order", "shared"]
    config = config_of(tmp_path, reference=PASSAGES[0])
    done = ragspec("benchmark", "-c", config, "-m", "none", *orders, "--repeat", 2, "-o", out)
    assert done.returncode == 0, done.stderr
    results = read_results(out)
    assert [(run.name, run.order) for run in results.runs_of("none-shared")] == [("none-shared", "shared")] * 2
    assert {(r.name, r.baseline, r.metric) for r in results.ratios} == {("none-shared", "none-rank", "records_per_s")}
    (ratio,) = results.ratios
    rates = [[run.records / run.generate_s for run in results.runs_of(name)] for name in ("none-shared", "none-rank")]
    assert ratio.median == pytest.approx(median(one / other for one, other in zip(*rates, strict=True)), rel=1e-3)
    assert "none-rank in records/s" in done.stderr
    assert set(results.quality) == {"none-rank", "none-shared"}
    ours = results.quality["none-shared"]
    assert (ours.baseline, ours.differences["f1"].count) == ("none-rank", 12)
    means = [results.quality[name].scores["f1"].mean for name in ("none-rank", "none-shared")]
    assert ours.differences["f1"].mean == pytest.approx(means[1] - means[0])
    assert "none-shared: F1" in done.stderr
    assert "<h2>Quality</h2>" in (out / "report.html").read_text()


def test_without_references_nothing_is_said_of_quality(tmp_path):
    out = tmp_path / "b"
    done = ragspec("benchmark", "-c", config_of(tmp_path), "-m", "none", "--repeat", 1, "-o", out)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "results.json").read_text())["quality"] == {}
    assert "F1" not in done.stderr
    assert "<h2>Quality</h2>" not in (out / "report.html").read_text()
