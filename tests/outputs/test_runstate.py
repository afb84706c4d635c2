import json

import pytest

from ragspec.errors import ConfigError
from ragspec.outputs.journal import Journal
from tests.conftest import read_jsonl
from tests.outputs.test_journal import IDENTITY, answer, write


def legacy(path):
    """Let the state be one of before it named its output."""
    state = path.with_name("a.run.json")
    state.write_text(json.dumps({"config": json.loads(state.read_text())["config"]}))


@pytest.mark.parametrize("old", [False, True], ids=["named", "unnamed"])
@pytest.mark.parametrize("names", [("a", "a.jsonl"), ("a.jsonl", "a")], ids=str)
def test_two_outputs_never_share_a_state(tmp_path, names, old):
    first, second = (tmp_path / name for name in names)
    write(first, answer("x"))
    if old:
        legacy(first)
    before = (tmp_path / "a.run.json").read_bytes()
    with pytest.raises(ConfigError, match=f"a.run.json, which belongs to {names[0]}; choose another --output"):
        Journal(str(second), IDENTITY)
    assert not second.exists()
    assert (tmp_path / "a.run.json").read_bytes() == before
    write(first, answer("y"))  # and the first goes on
    assert len(read_jsonl(first)) == 2


def test_a_state_whose_output_is_gone_is_free(tmp_path):
    write(tmp_path / "a", answer("x"))
    (tmp_path / "a").unlink()
    write(tmp_path / "a.jsonl", answer("x"))
    assert len(read_jsonl(tmp_path / "a.jsonl")) == 1


def test_a_file_of_that_name_which_is_no_output_bothers_nobody(tmp_path):
    (tmp_path / "a").write_text("notes")
    for _ in range(2):
        write(tmp_path / "a.jsonl", answer("x"))
    legacy(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", answer("x"))
    assert len(read_jsonl(tmp_path / "a.jsonl")) == 3


def test_names_of_other_forms_have_states_of_their_own(tmp_path):
    for name in ("a.jsonl.jsonl", "a.jsonl", "b", "b.json", "c.jsonl", "c.json"):
        write(tmp_path / name, answer("x"))
    assert len(list(tmp_path.glob("*.run.json"))) == 6


def test_answers_do_not_wait_in_another_runs_output(tmp_path):
    write(tmp_path / "answers.pending.jsonl", answer("precious"))
    before = (tmp_path / "answers.pending.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"go to answers.pending.jsonl, which is another run's output"):
        Journal(str(tmp_path / "answers.jsonl"), IDENTITY)
    assert (tmp_path / "answers.pending.jsonl").read_bytes() == before


def test_a_file_of_somebody_elses_in_the_place_of_what_waits_is_not_touched(tmp_path):
    (tmp_path / "answers.pending.jsonl").write_text("notes\n")
    with pytest.raises(ConfigError, match="does not say which config wrote them"):
        Journal(str(tmp_path / "answers.jsonl"), IDENTITY)
    assert (tmp_path / "answers.pending.jsonl").read_text() == "notes\n"
    write(tmp_path / "answers.jsonl", answer("x"), resume=False)
    assert (tmp_path / "answers.pending.jsonl.1").read_text() == "notes\n"


@pytest.mark.parametrize("broken", [b"", b"[1]", b"{}", b"not json", b'{"config": 5}'])
def test_a_state_that_says_nothing_resumes_nothing(tmp_path, broken):
    path = tmp_path / "answers.jsonl"
    write(path, answer("x"))
    (tmp_path / "answers.run.json").write_bytes(broken)
    with pytest.raises(ConfigError, match="does not say which config wrote them"):
        Journal(str(path), IDENTITY)
    assert len(read_jsonl(path)) == 1
