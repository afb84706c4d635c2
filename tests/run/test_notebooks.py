"""The API as notebooks use it: pipelines without `with`, what they show, frames, and drafters in files."""

import re
import subprocess
import sys

import pytest

import ragspec
from ragspec.errors import ConfigError
from ragspec.records import Passage
from ragspec.speculation import methods, plugin_files
from tests.conftest import write_jsonl

FAKE = {"runner": "fake", "sampling": {"max_new_tokens": 12}}
HOSTILE = "<script>x</script>"


def test_a_pipeline_needs_no_with_and_no_load_config():
    pipeline = ragspec.Pipeline(FAKE)
    assert repr(pipeline) == "Pipeline(fake, method none, not loaded)"
    assert pipeline.ask("Who built it?", ["Ann built it."])["output"]
    assert "method none, loaded" in repr(pipeline)
    pipeline.close()
    assert "not loaded" in repr(pipeline)
    assert [answer["id"] for answer in pipeline.answers([{"query": "a"}, {"query": "b"}])] == ["1", "2"]


def test_an_iterator_ends_with_its_pipeline():
    pipeline = ragspec.Pipeline(FAKE)
    answers = pipeline.answers([{"query": "a"}, {"query": "b"}])
    assert next(answers)["output"]
    pipeline.close()
    with pytest.raises(ConfigError, match="closed before all records were answered"):
        next(answers)
    assert len(list(pipeline.answers([{"query": "a"}, {"query": "b"}]))) == 2


def test_a_script_may_end_beside_an_open_iterator():
    """One in builtins is there longest, when modules are no longer whole."""
    answers = f"ragspec.Pipeline({FAKE}).answers([dict(query=x) for x in 'ab'])"
    script = f"import builtins, ragspec; builtins.answers = {answers}; next(answers)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipeline_takes_the_path_of_a_config(tmp_path):
    (tmp_path / "c.yaml").write_text("runner: fake\n")
    assert ragspec.Pipeline(tmp_path / "c.yaml").ask("Who?")["output"]


@pytest.mark.parametrize(
    ("contexts", "texts"),
    [
        ("Ann built it.", ["Ann built it."]),
        ({"title": "T", "text": "Ann built it."}, ["Ann built it."]),
        ({"title": ["T", "U"], "text": ["a", "b"]}, ["a", "b"]),
        (("a", {"text": "b"}), ["a", "b"]),
        ((text for text in "ab"), ["a", "b"]),
        (Passage("p", "a"), ["a"]),
    ],
)
def test_passages_of_a_question_may_have_any_form(contexts, texts):
    pipeline = ragspec.Pipeline({**FAKE, "output": {"include": ["contexts"]}})
    assert [each["text"] for each in pipeline.ask("Who?", contexts)["passages"]] == texts


def test_one_record_is_a_record_and_a_text_is_none():
    pipeline = ragspec.Pipeline(FAKE)
    assert [answer["id"] for answer in pipeline.answers({"id": "q", "query": "Who?"})] == ["q"]
    with pytest.raises(ConfigError, match="records: must be records, not a text"):
        list(pipeline.answers("questions.jsonl"))


def test_a_data_frame_is_no_list_of_records():
    frame = pytest.importorskip("pandas").DataFrame({"id": ["a"], "query": ["Who?"]})
    pipeline = ragspec.Pipeline(FAKE)
    for table in (frame, pytest.importorskip("pyarrow").Table.from_pandas(frame)):
        with pytest.raises(ConfigError, match="records: must be records, not a data frame; give its rows"):
            list(pipeline.answers(table))
    assert [answer["id"] for answer in pipeline.answers(frame.to_dict("records"))] == ["a"]


def test_an_answer_is_a_dictionary_that_a_person_can_read():
    (answer,) = ragspec.Pipeline({**FAKE, "output": {"include": ["query"]}}).answers([{"id": "q", "query": HOSTILE}])
    assert isinstance(answer, dict)
    assert re.fullmatch(r"Answer\('q', '.*', 12 tokens, cut off\)", repr(answer))
    assert "&lt;script&gt;" in answer._repr_html_()
    assert "<script>" not in answer._repr_html_()
    (failed,) = ragspec.Pipeline(FAKE).answers([{"id": "q", "query": ""}])
    assert repr(failed) == "Answer('q', error: record 1: no prompt: \"query\" is empty)"


def test_what_was_copied_has_the_colour_of_its_passage():
    from ragspec.outputs.shown import BACKGROUNDS, Answer

    spans = [{"start": 4, "end": 9, "context": "d2"}]
    line = {"id": "q", "output": "Ann built it.", "copied": spans, "contexts": ["d1", "d2"]}
    shown = Answer({**line, "passages": [{"id": "d2", "text": "She built."}]})._repr_html_()
    assert f'Ann <span style="background:{BACKGROUNDS[1]}" title="d2">built</span> it.' in shown
    assert "<summary>1 passages</summary>" in shown


def test_a_summary_is_read_at_a_glance(tmp_path, capsys):
    given = {**FAKE, "input": write_jsonl(tmp_path / "in.jsonl", [{"query": "a"}]), "output": str(tmp_path / "a.jsonl")}
    summary = ragspec.generate(ragspec.load_config(given), progress=True)
    assert repr(summary).startswith("RunSummary(answered 1, output tokens 9, tokens/s")
    assert "<th>answered</th><td>1</td>" in summary._repr_html_()
    assert "1/1" in capsys.readouterr().err


def test_a_bar_counts_answers(capsys):
    records = [{"query": str(number)} for number in range(3)]
    assert len(list(ragspec.Pipeline(FAKE).answers(records, progress=True))) == 3
    assert "3/3" in capsys.readouterr().err


def test_frames_hold_what_the_commands_print(tmp_path):
    pytest.importorskip("pandas")
    from ragspec import frames

    records = [{"id": str(i), "query": f"question {i}", "reference": "x"} for i in range(3)]
    given = {**FAKE, "input": write_jsonl(tmp_path / "in.jsonl", records), "output": str(tmp_path / "a.jsonl")}
    ragspec.generate(ragspec.load_config(given))
    scores = frames.evaluate(tmp_path / "a.jsonl", against=str(tmp_path / "a.jsonl"))
    assert (scores.loc["f1", "records"], scores.loc["f1", "difference"]) == (3, 0)


@pytest.mark.slow
def test_a_benchmark_is_a_frame(tmp_path):
    pytest.importorskip("pandas")
    from ragspec import frames

    given = {**FAKE, "input": write_jsonl(tmp_path / "in.jsonl", [{"query": "a"}])}
    found = frames.benchmark(given, methods="none", repeat=1, output=tmp_path / "out")
    assert found.equals(frames.results(tmp_path / "out"))
    assert found.loc["none", "records"] == 1


def test_an_index_is_a_row(tmp_path):
    pytest.importorskip("pandas")
    pytest.importorskip("lancedb")
    from ragspec import frames

    (tmp_path / "a.txt").write_text("The mill was built in 1871.")
    done = frames.index(tmp_path / "a.txt", tmp_path / "index")
    assert done.loc[str(tmp_path / "index"), "added"] == 1


def test_frames_without_pandas_are_one_line(tmp_path, monkeypatch):
    from ragspec import frames

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r'frames need pandas: pip install "ragspec\[notebook\]"'):
        frames.index("x", tmp_path)


# -- drafters in files -----------------------------------------------------------------------------

DRAFTER = """
import ragspec

class Mine:
    def __init__(self, settings): pass
    def open(self, prompt, passages=()): return Row()

class Row:
    def propose(self, limit): return ragspec.Draft([])
    def extend(self, token_ids): pass
    def close(self): pass
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.setenv(plugin_files.VARIABLE, "")
    monkeypatch.setattr(methods, "registered", {})

    def add(text, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        monkeypatch.delitem(sys.modules, plugin_files.module_name(str(path)), raising=False)
        plugin_files.add_plugins([str(path)])

    return add


def test_a_file_with_one_drafter_is_a_method_of_its_name(plugin):
    plugin(DRAFTER)
    assert "mine" in methods.known_methods()
    assert methods.method_named("mine").drafter is not None


def test_a_file_may_register_its_drafters_itself(plugin):
    plugin(DRAFTER + "\nragspec.register_drafter('other', Mine)\n")
    assert {"other", "mine"} & set(methods.known_methods()) == {"other"}


def test_files_of_one_name_are_loaded_once_each_wherever_they_are(plugin):
    plugin(DRAFTER + "\nragspec.register_drafter('first', Mine)\n", "a:b/mine.py")
    plugin(DRAFTER, "c/mine.py")
    before = methods.registered.copy()
    assert before.keys() == set(), "files run when a method is looked up"
    assert {"first", "mine"} <= set(methods.known_methods())
    loaded = methods.registered.copy()
    methods.known_methods()
    assert methods.registered == loaded


@pytest.mark.slow
def test_a_benchmark_takes_drafters_from_files_and_refuses_those_of_this_process(tmp_path, plugin):
    pytest.importorskip("pandas")
    from ragspec import frames

    given = {"model": "demo", "input": write_jsonl(tmp_path / "in.jsonl", [{"query": "a"}])}
    given |= {"sampling": {"max_new_tokens": 4}}
    ragspec.register_drafter("here", lambda settings: pytest.fail("it runs"))
    with pytest.raises(ConfigError, match=r'"here": it is registered in this process only.* plugins=\["FILE.py"\]'):
        frames.benchmark(given, methods=["none", "here"])
    (tmp_path / "there.py").write_text(DRAFTER)
    found = frames.benchmark(given, methods=["none", "there"], repeat=1, plugins=tmp_path / "there.py")
    assert set(found.index) == {"none", "there"}


@pytest.mark.slow
def test_an_error_of_a_candidate_has_its_name_once(tmp_path, plugin):
    from ragspec.benchmark.plan import Candidate
    from ragspec.benchmark.process import Worker

    ragspec.register_drafter("here", dict)
    lines = write_jsonl(tmp_path / "in.jsonl", [{"query": "a"}])
    config = ragspec.load_config({"model": "demo", "input": lines, "speculation": {"method": "here"}})
    with pytest.raises(ConfigError, match=r'^here: speculation\.method: "here" is not known'):
        Worker(Candidate("here", config), tmp_path, 1)


def test_a_file_that_does_not_load_is_not_kept(tmp_path, plugin):
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"bad.py: ZeroDivisionError"):
        plugin_files.use_plugins([str(tmp_path / "bad.py")], methods.known_methods)
    assert methods.known_methods()


def test_a_drafter_of_a_file_is_known_elsewhere_and_one_of_this_process_is_not(plugin):
    plugin("from collections import Counter\nimport ragspec\nragspec.register_drafter('borrowed', Counter)\n")
    ragspec.register_drafter("here", dict)
    methods.known_methods()
    assert [methods.is_local(name) for name in ("borrowed", "here", "context", "nothing")] == [0, 1, 0, 0]
    ragspec.register_drafter("borrowed", dict)
    assert methods.is_local("borrowed")


def test_two_drafters_of_one_name_are_one_line(plugin):
    plugin(DRAFTER, "a/mine.py")
    plugin(DRAFTER, "b/mine.py")
    for _ in range(2):  # the second time, too
        with pytest.raises(
            ConfigError, match=r'b/mine.py: another drafter is already named "mine"; rename one of them'
        ):
            methods.known_methods()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py", "nowhere.py: no such file; give a Python file"),
        ("mine", "mine: no such file; did you mean mine.py?"),
        ("notes.txt", "notes.txt: is not a Python file; give"),
        (".", ": is a folder; give a Python file"),
    ],
)
def test_a_path_that_is_no_python_file_is_one_line(tmp_path, name, message):
    (tmp_path / "mine.py").write_text(DRAFTER)
    (tmp_path / "notes.txt").write_text(DRAFTER)
    with pytest.raises(ConfigError) as caught:
        plugin_files.add_plugins([str(tmp_path / name)])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "mine.py: ZeroDivisionError: division by zero"),
        ("x = 1", "has 0 classes with a method `open`; call ragspec.register_drafter"),
        (
            DRAFTER + "import ragspec\nragspec.register_drafter('context', Mine)",
            "ragspec already has a method of that name",
        ),
    ],
)
def test_a_file_that_is_no_drafter_is_one_line(plugin, text, message):
    plugin(text)
    with pytest.raises(ConfigError) as caught:
        methods.known_methods()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command_loads_a_plugin(tmp_path):
    (tmp_path / "mine.py").write_text(DRAFTER)
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", "generate", "--plugin", "mine.py", "--method", "mine", "--runner", "fake"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**__import__("os").environ, "PYTHONPATH": str(plugin_files.Path(ragspec.__file__).parent.parent)},
        check=False,
    )
    assert 'runner "fake" does not have "mine" (it needs runner huggingface or vllm)' in done.stderr
