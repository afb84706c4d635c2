"""Answers pushed to a dataset of a hub on this machine: all of them or none, once."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.outputs.hub import Destination, _written, card_with
from ragspec.run.generate import generate
from tests.conftest import ROOT, write_jsonl
from tests.hub import READ_TOKEN, TOKEN, hub_server

parquet = pytest.importorskip("pyarrow.parquet")
FILE = "data/train-00000-of-00001.parquet"


@pytest.fixture
def hub():
    with hub_server() as server:
        yield server


def answered(tmp_path, name="answers.jsonl", *, count=50, fail=(), **more):
    """Answer questions into an output of this name; return its path."""
    records = [{"id": f"q{i}", "query": f"question {i} " * 8, "reference": "r"} for i in range(count)]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    more = {"runner": "fake", "runner_args": {"fail_ids": list(fail)}, **more}
    output = {"path": str(tmp_path / name), **more.pop("output", {})}
    generate(build_config({"input": source, "output": output, **more}))
    return tmp_path / name


def pushing(hub, *args, token=TOKEN, home=None, **more):
    """Return the command and its environment."""
    changed = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT), **more}
    environment = {**os.environ, **changed, **({"HF_TOKEN": token} if token else {"HF_HOME": str(home)})}
    environment.pop("HF_HUB_OFFLINE", None)
    return [sys.executable, "-m", "ragspec", "push", *map(str, args)], environment


def push(hub, *args, **more):
    command, environment = pushing(hub, *args, **more)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def rows(hub, name="me/answers", file=FILE, branch="main"):
    return parquet.read_table(io.BytesIO(hub.head(name, branch)["files"][file])).to_pylist()


def test_answers_appear_in_one_commit_and_only_once(tmp_path, hub):
    answers = answered(tmp_path, fail=["q3"])
    first = push(hub, answers, "me/answers", "--private", "--message", "tonight's")
    assert (first.returncode, first.stdout) == (0, "")
    assert first.stderr.startswith("pushed 49 answered, 1 failed")  # without a note
    assert hub.commits("me/answers") == ["initial commit", "tonight's"]
    assert hub.datasets["me/answers"]["private"]
    assert len(hub.stored) == 1  # large enough to be uploaded before the commit
    found = rows(hub)
    assert [row["id"] for row in found] == [f"q{i}" for i in range(50)]
    assert found[3]["error"]["message"]
    assert found[3]["output"] is None
    assert json.loads(found[0]["metadata"]) == {"reference": "r"}
    again = push(hub, answers, "me/answers")
    assert again.returncode == 0
    assert "nothing new" in again.stderr
    assert len(hub.commits("me/answers")) == 2


def test_other_answers_take_the_place_of_a_splits(tmp_path, hub):
    push(hub, answered(tmp_path, "old.jsonl", count=50), "me/answers")
    card = hub.head("me/answers")["files"]["README.md"] + b"\nMy own words.\n"
    stale = {"data/train-00001-of-00002.parquet": b"of a larger push"}
    hub.commit("me/answers", "main", "by hand", hub.head("me/answers")["files"] | {"README.md": card} | stale)
    assert push(hub, answered(tmp_path, "new.csv", count=3), "me/answers").returncode == 0
    files = hub.head("me/answers")["files"]
    assert len(rows(hub)) == 3
    assert not stale.keys() & files.keys()
    said = files["README.md"].decode()
    assert said.endswith("My own words.\n")
    assert said.count("3 answered") == 1
    assert "50 answered" not in said


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("answers.csv", {}),
        ("answers.parquet", {"output": {"part_records": 7}}),
        ("answers.jsonl.zst", {}),
        ("answers.lance", {}),
        ("answers.jsonl", {"output": {"format": "openai"}}),
    ],
)
def test_an_output_of_any_format_is_pushed(tmp_path, hub, name, more):
    if name.endswith(".lance"):
        pytest.importorskip("lancedb")
    answers = answered(tmp_path, name, count=20, fail=["q3"], **more)
    done = push(hub, answers, "me/answers", "--name", "fake", "--split", "test", "--revision", "nightly")
    assert (done.returncode, done.stderr[:7]) == (0, "pushed "), done.stderr
    found = rows(hub, file="fake/test-00000-of-00001.parquet", branch="nightly")
    assert [row["id"] for row in found] == [f"q{i}" for i in range(20)]
    assert [row["id"] for row in found if row["error"]] == ["q3"]
    assert "question 0" in found[0]["output"]
    assert found[0]["output_tokens"] > 0
    assert hub.commits("me/answers") == ["initial commit"]  # of main


class Dying:
    """Kills the push at a request."""

    def __init__(self, hub, method, path):
        self.hub, self.at, self.process = hub, (method, path), None

    def __call__(self, method, path):
        if self.process and method == self.at[0] and path.startswith(self.at[1]):
            self.process.kill()
            self.process.wait()
            self.process = None
            raise ConnectionAbortedError

    def push(self, *args):
        command, environment = pushing(self.hub, *args)
        self.hub.before = self
        self.process = process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        assert process.wait(300) == -signal.SIGKILL


@pytest.mark.parametrize("at", [("PUT", "/stored/"), ("POST", "/api/datasets/me/answers/commit/")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_push_leaves_the_dataset_as_it_was_and_the_next_one_completes_it(tmp_path, hub, at):
    hub.add("me/answers", {"notes.md": b"words"})
    answers = answered(tmp_path)
    Dying(hub, *at).push(answers, "me/answers")
    assert hub.commits("me/answers") == ["initial commit"]
    assert hub.head("me/answers")["files"] == {"notes.md": b"words"}
    assert push(hub, answers, "me/answers").returncode == 0
    assert len(hub.commits("me/answers")) == 2
    assert len(rows(hub)) == 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_commit_whose_reply_was_lost_is_not_made_again(tmp_path, hub):
    answers = answered(tmp_path)

    def lose():
        raise ConnectionAbortedError

    hub.after_commit = lose
    lost = push(hub, answers, "me/answers")
    assert lost.returncode == 2
    assert lost.stderr.startswith("error: me/answers: ")
    assert len(lost.stderr.splitlines()) == 1
    assert len(hub.commits("me/answers")) == 2
    again = push(hub, answers, "me/answers")
    assert "nothing new" in again.stderr
    assert len(hub.commits("me/answers")) == 2


def test_a_push_beside_somebody_elses_commit_changes_nothing(tmp_path, hub):
    hub.add("me/answers")
    answers = answered(tmp_path)

    def meanwhile(method, path):
        if path == "/api/validate-yaml":
            hub.commit("me/answers", "main", "theirs", {"notes.md": b"theirs"})

    hub.before = meanwhile
    refused = push(hub, answers, "me/answers")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "push again" in refused.stderr
    assert hub.commits("me/answers") == ["initial commit", "theirs"]
    hub.before = lambda *_: None
    assert push(hub, answers, "me/answers").returncode == 0
    assert hub.head("me/answers")["files"]["notes.md"] == b"theirs"


@pytest.mark.parametrize("line", [{"id": None, "output": "Ann."}, {"id": "a", "output": None, "error": None}])
def test_a_line_without_an_id_or_an_answer_is_not_pushed(tmp_path, line):
    answers = write_jsonl(tmp_path / "a.jsonl", [{"id": "q0", "output": "Ann."}, line])
    with pytest.raises(ConfigError, match="its lines need id and output"):
        _written(answers, Destination("me/answers"), tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt_tokens": "many"}, '"prompt_tokens" must be a whole number, got a string'),
        ({"prompt_tokens": 10**30}, '"prompt_tokens" must be a whole number, got 1000'),
        ({"prompt_tokens": 3.5}, '"prompt_tokens" must be a whole number, got 3.5'),
        ({"latency_s": 10**400}, '"latency_s" must be a number, got 1000'),
        ({"speculation": 5}, '"speculation" must be an object, got a number'),
        ({"speculation": {"drafted": [1]}}, '"speculation.drafted" must be a whole number, got a list'),
        ({"context_scores": ["high"]}, '"context_scores[]" must be a number, got a string'),
        ({"contexts": "d1"}, '"contexts" must be a list, got a string'),
        ({"error": "late"}, '"error" must be an object, got a string'),
        ({"custom_id": "a", "response": {"body": {"choices": 1, "usage": 7}}, "error": "late"}, '"error" must be'),
        ({"custom_id": "a", "response": 5}, "its lines need id and output"),
    ],
)
def test_a_field_that_its_column_cannot_hold_is_named(tmp_path, line, said):
    own = {} if "custom_id" in line else {"id": "a", "output": "Ann."}
    answers = write_jsonl(tmp_path / "a.jsonl", [own | line])
    with pytest.raises(ConfigError) as refused:
        _written(answers, Destination("me/answers"), tmp_path)
    assert str(refused.value).startswith(f"{answers}: ")
    assert said in str(refused.value)


def test_a_note_tells_of_repeated_ids_and_of_fields_that_are_not_pushed(tmp_path):
    one = {"id": "a", "output": "Ann.", "stars": 5, "speculation": {"drafted": 4, "mine": 1}}
    answers = write_jsonl(tmp_path / "a.jsonl", [one, {"id": 7, "output": "Bo."}, {"id": "7", "output": "Cy."}])
    counts, files = _written(answers, Destination("me/answers"), tmp_path)
    assert counts.notes() == [
        '1 of 3 lines repeat the id of an earlier one (first "7"); all are pushed',
        "fields that ragspec does not write are not pushed (stars, speculation.mine)",
    ]
    assert [row["id"] for row in parquet.read_table(files[FILE]).to_pylist()] == ["a", "7", "7"]


def test_what_cannot_be_pushed_is_said_in_a_line(tmp_path, hub):
    answers = answered(tmp_path, count=3)
    (tmp_path / "empty.jsonl").write_text("")
    write_jsonl(tmp_path / "other.jsonl", [{"question": "no answers here"}])
    hub.add("me/public")
    hub.add("me/questions", {FILE: b"questions"})
    hub.add("me/csv", {"train.csv": b"question"})
    home = tmp_path / "home"
    home.mkdir()
    cases = [
        ([answers, "me/answers"], {"token": "", "home": home}, "needs a token"),
        ([answers, "me/answers"], {"token": "hf_wrongWRONGwrong0123456789"}, "the token is not valid"),
        ([answers, "me/public"], {"token": READ_TOKEN}, "may not write there"),
        ([answers, "me/answers"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ([answers, "me/answers"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "does not answer"),
        ([answers, "me/public", "--private"], {}, "is public"),
        ([answers, "me/questions"], {}, "not written by ragspec (data/train-00000"),
        ([answers, "me/csv"], {}, "already has data (train.csv)"),
        ([tmp_path / "missing.jsonl", "me/answers"], {}, "no such file; ANSWERS takes the output of a run"),
        ([tmp_path / "empty.jsonl", "me/answers"], {}, "contains no answers"),
        ([tmp_path / "other.jsonl", "me/answers"], {}, "its lines need id and output"),
        (["-", "me/answers"], {}, "cannot push a stream"),
    ]
    for args, more, said in cases:
        command, environment = pushing(hub, *args, **{"token": TOKEN, **more})
        environment.update({"HF_HUB_OFFLINE": "1"} if "HF_HUB_OFFLINE" in more else {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, (args, done.stderr)
        assert said in done.stderr, (args, done.stderr)
        assert len(done.stderr.splitlines()) == 1, (args, done.stderr)
        assert TOKEN not in done.stderr
        assert READ_TOKEN not in done.stderr
    assert "me/answers" not in hub.datasets


@pytest.mark.parametrize(
    "given", [("answers",), ("a/b/c",), ("me/a", "data"), ("me/a", "..", "x"), ("me/a", "n", "a b")]
)
def test_names_that_the_hub_would_not_take_are_refused(given):
    with pytest.raises(ConfigError, match=r"OWNER/NAME|--name|--split"):
        Destination(*given)


def test_a_run_that_has_not_ended_is_pushed_only_on_request(tmp_path, hub):
    answers = answered(tmp_path, count=5)
    statistics = tmp_path / "answers.stats.json"
    finished = json.loads(statistics.read_text())
    cases = {
        "its run has not ended (at 5 of 9 records)": finished | {"state": "running", "input_records": 9},
        "its run was stopped at 5 of 9 records": finished | {"state": "stopped", "input_records": 9},
        "has 5 records, but had 4 after its last finished run": finished | {"totals": {"records": 4, "failed": 0}},
        "cannot tell whether its run has ended": None,
    }
    for said, content in cases.items():
        statistics.unlink(missing_ok=True)
        if content:
            statistics.write_text(json.dumps(content))
        refused = push(hub, answers, "me/answers")
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert said in refused.stderr
        assert "--partial" in refused.stderr
    assert not hub.datasets
    done = push(hub, answers, "me/answers", "--partial")
    assert done.returncode == 0
    assert done.stderr.startswith("note: ")
    assert len(rows(hub)) == 5


def test_a_push_holds_no_secret_and_no_path(tmp_path, hub):
    secret = "hf_configCONFIGconfig0123"
    answers = answered(tmp_path, count=3, prompt={"system": "inner words"})
    statistics = tmp_path / "answers.stats.json"
    known = json.loads(statistics.read_text())
    known["config"] |= {"model": "/home/me/models/mine", "runner_args": {"token": secret}}
    statistics.write_text(json.dumps(known))
    assert push(hub, answers, "me/answers").returncode == 0
    pushed = b"".join(hub.head("me/answers")["files"].values())
    card = hub.head("me/answers")["files"]["README.md"].decode()
    assert "| model | mine |" in card
    assert "inner words" not in card
    for word in (secret, TOKEN, "/home/me", str(tmp_path)):
        assert word.encode() not in pushed


def test_a_card_keeps_what_others_wrote():
    theirs = (
        "---\nlicense: mit\nconfigs:\n- config_name: raw\n  data_files: raw/*.csv\ntrain-eval-index: []\n---\n# Mine\n"
    )
    to = Destination("me/answers", "nightly", "test")
    card = card_with(theirs, to, "figures", ["raw/a.csv"])
    assert card.startswith("---\nlicense: mit\nconfigs:\n- config_name: raw\n  data_files: raw/*.csv\n")
    assert "- config_name: nightly\n  data_files:\n  - split: test\n    path: nightly/test-*.parquet\n" in card
    assert "# Mine\n\n<!-- ragspec push: nightly/test -->" in card
    assert card_with(card, to, "figures") == card
    assert card_with(card, to, "others") == card.replace("figures", "others")
    with pytest.raises(ConfigError, match="lists the files"):
        card_with(card, Destination("me/answers", "raw"), "")
    with pytest.raises(ConfigError, match="other files of split"):
        card_with(card.replace("nightly/test-*", "nightly/*"), to, "")
    with pytest.raises(ConfigError, match="YAML"):
        card_with("---\n[\n---\n", to, "")
