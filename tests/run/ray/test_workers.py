"""Workers answer as one process does: the same bytes, the same totals, the same texts."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.run.generate import generate
from tests.conftest import ROOT, SAMPLE, read_jsonl, write_jsonl
from tests.run.ray.helpers import answered, records, scaled, settings

pytestmark = pytest.mark.ray

CITED = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "source": {"enum": {"$contexts": "id"}}},
    "required": ["sure", "source"],
}
MIXED = [
    *records(150),
    {"id": "q3", "query": "the id is taken"},
    {"nothing": "to ask"},
    {"id": "tagged", "query": "t", "metadata": {"a": [1, {"b": None}]}, "tag": "ü"},
    {"id": "long", "query": "x" * 5000},
    {"query": "no id of its own"},
    *({"id": f"p{i}", "prompt": f"{'shared ' * 200}{i}"} for i in range(40)),
]
HARD = {"runner_args": {"context_length": 3000, "fail_ids": ["q9", "p4"], "reverse": True}}


def test_the_file_is_the_one_that_a_single_process_writes(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", MIXED)
    alone, expected = answered(tmp_path, "alone", source, **HARD)
    together, found = answered(tmp_path, "together", source, **HARD, **scaled(address, workers=4))
    assert found == expected
    assert alone.failed == together.failed == 5
    _, shuffled = answered(tmp_path, "shuffled", source, order="finish", **HARD, **scaled(address))
    assert sorted(shuffled.splitlines()) == sorted(expected.splitlines())
    for total in ("records", "failed", "prompt_tokens", "output_tokens", "cached_prompt_tokens"):
        assert getattr(together, total) == getattr(alone, total), total
    assert together.spec == alone.spec
    parts = together.to_json()["workers"]
    assert len(parts) == 4
    assert sum(part["records"] > 0 for part in parts) >= 2  # whoever starts late may find nothing left
    for total in ("records", "prompt_tokens", "output_tokens"):
        assert sum(part[total] for part in parts) == getattr(alone, total), total
    assert sum(part["failed"] for part in parts) == 3  # the others never reached a worker


def test_ids_and_notes_are_those_of_a_single_process(tmp_path, address):
    given = [
        {"query": "a"},
        {"id": "1", "query": "b", "contexts": ["x" * 500]},
        {"id": 4, "query": "c"},
        {"query": "d"},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", given)
    more = {"prompt": {"template": "citations", "max_prompt_tokens": 200}}
    alone, expected = answered(tmp_path, "alone", source, **more)
    together, found = answered(tmp_path, "together", source, **more, **scaled(address))
    assert found == expected
    assert [json.loads(line)["id"] for line in found.splitlines()] == ["line-1", "1", "4", "line-4"]
    notes = [note for note in alone.notes if "passages" in note]
    assert [note[:16] for note in notes] == ["3 of 4 records h", "1 of 4 records w"]
    assert [note for note in together.notes if "passages" in note] == notes


def test_records_that_share_passages_stay_together(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(140))
    slow = {"runner_args": {"delay_s": 0.05, "batch_size": 4}}
    workers = {}
    from ragspec.run.ray import driver

    handle_output = driver.RayPass.handle_output

    def record(self, handle, message):
        workers.update((answered.index, handle.name) for answered in message.lines)
        handle_output(self, handle, message)

    driver.RayPass.handle_output = record
    try:
        answered(tmp_path, "out", source, **slow, **scaled(address))
    finally:
        driver.RayPass.handle_output = handle_output
    homes = [Counter(workers[i] for i in range(passage, 140, 7)) for passage in range(7)]
    assert len(set(workers.values())) == 2
    assert sum(max(home.values()) for home in homes) >= 0.8 * 140


def test_passages_are_ordered_as_in_one_process(tmp_path, address):
    texts = [f"passage {i} " * (9 + i) for i in range(7)]
    mixed = [
        {"id": f"q{i}", "query": f"question {i}", "contexts": [texts[i % 7], texts[i * 3 % 5], texts[i * 5 % 6]]}
        for i in range(120)
    ]
    source, shared = write_jsonl(tmp_path / "in.jsonl", mixed), {"prompt": {"order": "shared", "order_window": 50}}
    alone, expected = answered(tmp_path, "alone", source, **shared)
    together, found = answered(tmp_path, "together", source, **shared, **scaled(address))
    assert found == expected
    assert any(json.loads(line)["contexts"] != ["1", "2", "3"] for line in found.splitlines())
    assert [note for note in together.notes if "prompt.order" in note] == [
        n for n in alone.notes if "prompt.order" in n
    ]


def test_a_resumed_run_may_have_another_number_of_workers(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", MIXED)
    alone, expected = answered(tmp_path, "alone", source, **HARD)
    runs = [
        generate(build_config(settings(tmp_path, "out", source, **HARD, **scaled(address))), limit=60),
        generate(build_config(settings(tmp_path, "out", source, **HARD, **scaled(address, workers=1))), limit=120),
        generate(build_config(settings(tmp_path, "out", source, **HARD))),
    ]
    assert runs[-1].skipped == 120
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    totals = runs[-1].totals
    assert (totals.records, totals.failed, totals.spent.runs) == (alone.records, alone.failed, 3)
    assert totals.output_tokens == alone.output_tokens
    assert totals.spent.load_s == pytest.approx(sum(summary.load_s for summary in runs), abs=1e-3)
    counts = [sorted(count for _, count in each.failures.ranked()) for each in (totals, alone)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("model", "sampling", "structured"),
    [
        pytest.param("demo", {}, {}, id="greedy", marks=[pytest.mark.demo, pytest.mark.wide]),
        pytest.param("tiny", {"temperature": 0.9, "seed": 5}, {}, id="sampled", marks=pytest.mark.wide),
        pytest.param("tiny", {"max_new_tokens": 60}, {"json_schema": CITED}, id="structured", marks=pytest.mark.wide),
    ],
)
def test_workers_write_the_same_texts_as_one_process(tmp_path, request, address, model, sampling, structured):
    source = write_jsonl(tmp_path / "in.jsonl", read_jsonl(SAMPLE)[:6])
    real = {
        "runner": "huggingface",
        "model": str(request.getfixturevalue(model)),
        "runner_args": {"batch_size": 4, "compile": "off"},
        "sampling": {"max_new_tokens": 12, **sampling},
        "speculation": {"method": "context"},
        **({"structured": structured} if structured else {}),
    }
    first, alone = answered(tmp_path, "alone", source, **real)
    summary, together = answered(tmp_path, "together", source, **real, **scaled(address))
    lines = [[json.loads(line) for line in found.splitlines()] for found in (alone, together)]
    said = [[(line["output"], line.get("valid"), line.get("parsed")) for line in found] for found in lines]
    assert said[0] == said[1]
    assert len(said[0]) == summary.records > 0
    assert (summary.shaped, summary.valid) == (first.shaped, first.valid)
    assert any(valid for _, valid, _ in said[0]) == bool(structured)
    assert summary.about["runner"]["device"]


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ({"address": "127.0.0.1:1"}, "no Ray cluster answers there"),
        ({"cpus_per_worker": 64}, "requested: 2 workers of 64 CPUs each"),
        ({"gpus_per_worker": 1}, "requested: 2 workers of 1 CPU and 1 GPU each"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, address, scale, said):
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    more = scaled(address)
    more["scale"] |= scale
    with pytest.raises(ConfigError, match="scale") as caught:
        answered(tmp_path, "out", source, **more)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.wide
def test_a_machine_without_the_model_is_named_before_any_loads(tmp_path, address, monkeypatch, demo):
    import shutil

    from ragspec.run.ray.worker_pool import WorkerPool

    model = tmp_path / "model"
    shutil.copytree(demo, model)
    place = WorkerPool.place

    def without(self, handle):
        shutil.rmtree(model, ignore_errors=True)  # what this process sees and workers do not
        place(self, handle)

    monkeypatch.setattr(WorkerPool, "place", without)
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    with pytest.raises(ConfigError, match=r"worker \d on .*model") as caught:
        answered(tmp_path, "out", source, **{"runner": "huggingface", "model": str(model)}, **scaled(address))
    assert "\n" not in str(caught.value)


@pytest.mark.wide
def test_a_machine_without_ragspec_is_told_of(tmp_path):
    from ray.cluster_utils import Cluster

    (tmp_path / "sitecustomize.py").write_text(
        """\
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "ragspec":
            raise ModuleNotFoundError("No module named 'ragspec'")

sys.meta_path.insert(0, Missing())
"""
    )
    there = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        there.add_node(num_cpus=1, object_store_memory=150 << 20, env_vars={"PYTHONPATH": str(tmp_path)})
        source = write_jsonl(tmp_path / "in.jsonl", records(3))
        with pytest.raises(
            ConfigError, match=r"^worker 1 cannot start: ModuleNotFoundError: No module named 'ragspec'$"
        ):
            answered(tmp_path, "out", source, **scaled(there.address, workers=1))
    finally:
        there.shutdown()


@pytest.mark.wide
def test_a_cluster_of_another_version_is_told_of(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    command = ["generate", "-c", "sample_configs/quickstart.yaml", "-i", source, "-o", str(tmp_path / "out.jsonl")]
    other = "import ray; ray.__version__ = '2.0.0'; from ragspec.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", other, *command, "--workers", "1", "--ray-address", address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "scale.address" in done.stderr
    assert "2.0.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_of_ray_is_imported_without_workers(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    code = (
        "import sys; from ragspec.config.load import build_config; from ragspec.run.generate import generate;"
        f"generate(build_config({settings(tmp_path, 'out', source)!r})); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
