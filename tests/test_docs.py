"""What the docs take from the code is what the code says."""

import importlib.util
import json
import re
import sys

import jsonschema
import pytest
import yaml

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
sys.path.insert(0, str(ROOT / "docs" / "lab"))
import chart
import generate
import results as results_page

DOCS = ROOT / "docs"

PAGES = sorted((DOCS / "reference" / "commands").glob("*.md"))
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
    assert (DOCS / "reference" / "config.schema.json").read_text() == generate.schema(), REMEDY
    assert (DOCS / "reference" / "config.md").read_text() == generate.config_page(), REMEDY


def test_the_columns_of_parquet_are_those_that_are_written():
    pytest.importorskip("pyarrow")
    from ragspec.outputs.codecs import AS_JSON, Parquet

    page = (DOCS / "guide" / "output.md").read_text()
    columns = page.partition("Parquet columns are the fields of the lines above: ")[2].partition("\n\n")[0]
    listed, _, texts = columns.replace("\n", " ").partition(". ")
    assert re.findall(r"`(\w+)`", listed) == Parquet().schema.names
    assert set(re.findall(r"`(\w+)`", texts)) == set(AS_JSON)


def test_the_python_page_has_the_docstrings_of_the_public_api():
    assert (DOCS / "reference" / "python.md").read_text() == generate.python_page(), REMEDY


def test_the_figures_are_those_of_the_result_files():
    assert list((ROOT / "benchmarks" / "results").glob("*.json"))
    assert (DOCS / "lab" / "performance.md").read_text() == generate.performance_page(), REMEDY


def test_the_chart_is_drawn_from_the_result_files():
    assert (DOCS / "results.svg").read_text() == generate.results_chart(), REMEDY


@pytest.mark.skipif(importlib.util.find_spec("vl_convert") is None, reason="the report's charts need vl-convert")
def test_the_example_report_is_drawn_by_the_current_template():
    def without_charts(page):  # whose paths are those of one version of vl-convert
        return re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)

    page = (generate.EXAMPLE / "report.html").read_text()
    assert without_charts(page) == without_charts(generate.example_report()), REMEDY
    assert "<svg" in page


def test_the_picture_is_what_the_terminal_shows():
    assert (DOCS / "answer.svg").read_text() == generate.picture(), REMEDY


def test_installs_are_spelt_alike_everywhere():
    pages = [ROOT / "README.md", *(DOCS / "guide").glob("*.md"), *(DOCS / "reference").rglob("*.md")]
    code = [*(ROOT / "ragspec").rglob("*.py")]
    for path in [*pages, *code]:
        for spelt in re.findall(r"pip install (\S*ragspec\S*\[\S*)", path.read_text()):
            assert re.match(r'\\?"ragspec\\?\[', spelt), f"{path}: {spelt}"


def test_the_chart_shows_losses_as_losses():
    assert chart.colour(chart.Point("", 0.9, 0.8, 0.95)) == chart.LOSS
    assert chart.colour(chart.Point("", 0.9, None, None)) == chart.LOSS
    assert chart.colour(chart.Point("", 0.9, 0.8, 1.1)) == chart.EVEN
    assert chart.colour(chart.Point("", 1.2, 1.1, 1.3)) == chart.GAIN


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
    return json.loads((DOCS / "reference" / "config.schema.json").read_text())


def test_links_between_pages_lead_somewhere():
    def headings(page):
        found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}

    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    broken = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" in target:
                continue
            goal = page.parent / target if target else page
            if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in headings(goal)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []
    assert ROOT / "README.md" in pages


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
