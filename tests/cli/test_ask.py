"""One question on the screen: where passages come from, what is streamed and coloured, and plain text."""

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.cli.answer_view import AnswerView, excerpt
from ragspec.errors import ConfigError
from ragspec.outputs.answers import PartialAnswer
from tests.conftest import ROOT, read_jsonl
from tests.processes import start_interruptible

DOCUMENTS = ROOT / "sample_data" / "documents"
FAKE = ["--runner", "fake", "--max-new-tokens", "40"]


def invoke(*args, **given):
    return CliRunner().invoke(app, [*map(str, args)], **given)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))


def test_without_a_terminal_stdout_has_the_answers_text_alone():
    done = invoke("ask", "Who built it?", *FAKE)
    assert done.exit_code == 0, done.output
    assert "Who built it?" in done.stdout
    assert "note:" not in done.stdout
    assert "\x1b" not in done.output


def test_json_is_an_output_line_with_its_passages(tmp_path):
    (tmp_path / "mill.txt").write_text("Ann Smith built it in 1871.")
    done = invoke("ask", "Who built it?", "--context", tmp_path / "mill.txt", "--json", *FAKE)
    line = json.loads(done.stdout)
    assert line["query"] == "Who built it?"
    assert line["passages"] == [{"id": "mill.txt", "text": "Ann Smith built it in 1871."}]


def test_a_pipe_without_a_question_is_an_error():
    done = invoke("ask", *FAKE, input="")
    assert done.exit_code != 0
    assert "stdin holds no question" in str(done.exception)


def test_a_context_may_come_through_a_pipe():
    done = invoke("ask", "Who?", "--context", "-", "--json", *FAKE, input="Ann built it.")
    assert json.loads(done.stdout)["passages"] == [{"id": "stdin", "text": "Ann built it."}]


def test_files_of_a_folder_that_have_no_text_are_named_and_left_out(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("Ann built it.")
    (notes / "empty.md").write_text("")
    (notes / "old.txt").write_bytes("Möwe".encode("latin-1"))
    done = invoke("ask", "Who?", "--context", notes, "--json", *FAKE)
    assert done.exit_code == 0, done.output
    assert [each["id"] for each in json.loads(done.stdout)["passages"]] == ["a.txt"]
    said = " ".join(done.stderr.split())
    assert f"skipped: {notes}/empty.md: contains no text" in said
    assert f"skipped: {notes}/old.txt: not UTF-8" in said


def test_a_question_that_finds_no_passage_is_noted(tmp_path):
    pytest.importorskip("lancedb")
    for question, found in (("When was the granite tower finished?", True), ("xyzzy?", False)):
        done = invoke("ask", question, "--corpus", DOCUMENTS, "--json", *FAKE)
        assert done.exit_code == 0, done.output
        assert bool(json.loads(done.stdout)["passages"]) == found
        assert ("note: no passage was found" in done.stderr) != found
    assert "no passage" not in invoke("ask", "xyzzy?", *FAKE).stderr


def test_ctrl_c_stops_an_answer_and_keeps_the_model():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ragspec", "ask", "--runner", "fake", "--set", "runner_args.delay_s=60"]
    process = start_interruptible(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""

    def read_until(word):
        nonlocal shown
        shown = b""
        end = time.monotonic() + 60
        while word not in shown and time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 4096)
        assert word in shown, shown

    try:
        read_until(b"> ")
        os.write(ours, b"Who built it?\n")
        read_until(b"Who built it?")
        time.sleep(0.5)  # it is being answered
        process.send_signal(signal.SIGINT)
        read_until(b"stopped; an empty line quits")
        os.write(ours, b"\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_long_file_becomes_passages(tmp_path):
    (tmp_path / "long.md").write_text(
        "# Mills\n\n" + "\n\n".join(f"Mill {i} stands in the valley. " * 9 for i in range(60))
    )
    done = invoke("ask", "Who?", "--context", tmp_path / "long.md", "--json", *FAKE)
    passages = json.loads(done.stdout)["passages"]
    assert [passage["id"] for passage in passages[:2]] == ["long.md#1", "long.md#2"]
    assert {passage["title"] for passage in passages} == {"Mills"}


def test_without_a_question_each_line_is_one():
    done = invoke("ask", *FAKE, "--json", input="One?\n\nTwo?\n")
    assert [json.loads(line)["query"] for line in done.stdout.splitlines()] == ["One?", "Two?"]


def test_lines_of_a_pipe_are_text_of_any_encoding(tmp_path):
    done = invoke("ask", *FAKE, "--json", input=b"\xef\xbb\xbfOne?\r\ncaf\xe9?\nTwo?")
    one, bad, two = map(json.loads, done.stdout.splitlines())
    assert (one["query"], two["query"]) == ("One?", "Two?")
    assert "-:2: not UTF-8" in bad["error"]["message"]
    assert done.exit_code == 1, "a question of a pipe failed"
    assert invoke("ask", *FAKE, "--json", input="One?".encode("utf-16")).stdout.count("One?") > 0


def test_a_corpus_is_searched_as_the_config_says(tmp_path):
    pytest.importorskip("lancedb")
    config = tmp_path / "c.yaml"
    dense = {"index": "elsewhere", "mode": "dense", "storage_options": {"region": "x"}}
    dense |= {"top_k": 1, "chunk_size": 64, "chunk_overlap": 0}
    config.write_text(json.dumps({"runner": "fake", "retrieval": dense}))
    done = invoke("ask", "When was the granite tower finished?", "-c", config, "--corpus", DOCUMENTS, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["passages"]
    assert found["id"].startswith("kestrel-point.md#"), "in passages of 64 tokens"
    assert "retrieval.mode: auto instead of dense" in done.stderr


def test_a_folder_is_indexed_once(tmp_path):
    pytest.importorskip("lancedb")
    for _ in range(2):
        done = invoke("ask", "When was the granite tower finished?", "--corpus", DOCUMENTS, "-k", 1, "--json", *FAKE)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["passages"][0]["id"] == "kestrel-point.md"
    assert len(list((tmp_path / "cache" / "asked").iterdir())) == 1


def test_search_shows_passages_and_their_files(tmp_path):
    pytest.importorskip("lancedb")
    assert invoke("index", DOCUMENTS, "-o", tmp_path / "index").exit_code == 0
    shown = invoke("search", "sourdough starter", "--index", tmp_path / "index", "-k", 1)
    assert shown.stdout.strip().startswith("[1] sourdough.txt")
    found = invoke("search", "sourdough starter", "--index", tmp_path / "index", "-k", 2, "--json")
    assert json.loads(found.stdout.splitlines()[0])["document"] == "sourdough.txt"
    nothing = invoke("search", "xyzzy", "--index", tmp_path / "index")
    assert (nothing.stdout, nothing.exit_code) == ("", 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ask", "  ", *FAKE], "QUESTION: must not be empty"),
        (["ask", "caf\udce9?", *FAKE], "QUESTION: is not valid UTF-8"),
        (["search", "", "--index", "x"], "WORDS: must not be empty"),
        (["search", "x", "--index", "nowhere"], 'retrieval.index: "nowhere": no index there'),
        (["ask", "x", *FAKE, "--index", "nowhere"], 'retrieval.index: "nowhere": no index there'),
        (["ask", "x", *FAKE, "--corpus", "nowhere"], "--corpus: nowhere: no such file or folder"),
        (["ask", "x", *FAKE, "--context", "nowhere"], "--context: nowhere: no such file"),
        (
            ["ask", "x", *FAKE, "--context", "a", "--corpus", "b"],
            "--index, --corpus and --context: give only one of them",
        ),
        (["ask", *FAKE, "--context", "-"], "stdin cannot be both"),
        (["ask", "x", "--model", "nowhere/none"], 'model: "nowhere/none": is not a local folder'),
        (["ask", "x", "--set", "model=nowhere/none"], 'model: "nowhere/none": is not a local folder'),
        (["ask", "x", *FAKE, "--context", "empty.txt"], "--context: empty.txt: contains no text"),
    ],
)
def test_what_cannot_be_asked_is_one_line(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    done = invoke(*args)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_run_can_show_its_first_answers(tmp_path):
    out = tmp_path / "a.jsonl"
    args = ["-i", ROOT / "sample_data" / "questions.jsonl", "-o", out, "--limit", 3, "--show", 2]
    done = invoke("generate", *FAKE, *args)
    assert done.exit_code == 0, done.output
    shown = done.stderr
    assert [line["query"] in shown for line in read_jsonl(out)] == [True, True, False]
    assert "[1] d1  Kestrel Point Lighthouse" in shown
    assert shown.index("Kestrel") < shown.index("records ")


# -- what is shown ---------------------------------------------------------------------------------


def view(*, terminal):
    out = Console(file=io.StringIO(), force_terminal=terminal, width=30, color_system="standard" if terminal else None)
    return AnswerView(out, out), out.file


def test_an_answer_grows_word_by_word_and_ends_whole():
    screen, file = view(terminal=False)
    seen = []
    for text in ["An", "Ann buil", "Ann built the mill"]:
        screen.hear(PartialAnswer("q", text))
        seen.append(file.getvalue())
    assert seen == ["", "Ann ", "Ann built the "]
    line = {"output": "Ann built the mill.", "output_tokens": 5, "latency_s": 0.1, "finish_reason": "stop"}
    screen.finish(line)
    assert file.getvalue().startswith("Ann built the mill.\n")


def test_what_was_copied_has_the_colour_of_its_passage():
    screen, file = view(terminal=True)
    spans = [{"start": 4, "end": 9, "context": "d1"}, {"start": 14, "end": 18, "context": "d2"}]
    passages = [{"id": "d1", "text": "He built it."}, {"id": "d2", "text": "A mill."}, {"id": "d3", "text": "Else."}]
    figures = {"output_tokens": 5, "latency_s": 0.1, "finish_reason": "stop"}
    screen.finish({"output": "Ann built the mill.", "copied": spans, "passages": passages, **figures})
    shown = file.getvalue()
    assert "\x1b[32mbuilt\x1b[0m" in shown
    assert "\x1b[36mmill\x1b[0m." in shown
    assert "\x1b[32m[1] d1\x1b[0m" in shown
    assert "\x1b[36m[2] d2\x1b[0m" in shown
    assert "\x1b[1m[3] d3\x1b[0m" in shown
    assert "He \x1b[32mbuilt\x1b[0m it." in shown


def test_a_long_answer_is_broken_between_words():
    screen, file = view(terminal=True)
    screen.hear(PartialAnswer("q", "word " * 20))
    assert max(len(line) for line in file.getvalue().splitlines()) <= 30
    assert file.getvalue().split() == ["word"] * 20


def test_text_without_spaces_grows_and_fits_its_cells():
    screen, file = view(terminal=True)
    text = "灯台は一八七一年に建てられた。それから、" * 5
    screen.hear(PartialAnswer("q", text[:9]))
    assert file.getvalue() == text[:8], "the last character may be joined by the next"
    screen.hear(PartialAnswer("q", text))
    screen.finish({"output": text, **FIGURES})
    lines = file.getvalue().split("\x1b")[0].split()
    assert max(map(cell_len, lines)) <= 30
    assert min(map(cell_len, lines[:-1])) >= 26
    assert "".join(lines) == text
    assert not any(line[0] in "。、" for line in lines)


def test_a_word_wider_than_the_screen_is_broken():
    screen, file = view(terminal=True)
    screen.finish({"output": "see https://" + "x" * 70 + " and on", **FIGURES})
    lines = file.getvalue().splitlines()
    assert [len(line.rstrip()) for line in lines[:4]] == [3, 30, 30, 25]


def test_an_excerpt_shows_what_was_quoted():
    text = "filler " * 200 + "the granite tower" + " filler" * 200
    assert "the granite tower" in excerpt(text, ["green"], ["the granite tower"]).plain
    assert excerpt(text, [], []).plain.startswith("filler")


FIGURES = {"output_tokens": 5, "latency_s": 0.1, "finish_reason": "stop"}


def test_a_terminal_obeys_nothing_that_a_model_or_a_document_says():
    screen, file = view(terminal=True)
    orders = "\x1b]0;title\x07 \x1b[2J \x9b31m \x08"
    passage = {"id": f"d{orders}", "title": orders, "text": f"He {orders} built it."}
    screen.show({"id": orders, "query": orders, "output": f"Ann {orders}", "passages": [passage], **FIGURES})
    assert not {"\x07", "\x08", "\x9b"} & set(file.getvalue())
    assert set(re.findall(r"\x1b(\[[\d;]*m)?", file.getvalue())) <= {"[1m", "[2m", "[0m"}, "but for our own colours"


def test_lines_keep_their_indentation_and_none_is_too_long():
    screen, file = view(terminal=True)
    screen.finish({"output": "def f():\n    return 1\n\n" + "abcdefghi " * 12 + "end", **FIGURES})
    lines = file.getvalue().splitlines()
    assert lines[:3] == ["def f():", "    return 1", ""]
    assert max(map(len, lines[:8])) <= 30


def test_what_goes_to_a_file_is_the_answer_itself():
    screen, file = view(terminal=False)
    text = "a\tb \x0c\r\n  c [bold]d[/bold]"
    screen.finish({"output": text, **FIGURES})
    assert file.getvalue().startswith(text + "\n")
