"""The public API: few names, lazy, typed; and the wheel that brings it."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from shutil import copy, copytree

import pytest

import ragspec
from tests.conftest import ROOT, read_jsonl, write_jsonl

HEAVY = ("torch", "transformers", "pydantic", "rich", "typer", "yaml", "jinja2")
QUESTIONS = [{"id": str(i), "query": f"Question {i}?", "contexts": [f"Passage {i}."]} for i in range(20)]


def config(**more):
    return ragspec.load_config({"runner": "fake", "sampling": {"max_new_tokens": 12}, **more})


def test_every_public_name_is_there_and_no_other():
    for name in ragspec.__all__:
        assert getattr(ragspec, name).__doc__
    with pytest.raises(AttributeError):
        ragspec.nothing  # noqa: B018


def test_importing_ragspec_imports_nothing_heavy():
    code = f"import ragspec, sys; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("order", ["input", "finish"])
def test_answers_in_memory_are_the_lines_that_generate_writes(tmp_path, order):
    settings = {"order": order, "runner_args": {"reverse": True, "batch_size": 4}}
    output = tmp_path / "answers.jsonl"
    file = config(input=write_jsonl(tmp_path / "in.jsonl", QUESTIONS), output=str(output), **settings)
    assert ragspec.generate(file).records == len(QUESTIONS)
    with ragspec.Pipeline(config(**settings)) as pipeline:
        answers = list(pipeline.answers(QUESTIONS))
    written = read_jsonl(output)
    assert [(a["id"], a["output"]) for a in answers] == [(w["id"], w["output"]) for w in written]
    assert pipeline.summary.records == len(QUESTIONS)


def test_generate_takes_a_mapping_or_a_file_as_a_pipeline_does(tmp_path):
    settings = {"runner": "fake", "input": write_jsonl(tmp_path / "in.jsonl", QUESTIONS)}
    assert ragspec.generate(settings | {"output": str(tmp_path / "a.jsonl")}).records == len(QUESTIONS)
    (tmp_path / "c.yaml").write_text(f"runner: fake\ninput: {settings['input']}\noutput: {tmp_path / 'b.jsonl'}\n")
    assert ragspec.generate(tmp_path / "c.yaml").records == len(QUESTIONS)
    with pytest.raises(ragspec.ConfigError, match="input: missing"):
        ragspec.generate({"runner": "fake"})


def test_an_answer_is_handed_over_before_more_records_are_asked_for():
    asked = []

    def records():
        for question in QUESTIONS:
            asked.append(question["id"])
            yield question

    with ragspec.Pipeline(config(runner_args={"batch_size": 2})) as pipeline:
        next(pipeline.answers(records()))
    assert len(asked) <= 3


def test_a_pipeline_answers_again_and_again():
    with ragspec.Pipeline(config()) as pipeline:
        first = [answer["output"] for answer in pipeline.answers(QUESTIONS)]
        assert [answer["output"] for answer in pipeline.answers(QUESTIONS)] == first


@pytest.mark.parametrize("order", ["input", "finish"])
def test_whoever_leaves_early_is_answered_anew(tiny, order):
    others = [{**question, "query": f"And {question['query']}"} for question in QUESTIONS]
    settings = {"model": tiny, "runner": "huggingface", "order": order, "sampling": {"max_new_tokens": 8}}
    with ragspec.Pipeline(config(**settings, runner_args={"batch_size": 2})) as pipeline:
        alone = {answer["id"]: answer["output"] for answer in pipeline.answers(others)}
        for _ in pipeline.answers(QUESTIONS):
            break
        left = pipeline.answers(QUESTIONS)
        next(left)
        with pytest.raises(ragspec.ConfigError, match="one input at a time"):
            next(pipeline.answers(others))
        left.close()
        assert {answer["id"]: answer["output"] for answer in pipeline.answers(others)} == alone


def test_a_record_that_is_none_is_an_error_line_among_the_answers():
    with ragspec.Pipeline(config()) as pipeline:
        answers = list(pipeline.answers([QUESTIONS[0], {"query": ""}, {"query": object()}]))
    assert "output" in answers[0]
    assert answers[1]["error"]["message"].startswith("record 2: ")
    assert "is empty" in answers[1]["error"]["message"]
    assert "cannot be written as JSON" in answers[2]["error"]["message"]


def test_a_real_model_is_loaded_once_and_answers(tiny):
    settings = {"model": tiny, "sampling": {"max_new_tokens": 8}, "speculation": {"method": "context"}}
    with ragspec.Pipeline(ragspec.load_config(settings)) as pipeline:
        answers = list(pipeline.answers(QUESTIONS[:3]))
        again = list(pipeline.answers(QUESTIONS[:3]))
    assert len(answers) == 3
    assert [answer["output"] for answer in answers] == [answer["output"] for answer in again]


def test_a_config_that_is_wrong_raises_what_the_command_line_says():
    with pytest.raises(ragspec.ConfigError, match="did you mean"):
        ragspec.load_config({"model": "demo", "speculation": {"method": "contxt"}})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, folder)
    copytree(ROOT / "ragspec", folder / "ragspec")
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run([sys.executable, *build], cwd=folder, check=True)
    (found,) = (folder / "dist").glob("ragspec-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_and_its_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(path.relative_to(ROOT)) for path in (ROOT / "ragspec").rglob("*.*") if "__pycache__" not in path.parts
    }
    assert package <= names
    assert {"ragspec/py.typed", "ragspec/report/page.html.jinja", "ragspec/engine/native/vectors.h"} <= names


def test_the_wheel_works_in_another_environment_and_another_folder(wheel, tmp_path):
    """The libraries that it depends on are lent by this environment: they would be fetched for minutes."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = tmp_path / "home"
    home.mkdir()
    write_jsonl(home / "questions.jsonl", QUESTIONS)
    (home / "config.yaml").write_text("runner: fake\ninput: questions.jsonl\noutput: answers.jsonl\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = subprocess.run(
        [python, "-c", "import ragspec; print(ragspec.__file__)"],
        cwd=home, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
    subprocess.run(
        [tmp_path / "venv" / "bin" / "ragspec", "generate", "-c", "config.yaml"], cwd=home, env=environment, check=True
    )
    assert len(read_jsonl(home / "answers.jsonl")) == len(QUESTIONS)
