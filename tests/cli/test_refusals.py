"""What users get wrong, and packages that are not there: one line that says what to do."""

import sys

import pytest
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.config.io import InputConfig, OutputConfig
from ragspec.config.load import build_config, load_config
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.sources import open_source
from ragspec.inputs.values import messages_of
from ragspec.outputs.journal import Journal
from ragspec.retrieval.index import Index
from tests.conftest import write_jsonl


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"model": "m", "speculation": {"method": "prompt_lookup", "ngram_min": 4, "ngram_max": 2}},
            "speculation.ngram_min: 4 is greater than ngram_max (2)",
        ),
        (
            {"runner": "fake", "prompt": {"source": "messages"}, "retrieval": {"index": "i"}},
            'prompt.source: "messages": retrieval only fills in contexts for `query` records',
        ),
        (
            {"model": "m", "speculation": {"method": "none", "speculative_config": {"method": "ngram"}}},
            "speculation.speculative_config: only valid with method: speculative_config",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_named(raw, message):
    with pytest.raises(ConfigError) as raised:
        build_config(raw)
    assert message in str(raised.value)


def test_a_key_that_is_no_word_is_named_with_its_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: demo\n1: 2\n")
    with pytest.raises(ConfigError, match=r'c\.yaml: key "1" must be a word'):
        load_config(str(path))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hi", 'must be an object with "role" and "content"'),
        ({"content": "hi"}, 'must be an object with "role" and "content"'),
        ({"role": "user", "content": "hi", "name": 3}, '"name" must be a string'),
        ({"role": "assistant", "content": "", "tool_calls": 3}, '"tool_calls" must be a list'),
    ],
)
def test_a_message_of_another_shape_says_which_it_should_have(message, said):
    with pytest.raises(RecordError) as raised:
        messages_of([message])
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("package", "use", "said"),
    [
        (
            "pyarrow",
            lambda folder: open_source(InputConfig(path=[f"{folder}/a.parquet"])),
            'pip install "ragspec[tables]"',
        ),
        (
            "pyarrow",
            lambda folder: Journal(OutputConfig(path=f"{folder}/b.parquet"), {}),
            'pip install "ragspec[tables]"',
        ),
        (
            "datasets",
            lambda folder: open_source(InputConfig(path=["some/set"], format="dataset")),
            'pip install "ragspec[datasets]"',
        ),
        ("fsspec", lambda folder: open_source(InputConfig(path=["s3://box/a.jsonl"])), 'pip install "ragspec[s3]"'),
        ("lancedb", lambda folder: Index(f"{folder}/idx"), 'pip install "ragspec[retrieval]"'),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(tmp_path, monkeypatch, package, use, said):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "idx" / "chunks.lance").mkdir(parents=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as raised:
        use(tmp_path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_columns_without_the_file_that_they_belong_to_are_refused(tmp_path):
    answers = write_jsonl(tmp_path / "a.jsonl", [{"id": "a", "output": "x"}])
    done = CliRunner().invoke(app, ["evaluate", answers, "--columns", "query=q"])
    assert "--columns applies to --references; give that file too" in str(done.exception)
