"""Flags that set keys of the config: a run without YAML, and the config that it saves."""

import csv
import json
from itertools import permutations

import pytest
import yaml
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.cli.flags import FLAGS, METHOD, method_for, pairs_of
from ragspec.cli.options import input_of
from ragspec.config.load import config_of, load_config
from ragspec.errors import ConfigError
from tests.conftest import ROOT, read_jsonl, write_jsonl

FAKE = ["--runner", "fake"]


def invoke(*args):
    return CliRunner().invoke(app, [*map(str, args)])


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("Who built it?\n\nWhen, and why?\n")
    return path


def test_a_run_needs_no_config(tmp_path, questions):
    out = tmp_path / "out.jsonl"
    done = invoke("generate", *FAKE, "-i", questions, "-o", out, "--include", "query")
    assert done.exit_code == 0, done.output
    assert [(line["id"], line["query"]) for line in read_jsonl(out)] == [
        ("1", "Who built it?"),
        ("3", "When, and why?"),
    ]


def test_flags_win_over_the_config_and_over_set(tmp_path, questions):
    config = tmp_path / "c.yaml"
    config.write_text("runner: fake\nsampling: {temperature: 0.3, seed: 1}\n")
    out = tmp_path / "out.jsonl"
    flags = ["--temperature", "0.5", "--set", "sampling.temperature=0.4", "--set", "sampling.top_p=0.9"]
    assert invoke("generate", "-c", config, "-i", questions, "-o", out, *flags).exit_code == 0
    sampling = json.loads((tmp_path / "out.stats.json").read_text())["config"]["sampling"]
    assert (sampling["temperature"], sampling["seed"], sampling["top_p"]) == (0.5, 1, 0.9)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --runner fake -i a.jsonl --input b.jsonl", "--input: given 2 times"),
        ("generate --runner fake -i a.jsonl --seed 1 --seed 2", "--seed: given 2 times"),
        ("generate --runner fake -i a.jsonl --set sampling.seed=1 --set sampling.seed=2", '"sampling.seed" is given'),
        ("inspect a.jsonl --columns id=a --columns id=b", '--columns: "id" is given two values'),
        ("retrieve a.jsonl -i b.jsonl --index x", "--input: given twice"),
        ("run-batch -i a.jsonl --input-file b.jsonl -o c.jsonl", "--input: given 2 times"),
        ("search words --index x --index y", "--index: given 2 times"),
    ],
)
def test_a_flag_that_takes_one_value_is_given_once(command, message):
    done = invoke(*command.split())
    assert message in str(done.exception)


def test_flags_that_add_up_and_switches_may_be_repeated(tmp_path, questions):
    out = tmp_path / "out.jsonl"
    flags = ["--stop", "a", "--stop", "b", "--include", "query", "-q", "-q"]
    flags += ["--set", "sampling.seed=1", "--set", "sampling.seed=1"]
    assert invoke("generate", *FAKE, "-i", questions, "-o", out, *flags).exit_code == 0
    assert json.loads((tmp_path / "out.stats.json").read_text())["config"]["sampling"]["stop"] == ["a", "b"]


def test_every_flag_sets_a_key_that_the_config_has():
    documented = (ROOT / "docs" / "reference" / "config.md").read_text()
    for name, flag in FLAGS.items():
        key = flag.key.removeprefix("runner_args.")
        assert f"| `{key}` |" in documented or f"| **{key}** |" in documented, name


@pytest.mark.parametrize(
    ("settings", "config", "method"),
    [
        (["model=demo"], False, [f"speculation.method={METHOD}"]),
        (["model=demo"], True, []),
        (["model=demo", "speculation.method=none"], False, []),
        (["model=demo", "speculation.draft_model=x"], False, ["speculation.method=draft_model"]),
        (["runner=fake"], False, []),
        (["model=m", "runner_args.speculative_config={}"], False, []),
        (["model=m", "runner_args.dtype=float32"], False, [f"speculation.method={METHOD}"]),
    ],
)
def test_a_method_is_chosen_where_nothing_else_says_one(settings, config, method):
    assert method_for(settings, config=config) == method


MAPPED = ["query=q", "contexts=found", "contexts.text=body", "contexts.id=key"]


@pytest.mark.parametrize("columns", list(permutations(MAPPED)))
def test_columns_mean_the_same_in_any_order_and_any_command(columns):
    mapping = {"query": "q", "contexts": {"path": "found", "text": "body", "id": "key"}}
    raw = {"runner": "fake", "input": "a.jsonl"}
    config, _ = config_of(raw, "config", pairs_of("columns", "input.columns", columns))
    assert config.input.columns.given == mapping
    assert input_of("a.jsonl", list(columns)).columns.given == mapping


def test_a_saved_config_has_comments_and_means_the_same(tmp_path, questions):
    saved, schema = tmp_path / "c.yaml", tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    flags = [*FAKE, "-i", questions, "-o", tmp_path / "a.csv", "--include", "query", "--stop", "a: [b", "--stop", "#"]
    flags += ["--system", "Say: yes # no", "--schema", schema, "--columns", "query=q: x", "--save-config", saved]
    invoke("generate", *flags)
    config, _ = load_config(str(saved))
    assert config.prompt.system == "Say: yes # no"
    assert config.sampling.stop == ["a: [b", "#"]
    assert config.structured.json_schema == {"type": "object"}
    assert (config.input.columns.query, config.output.include) == ("q: x", ["query"])
    assert yaml.safe_load(saved.read_text())["structured"] == {"json_schema": str(schema)}
    assert "  # System prompt.\n  system:" in saved.read_text()


def test_a_saved_config_has_no_secret_and_replaces_nothing(tmp_path, questions, monkeypatch):
    saved = tmp_path / "c.yaml"
    flags = [*FAKE, "-i", questions, "-o", tmp_path / "a.jsonl", "--save-config", saved]
    flags += ["--set", "output.storage_options.token=hf_abcdefgh12345678"]
    assert invoke("generate", *flags).exit_code == 0
    assert "hf_abcdefgh12345678" not in saved.read_text()
    monkeypatch.setenv("RAGSPEC_OUTPUT_STORAGE_OPTIONS_TOKEN", "other")
    assert load_config(str(saved))[0].output.storage_options["token"] == "${RAGSPEC_OUTPUT_STORAGE_OPTIONS_TOKEN}"
    assert invoke("generate", *flags).exit_code == 0, "the same again"
    found = invoke("generate", *flags, "--temperature", 0.5)
    assert "already exists with other content" in str(found.exception)


def test_a_config_can_go_to_stdout(tmp_path, questions):
    flags = [*FAKE, "-i", questions, "--temperature", 0.5]
    done = invoke("generate", *flags, "-o", tmp_path / "a.jsonl", "--save-config", "-")
    assert yaml.safe_load(done.stdout)["sampling"] == {"temperature": 0.5}
    assert "answers also go to stdout" in str(invoke("generate", *flags, "--save-config", "-").exception)
    assert yaml.safe_load(invoke("init", "-", *flags).stdout)["output"] == "answers.jsonl"
    assert not list(tmp_path.glob("-"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_resumed_output_says_what_its_earlier_lines_lack(tmp_path, questions, name):
    run = ["generate", *FAKE, "-i", questions, "-o", tmp_path / name]
    assert invoke(*run, "--limit", 1).exit_code == 0
    said = [invoke(*run, "--include", "query").stderr for _ in range(2)]
    assert all("lines of an earlier run have no query; use --no-resume" in each for each in said)
    for how in ("--no-resume", "--resume"):
        assert "earlier" not in invoke(*run, "--include", "query", how).stderr
    assert "have no contexts" in invoke(*run, "--include", "query", "--include", "contexts").stderr


def test_an_error_of_a_config_shows_no_secret(tmp_path, questions):
    config = {"runner": "fake", "input": str(questions), "runner_args": {"hf_token": "supersecretvalue1"}}
    (tmp_path / "c.yaml").write_text(json.dumps(config | {"order": "supersecretvalue1"}))
    done = invoke("generate", "-c", tmp_path / "c.yaml")
    assert isinstance(done.exception, ConfigError)
    assert "supersecretvalue1" not in str(done.exception)


def test_a_config_of_init_runs(tmp_path, questions, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("init", *FAKE, "-i", questions, "-o", "a.csv").exit_code == 0
    assert invoke("generate", "-c", "ragspec.yaml").exit_code == 0
    with open("a.csv", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["1", "3"]
    assert str(invoke("init", *FAKE, "-i", questions).exception).startswith("ragspec.yaml: already exists")
    assert "--input: missing, and there is no terminal" in str(invoke("init", "new.yaml", *FAKE).exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model: missing; name a model"),
        (["--model", "nowhere/none"], 'model: "nowhere/none": is not a local folder'),
        (["--model", "demo", "--method", "none", "--draft-model", "x"], '"x" has no effect with method "none"'),
        ([*FAKE, "--temperature", "hot"], 'sampling.temperature: "hot" is not allowed: must be a valid number'),
        ([*FAKE, "--batch-size", "many"], 'runner_args.batch_size: "many" is not'),
        ([*FAKE, "--columns", "id"], '--columns: "id" is not FIELD=NAME'),
        ([*FAKE, "--include", "all"], "must be 'query' or 'contexts'"),
        ([*FAKE, "--index", "nowhere"], 'retrieval.index: "nowhere": no index there'),
        ([*FAKE, "-o", "a.jsnol"], "a.jsnol: cannot write .jsnol files; choose one of"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(tmp_path, questions, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    done = invoke("generate", "-i", questions, *flags)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_flags_that_contradict_the_config_are_one_line(tmp_path, questions):
    config = tmp_path / "c.yaml"
    config.write_text("runner: fake\nstructured: {regex: a+}\n")
    schema = write_jsonl(tmp_path / "schema.json", [{"type": "object"}])
    done = invoke("generate", "-c", config, "-i", questions, "--schema", schema)
    assert "the section has json_schema and regex; it takes exactly one key" in str(done.exception)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_types_in_words(flag):
    shown = invoke("generate", flag).output
    assert "METHOD" in shown
    assert not {"<bool>", "BOOLEAN", "FLOAT", "INTEGER"} & set(shown.split())


def test_a_shell_completes_methods_runners_and_cached_models(tmp_path, monkeypatch):
    from ragspec.cli.completion import complete_methods, complete_models, complete_runners

    (tmp_path / "models--Org--Some-Model").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert complete_models("Org") == ["Org/Some-Model"]
    assert complete_models("de") == ["demo"]
    assert complete_methods("conte") == ["context"]
    assert complete_runners("v") == ["vllm"]


@pytest.mark.parametrize(
    "command", ["ask", "benchmark", "doctor", "generate", "init", "run-batch", "train-draft", "tune", "verify"]
)
def test_every_command_that_knows_methods_takes_plugins(command):
    assert "--plugin" in invoke(command, "--help").output
