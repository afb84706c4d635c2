"""The doctor: before any weights load, what is here and what a config would do."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragspec.config.io import InputConfig
from ragspec.config.load import build_config
from ragspec.run import doctor
from ragspec.run.doctor import examine_input, examine_passages
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, write_jsonl


def examine(tmp_path, **config):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"input": str(SAMPLE), **config}))
    return ragspec("doctor", "-c", path)


def test_the_machine_alone():
    done = ragspec("doctor")
    assert done.returncode == 0, done.stderr
    assert "cores" in done.stderr
    assert "torch 2." in done.stderr
    assert done.stdout == ""


def test_a_model_is_examined_without_a_config(tiny):
    done = ragspec("doctor", "--model", tiny, "--method", "none")
    assert done.returncode == 0, done.stderr
    assert "with method none" in done.stderr
    assert "context of" in done.stderr


def test_a_config_that_works(tiny, tmp_path):
    done = examine(tmp_path, model=str(tiny), speculation={"method": "context"})
    assert done.returncode == 0, done.stderr
    assert "keys and values" in done.stderr
    assert "ragspec's batched engine will answer, with method context" in done.stderr


def test_a_fallback_is_said(tiny, tmp_path):
    done = examine(tmp_path, model=str(tiny), runner_args={"engine": "transformers"})
    assert "stock generate() will answer: runner_args.engine: transformers" in done.stderr


def test_a_draft_of_the_same_tokens(tiny, tmp_path):
    done = examine(tmp_path, model=str(tiny), speculation={"method": "draft_model", "draft_model": str(tiny)})
    assert done.returncode == 0, done.stderr
    assert "tokens are the target's" in done.stderr


def test_the_input_of_the_command_line_is_the_one_examined(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("runner: fake\ninput: nowhere.jsonl")
    here = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "p"}])
    done = ragspec("doctor", "-c", path, "-i", here)
    assert done.returncode == 0, done.stderr
    assert f"ok    input {here}" in done.stderr
    assert "nowhere.jsonl" not in done.stderr


def test_a_missing_input_is_an_error_beside_what_else_was_found(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("runner: fake\ninput: nowhere.jsonl")
    done = ragspec("doctor", "-c", path)
    assert done.returncode == 2
    assert "error input: nowhere.jsonl: no such file" in done.stderr
    assert "cores" in done.stderr


def test_examining_a_pipe_takes_nothing_from_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    finding = examine_input(InputConfig(path=[str(pipe)]))  # to open it would wait for a writer for ever
    assert (finding.level, "pipe" in finding.text) == ("ok", True)
    assert examine_input(InputConfig(path=[str(tmp_path)])).level == "error"
    assert examine_input(InputConfig(path=["-"])).level == "ok"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "no/such"}, 'error model: "no/such"'),
        (
            {"model": "TINY", "speculation": {"method": "context"}, "runner_args": {"engine": "transformers"}},
            "error runner_args",
        ),
    ],
)
def test_what_would_stop_the_run_is_an_error(tiny, tmp_path, config, message):
    done = examine(tmp_path, **json.loads(json.dumps(config).replace("TINY", str(tiny))))
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_the_compiler_is_named_or_missed(monkeypatch):
    from ragspec.host import compiler
    from ragspec.run.doctor import examine_machine

    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert any("no C++ compiler (g++) was found, so torch's own" in finding.text for finding in examine_machine())
    monkeypatch.undo()
    if compiler.shutil.which("g++"):
        assert any(finding.text.startswith("compiler: g++") for finding in examine_machine())


@pytest.mark.parametrize(("free", "level"), [(1 << 40, "ok"), (0, "error"), (None, "note")])
def test_memory_is_an_error_only_where_the_weights_do_not_fit(tiny, monkeypatch, free, level):
    """Room for no record of 2,048 tokens says nothing of shorter ones."""
    size = sum(path.stat().st_size for path in Path(tiny).glob("*.safetensors"))
    monkeypatch.setattr(doctor, "free_bytes", lambda: size + 1000 if free is None else free)
    config = build_config({"model": tiny, "runner": "huggingface", "speculation": {"method": "none"}})
    (found,) = [each for each in doctor.examine_config(config, []) if "keys and values" in each.text]
    assert found.level == level


@pytest.mark.parametrize(
    ("args", "room"),
    [
        ({}, "1.0 GiB free, room"),
        ({"num_gpus": 2}, "3.0 GiB free on 2 GPUs, room"),
        ({"device": "cpu"}, "9.0 GiB free"),
    ],
)
def test_memory_is_that_of_the_gpus_that_the_run_uses(tiny, monkeypatch, args, room):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((i + 1) << 30, 80 << 30))
    monkeypatch.setattr(doctor, "free_bytes", lambda: 9 << 30)
    given = {"model": tiny, "runner": "huggingface", "runner_args": args, "speculation": {"method": "none"}}
    found = [each.text for each in doctor.examine_config(build_config(given), []) if "keys and values" in each.text]
    assert room in found[0]


@pytest.mark.parametrize(("template", "noted"), [("{{ query }}!", True), ("{{ contexts[0] }}{{ query }}", False)])
def test_a_template_that_does_not_use_the_passages_is_noted(tmp_path, template, noted):
    given = write_jsonl(tmp_path / "in.jsonl", [{"query": "Why?", "contexts": ["a passage"]}])
    config = build_config({"runner": "fake", "input": given, "prompt": {"template": template}})
    texts = [finding.text for finding in examine_passages(config)]
    assert len(texts) == 1
    assert ("does not use the records' passages" in texts[0]) == noted
