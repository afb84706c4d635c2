"""What people read fits their terminal, whole: lines break between words, and nothing is cut."""

import io
import re
import sys
from pathlib import Path

import pytest

from ragspec.benchmark.details import print_results
from ragspec.benchmark.results import Results
from ragspec.cli.tables import print_hanging, print_notes, print_plan, print_summary, stderr
from ragspec.run.plan import Line
from ragspec.stats import RunSummary
from tests.report.test_report import ratio, run

NAMES = ("none-b64", "context-b64-k4-shared", "huggingface-draft_model-b64-k8-canonical", "prompt_lookup")
NOTE = "in.jsonl:100: " + "huggingface, as chosen by auto: expected to finish about 12 s before vLLM; " * 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[40, 80, 120, 200])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm")
    return request.param


def lines(width, monkeypatch, show):
    """Return what `show` prints on the console of a terminal, its lines no longer than that and nothing cut."""
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        show(stderr())
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    found = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, found)) <= width
    assert "\u2026" not in text
    return found


def words(found):
    return " ".join(" ".join(found).split())


def test_a_note_breaks_between_words(width, monkeypatch):
    assert words(lines(width, monkeypatch, lambda console: print_notes(console, [NOTE]))) == f"note: {NOTE}".strip()


def test_a_file_gets_whole_lines_however_long_they_are(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    summary = RunSummary(failed=1, notes=[NOTE])
    summary.failures.add("a", NOTE)
    print_summary(stderr(), summary, f"out/{'x' * 200}")
    found = shown.getvalue().splitlines()
    assert found[0] == f"note: {NOTE}"
    assert f"failed       1 x {NOTE}" in found
    assert found[-1] == f"output       out/{'x' * 200}"


def test_a_benchmarks_names_and_figures_are_whole(width, monkeypatch):
    runs = tuple(run(name, "none" if name == NAMES[0] else name, 1234.5) for name in NAMES)
    given = Results(
        machine={"processor": "P [x]", "cores": 2, "memory_gib": 8.0, "gpus": ["A [b] B"], "system": "Linux"},
        versions={},
        input="in",
        runs=runs,
        ratios=tuple(ratio(name, NAMES[0], 1.5, 1.4, 1.6) for name in NAMES[1:]),
        ratio_interval="95%",
        details={},
        configs={},
        notes=(NOTE,),
    )
    text = words(lines(width, monkeypatch, lambda console: print_results(console, given, Path("out"))))
    assert "P [x], 2 cores, 8.0 GiB A [b] B" in text
    for name in NAMES if width > 40 else NAMES[:2]:
        assert name in text
    assert text.count("1.50x (1.40 to 1.60)") == 3
    assert text.count("1234.5") == 4


def test_a_summarys_paths_and_reasons_are_whole(width, monkeypatch):
    summary = RunSummary(failed=3)
    summary.failures.add("a", "no prompt: the record needs query, messages or prompt; it has none of them at all", 3)
    path = "out/" + "x" * 150
    found = lines(width, monkeypatch, lambda console: print_summary(console, summary, path))
    assert "every record: no prompt: the record needs query, messages or prompt; it has none of them at all" in words(
        found
    )
    assert path in "".join("".join(found).split())


def test_a_plans_figures_are_for_people(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    given = [
        Line("prompt tokens", 1234567.0, 1234567.0, 1234567.0, "10 prompts built"),
        Line("hours here", 1.5, 0.01, 2.0, "a basis that is longer than what is left of the line beside the figures"),
        Line("output MB", 0.0078456, 0.0075, 0.0081),
        Line("method", "auto"),
    ]
    found = lines(80, monkeypatch, lambda console: print_plan(console, given))
    assert found[1].split()[:3] == ["prompt", "tokens", "1,234,567"]
    text = words(found)
    assert "time here 1:30:00 36 s to 2:00:00" in text
    assert "output MB 0.0078 0.0075 to 0.0081" in text


def test_further_lines_of_a_finding_are_indented_as_its_first(width, monkeypatch):
    found = lines(width, monkeypatch, lambda console: print_hanging(console, "note ", NOTE, "yellow"))
    assert found[0].startswith("note  in.jsonl:100: ")
    assert all(line.startswith("      ") for line in found[1:])
    assert words(found) == f"note {NOTE}".strip()
