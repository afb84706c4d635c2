"""What the docs take from the code is what the code says."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import generate
import results as results_page

PAGES = sorted((ROOT / "docs" / "commands").glob("*.md"))
REMEDY = "run `python docs/generate.py`"


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_commands_page_has_its_help(path):
    assert path.read_text() == generate.page_of(path), REMEDY


def test_every_command_has_a_page():
    from ragspec.cli import app

    assert {command.callback.__name__.replace("_", "-") for command in app.registered_commands} == {
        path.stem for path in PAGES
    }


def test_the_schema_is_the_configs():
    assert (ROOT / "docs" / "config.schema.json").read_text() == generate.schema(), REMEDY
    assert (ROOT / "docs" / "config.md").read_text() == generate.config_page(), REMEDY


def test_the_figures_are_those_of_the_result_files():
    assert list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert (ROOT / "docs" / "performance.md").read_text() == generate.performance_page(), REMEDY


def test_the_overview_compares_drafts_with_the_faster_of_vllms_methods(tmp_path):
    speeds = {"none": (20.0, ""), "context": (30.0, ""), "peer-vllm": (25.0, "none"), "peer-ngram": (10.0, "ngram")}
    names = {"peer-ngram": "peer-vllm-ngram"}
    runs = [
        {
            "name": names.get(name, name),
            "method": peer or name,
            "peer": bool(peer),
            "runner": "vllm" if peer else "huggingface",
            "batch_size": 4,
            "tokens_per_s": speed,
            "load_s": 60.0 if peer else 2.0,
            "warmup_s": 0.0,
            "generate_s": 600 / speed,
        }
        for name, (speed, peer) in speeds.items()
    ]
    pairs = [(a, b) for a in runs for b in runs if a is not b]
    ratios = [
        {"name": a["name"], "baseline": b["name"], "metric": "tokens_per_s", "pairs": 1, "low": None, "high": None}
        | {"median": a["tokens_per_s"] / b["tokens_per_s"]}
        for a, b in pairs
    ]
    results = {"label": "records", "machine": {"processor": "Some(R) Processor"}, "runs": runs, "ratios": ratios}
    overview = "\n".join(results_page._overview([results]))
    assert "| records | Some | 4 | 0.80x | 1.20x | 3.8x |" in overview
    assert "| records | Some | huggingface | 4 | context | 1.50x |  |" in overview


@pytest.mark.parametrize("path", sorted((ROOT / "sample_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_schema_takes_the_sample_configs(path):
    config = yaml.safe_load(path.read_text())
    if "model" not in config:
        pytest.skip("AutoGluon-RAG's keys are translated, not described")
    jsonschema.validate(config, schema())


@pytest.mark.parametrize(
    "config",
    [
        {"model": "demo", "runner": "huggingface", "speculation": {"method": "suffix"}},
        {"model": "demo", "sampling": {"temprature": 1}},
        {"model": "demo", "runner_args": {"engine": "other"}},
        {"model": "demo", "runner": "other"},
    ],
)
def test_the_schema_refuses_what_ragspec_refuses(config):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, schema())


def schema():
    return json.loads((ROOT / "docs" / "config.schema.json").read_text())


def test_links_between_pages_lead_somewhere():
    import re

    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
    assert Path(ROOT / "README.md").exists()


def test_every_key_of_the_config_is_described():
    from ragspec import runners
    from ragspec.config.run import RunConfig

    sections = {
        "prompt",
        "sampling",
        "speculation",
        "structured",
        "retrieval",
        "runner_args",
        "scale",
    }  # described by their docstrings
    models = [RunConfig, *(runners.module(name).Args for name in runners.names())]
    models += [field.annotation for field in RunConfig.model_fields.values() if isinstance(field.annotation, type)]
    silent = [
        f"{model.__name__}.{name}"
        for model in models
        if hasattr(model, "model_fields")
        for name, field in model.model_fields.items()
        if not field.description and name not in sections
    ]
    assert silent == []
