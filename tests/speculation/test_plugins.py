"""Drafters from outside: an entry point, a registration; what they raise or guess never changes an answer."""

import json
import subprocess
import sys

import pytest
import torch

import ragspec
from ragspec.errors import ConfigError
from ragspec.speculation import methods as plugins
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.methods import METHODS, check_method, methods_of
from tests.conftest import SAMPLE, read_jsonl

RECORDS = [
    {"id": record["id"], "query": record["query"], "contexts": [record["contexts"][0]["text"][:200]]}
    for record in read_jsonl(SAMPLE)[:4]
]
# what a package of somebody else brings: a module, and the metadata that names its drafter
MODULE = '''
from ragspec import Draft

class Repeats:
    """Guesses that the last token comes again and again."""
    def __init__(self, settings):
        self.settings = settings
    def open(self, prompt, passages=()):
        return Row(prompt)

class Row:
    def __init__(self, prompt):
        self.last = prompt[-1]
    def propose(self, limit):
        return Draft([self.last] * min(limit, 3))
    def extend(self, token_ids):
        self.last = token_ids[-1]
    def close(self):
        pass
'''


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(plugins, "registered", {})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return the folder of an installed package with a drafter."""
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(folder):
    """Make `folder` one with an installed package that brings the drafter `repeats`; return it."""
    info = folder / "repeats-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "repeats.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repeats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ragspec.drafters]\nrepeats = repeats:Repeats\n")
    return folder


class Scripted:
    """A drafter that does what `on` says at the step of that name."""

    def __init__(self, settings, on):
        self._on = on
        on.get("start", lambda: None)()

    def open(self, prompt, passages=()):
        self._on.get("open", lambda: None)()
        return self

    def propose(self, limit):
        return self._on["propose"]() if "propose" in self._on else ragspec.Draft([5] * min(limit, 2))

    def extend(self, token_ids):
        self._on.get("extend", lambda: None)()

    def close(self):
        self._on.get("close", lambda: None)()


def fail():
    raise OSError("disk of the plug-in")


def answers(model, method, **settings):
    """Return the answers, and the totals."""
    raw = {
        "model": model,
        "sampling": {"max_new_tokens": 16},
        "speculation": {"method": method, "num_tokens": 4},
        "runner_args": {"batch_size": 2},
    }
    with ragspec.Pipeline(ragspec.load_config(raw | settings)) as pipeline:
        texts = [answer["output"] for answer in pipeline.answers(RECORDS)]
        return texts, pipeline.summary


@pytest.fixture(scope="module")
def plain(tiny):
    return answers(tiny, "none")[0]


def test_an_installed_drafter_is_a_method_of_both_runners(installed):
    assert "repeats" in methods_of("huggingface")
    assert "repeats" in methods_of("vllm")
    assert "repeats" not in methods_of("fake")
    assert "repeats" not in sys.modules, "listing methods imports nobody's code"
    with pytest.raises(ConfigError, match='did you mean "repeats"'):
        check_method("huggingface", "repeat")


def test_an_installed_drafter_drafts_and_answers_stay_those_of_plain_decoding(tiny, plain, installed):
    texts, summary = answers(tiny, "repeats")
    assert texts == plain
    assert summary.spec.drafted > 0
    assert summary.about is not None


def test_an_installed_drafter_serves_the_command_line(tiny, plain, installed, tmp_path):
    config = tmp_path / "c.yaml"
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    config.write_text(f"model: {tiny}\nspeculation: {{method: repeats}}\nsampling: {{max_new_tokens: 16}}\n")
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); from ragspec.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "-c", str(config), "-i", str(lines)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [json.loads(line)["output"] for line in done.stdout.splitlines()] == plain


def test_a_registered_drafter_is_as_good_as_ours(tiny, plain):
    ragspec.register_drafter("lookup-of-mine", lambda settings: PromptLookup(1, 3))
    texts, summary = answers(tiny, "lookup-of-mine")
    _, ours = answers(tiny, "prompt_lookup")
    assert texts == plain
    assert (summary.spec.drafted, summary.spec.accepted) == (ours.spec.drafted, ours.spec.accepted)
    assert summary.spec.accepted > 0


@pytest.mark.parametrize("step", ["start", "open", "propose", "extend", "close"])
def test_a_drafter_that_raises_costs_drafts_and_is_named_in_the_notes(tiny, plain, step):
    ragspec.register_drafter("broken", lambda settings: Scripted(settings, {step: fail}))
    texts, summary = answers(tiny, "broken")
    assert texts == plain
    (note,) = [note for note in summary.notes if "broken" in note]
    assert f"failed in {step} (OSError: disk of the plug-in)" in note


def test_no_failure_is_blamed_on_what_drafts_cost(tiny):
    """Drafts are judged by cost if their length is not fixed."""
    quiet = {"propose": ragspec.Draft}
    faults = {"propose": fail}, {"propose": lambda: ragspec.Draft([10**7, -3])}
    for on, blamed in ((quiet, True), *((fault, False) for fault in faults)):
        ragspec.register_drafter("blamed", lambda settings, on=on: Scripted(settings, on))
        _, summary = answers(tiny, "blamed", speculation={"method": "blamed"})
        assert any("expected to cost more than they save" in note for note in summary.notes) == blamed
        assert any("the drafter blamed" in note for note in summary.notes) != blamed


@pytest.mark.parametrize(
    ("guesses", "why"),
    [
        ([-1, 5], "token id -1 is outside the model's vocabulary of 400"),
        ([10**9], "token id 1000000000 is outside"),
        ([5, 399, 400], "token id 400 is outside"),
        (["5"], "'5' is not an int"),
        ([None], "None is not an int"),
        ([True, 5], "True is not an int"),
        (torch.tensor([1.0, 2.0]), "tensor(1.) is not an int"),
        ([5] * 50, ""),
    ],
    ids=["negative", "huge", "one too many", "a text", "nothing", "a boolean", "a tensor", "more than asked for"],
)
def test_whatever_a_drafter_guesses_answers_stay_the_same(tiny, plain, guesses, why):
    ragspec.register_drafter("wild", lambda settings: Scripted(settings, {"propose": lambda: ragspec.Draft(guesses)}))
    texts, summary = answers(tiny, "wild")
    assert texts == plain
    notes = [note for note in summary.notes if "wild" in note]
    assert len(notes) == bool(why)
    assert all(f"the drafter wild proposed an invalid draft ({why}" in note for note in notes)


@pytest.mark.parametrize(("step", "what"), [("start", "drafter"), ("open", "drafter of the record")])
def test_a_drafter_that_returns_nothing_is_named_in_the_notes(tiny, plain, step, what):
    class Empty:
        def open(self, prompt, passages=()):
            return None

    ragspec.register_drafter("empty", lambda settings: Empty() if step == "open" else None)
    texts, summary = answers(tiny, "empty")
    assert texts == plain
    assert any(f"empty failed in {step} (TypeError: it returned None, not a {what})" in note for note in summary.notes)


@pytest.mark.parametrize("draft", [None, 7, [5, 6]])
def test_a_drafter_that_returns_no_draft_is_named_in_the_notes(tiny, plain, draft):
    ragspec.register_drafter("odd", lambda settings: Scripted(settings, {"propose": lambda: draft}))
    texts, summary = answers(tiny, "odd")
    assert texts == plain
    assert any("the drafter odd failed in propose" in note for note in summary.notes)


def test_a_name_of_ours_is_refused():
    for word in METHODS:
        with pytest.raises(ConfigError, match="choose another"):
            ragspec.register_drafter(word, lambda settings: PromptLookup())


@pytest.mark.parametrize(
    ("name", "make", "error", "why"),
    [
        ("", PromptLookup, ConfigError, "the name of a drafter is empty"),
        (" ", PromptLookup, ConfigError, "the name of a drafter is empty"),
        (None, PromptLookup, TypeError, "must be a text, not NoneType"),
        ("mine", PromptLookup(), TypeError, 'drafter "mine": PromptLookup cannot be called; give a class'),
    ],
)
def test_what_is_no_drafter_is_refused_at_once(name, make, error, why):
    with pytest.raises(error, match=why):
        ragspec.register_drafter(name, make)
    assert not plugins.registered


def test_a_plugin_that_no_method_names_is_said(tmp_path):
    from tests.warm import ragspec as command

    (tmp_path / "again.py").write_text(MODULE)
    args = ["generate", "-i", SAMPLE, "-o", "out.jsonl", "--limit", "1", "--plugin", "again.py"]
    done = command(tmp_path, *args, "--runner", "fake")
    assert "note: --plugin: not used, because the method is none; to use it, add --method again" in done.stderr
    used = command(tmp_path, *args, "--model", "nobody/nowhere", "--method", "again")
    assert "not used" not in used.stderr
