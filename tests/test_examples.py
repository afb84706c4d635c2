"""The examples run as they are, on small inputs; most of them with a tiny model instead of the demo one."""

import importlib.util
import json
import re

import pytest

from ragspec.speculation import methods
from tests.conftest import ROOT, read_jsonl, write_jsonl

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
RECORDS = [
    {"id": f"q{i}", "query": f"What is {i}?", "contexts": [f"Number {i} is {i}."], "reference": f"{i}"}
    for i in range(3)
]


def example(name):
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def questions(tmp_path):
    return write_jsonl(tmp_path / "questions.jsonl", RECORDS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it_and_uses_the_demo_model(path):
    text = path.read_text()
    assert f"    python examples/{path.name}" in text.split('"""')[1]
    assert re.search(r'"--models?", .*default=(\[)?"demo"', text)
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.demo
def test_answers_in_memory(capsys):
    example("python_api").main(["--tokens", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mill: ")
    assert lines[-1].endswith("drafted tokens accepted")


def test_a_drafter_of_ones_own_is_registered_where_it_is_not_installed(tiny, monkeypatch, capsys):
    monkeypatch.setattr(methods, "registered", {})
    example("custom_drafter").main(["--model", tiny, "--tokens", "16"])
    assert list(methods.registered) == ["pairs"]
    assert re.search(r"[1-9]\d* of [1-9]\d* drafted tokens accepted", capsys.readouterr().out)


def test_a_drafter_of_ones_own_comes_through_its_entry_point(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(methods, "registered", {})
    info = tmp_path / "pairs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs\nVersion: 1.0\n")
    source = (EXAMPLES / "custom_drafter.py").read_text()
    name, value = re.search(r'\[project\.entry-points\."ragspec\.drafters"\]\n    (\w+) = "(.*)"\n', source).groups()
    (info / "entry_points.txt").write_text(f"[ragspec.drafters]\n{name} = {value}\n")
    (tmp_path / "custom_drafter.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    example("custom_drafter").main(["--model", tiny, "--tokens", "16"])
    assert methods.registered == {}
    assert re.search(r"[1-9]\d* of [1-9]\d* drafted tokens accepted", capsys.readouterr().out)


def test_structured_answers(tiny, capsys):
    example("structured_answers").main(["--model", tiny])
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 2
    for answer in answers:
        if not answer.startswith("cut off: "):
            assert set(json.loads(answer)["sources"]) <= {"d1", "d2"}


def test_two_models_are_compared(tiny, tiny_draft, questions, tmp_path, capsys):
    args = ["--input", questions, "--output", str(tmp_path / "out"), "--tokens", "8"]
    example("evaluate_two_models").main([*args, "--models", tiny, tiny_draft, "--set", ""])
    assert "F1, second minus first: " in capsys.readouterr().out
    assert len(read_jsonl(tmp_path / "out" / "first.jsonl")) == len(RECORDS)


def test_questions_from_s3_are_answered_to_s3(s3, tiny, questions, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    args = ["s3://box/example/q.jsonl", "s3://box/example/answers/", "--model", tiny, "--tokens", "8"]
    example("s3_batch").main([*args, "--upload", questions])
    assert "3 answered, 0 failed, 0 finished before" in capsys.readouterr().out
    example("s3_batch").main(args)
    out = capsys.readouterr().out
    assert "0 answered, 0 failed, 3 finished before" in out
    assert "box/example/answers/part-00000.jsonl.zst" in out


def test_workers_answer_one_file(tiny, questions, tmp_path, capsys):
    pytest.importorskip("ray")
    output = tmp_path / "answers.jsonl"
    args = ["--model", tiny, "--tokens", "8", "--workers", "1", "--input", questions, "--output", str(output)]
    example("ray_workers").main(args)
    assert "3 answered in" in capsys.readouterr().out
    assert [line["id"] for line in read_jsonl(output)] == [record["id"] for record in RECORDS]


def cells(kind):
    return ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == kind]


def notebook():
    return json.loads(NOTEBOOK.read_text())


def test_the_notebook_is_one():
    found = notebook()
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in found["cells"]:
        assert isinstance(cell["metadata"], dict)
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert {"outputs", "execution_count"} <= cell.keys()
    assert found["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.demo
def test_the_notebook_runs(capsys):
    names = {}
    for number, cell in enumerate(cells("code")):
        exec(compile(cell.replace('"max_new_tokens": 32', '"max_new_tokens": 8'), f"cell {number}", "exec"), names)
    assert "the same answers" in capsys.readouterr().out
