"""No secret of a config reaches a file, a message or a log; what runs still gets it."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ragspec.benchmark.plan import Candidate, make_plan
from ragspec.benchmark.tune import Tuned, write_config
from ragspec.config.load import build_config, load_config
from ragspec.config.redaction import Redactor, Secret, as_given, by_name, names_secret, redacted, revealed, secret_parts
from ragspec.errors import ConfigError, ModelError
from ragspec.outputs.folder import write_json
from ragspec.outputs.journal import Journal
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, wide

WORD = "correct horse battery"  # a secret by its key alone
SHAPED = "hf_QwErTyUiOpAsDfGhJkLz"  # by what it looks like alone


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "use_auth_token", "accessToken", "api_key", "apiKey", "x-api-key", "key"),
        *("aws_secret_access_key", "aws_access_key_id", "azure_storage_account_key", "client_secret", "password"),
        *("Authorization", "proxy-authorization", "credentials", "private_token", "api_keys", "hub_token", "auth"),
    ],
)
def test_a_secret_is_known_by_its_key(key):
    assert names_secret(key)
    assert isinstance(redacted({key: WORD})[key], Secret)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("num_tokens", 4),
            ("max_new_tokens", "many"),
            ("eos_token_id", 2),
            ("pad_token", "[PAD]"),
            ("unk_token", "x"),
        ),
        *(("tokenizer", "a/b"), ("tokenizer_mode", "slow"), ("token_ids", [1]), ("key_cache_dtype", "fp8")),
        *(
            ("num_key_value_heads", 2),
            ("keys_to_ignore", ["a"]),
            ("sort_key", "size"),
            ("keyword", "k"),
            ("author", "a"),
        ),
        *(("token", True), ("api_key_env", "NAME"), ("mask_token", "<mask>"), ("image_token", "<image>"), ("token", 7)),
        *(("model", "Qwen/Qwen2.5-7B"), ("dtype", "bfloat16"), ("url", "http://host:8000/v1"), ("load_format", "hf")),
    ],
)
def test_what_only_sounds_like_one_stays(key, value):
    assert redacted({key: value}) == {key: value}
    assert not isinstance(redacted({key: value})[key], Secret)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (SHAPED, SHAPED),
        ("sk-proj-abcdefgh1234", "sk-proj-abcdefgh1234"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("s3://who:pass-word@bucket/x", "who:pass-word"),
        ('{"hf_token": "plain words"}', "plain words"),
        ("Bearer abc.DEF-123456", "Bearer abc.DEF-123456"),
        ("https://host/x?api_key=abcd1234", "api_key=abcd1234"),
    ],
)
def test_a_secret_is_known_by_its_looks(text, part):
    assert part in secret_parts(text)
    value = redacted({"harmless": text})["harmless"]
    assert part not in value
    assert revealed(value) == text


HARMLESS = [
    # addresses, patterns and paths
    "s3://bucket/a.jsonl: cannot be listed (Unable to locate credentials: 's3://bucket/a.jsonl')",
    "gs://bucket/dir/*.parquet: no file matches",
    "credentials: 's3://bucket/part2024', open(token='https://host/b')",
    "https://host/a.csv?key=1&page=3: no such file",
    "az://container@account.blob.core.windows.net/a.jsonl",
    "ssh://user@host:22/path, git+ssh://git@github.com/x/y.git",
    "s3://my-secret-bucket/token=abcdefgh/part-0.parquet: no such file",
    "data/part?token=abcd*.jsonl: no file matches",
    "input: no file matches data/[a-z]*_key=*.jsonl",
    "/home/me/api_key=abcdefgh/part.jsonl: no such file",
    # regular expressions and templates
    "--refusal: not a regular expression: missing ) in 'token: \"([a-z]+)\"'",
    "not a regular expression: password: '(\\w+)' unterminated",
    "structured.regex: 'key=[0-9]+' cannot be compiled",
    "prompt.template: 'password: \"{{ query }}\"'",
    # a tokenizer's words, and those of parsers
    'eos_token: "<|endoftext|>" is not known, bos_token: \'<s>\', pad_token="[PAD]"',
    "jinja: expected token ':', got '}'; unexpected token: 'else'",
    "no terminal matches token: 'abcdef' at line 1",
    # YAML, keys, and English
    'c.yaml:3: not valid YAML: token: "abcdefgh"',
    'unknown key: "speculation.method"; duplicate key: "runner"',
    "JSON key: \"contexts\" must be a list; primary key: 'record_id'",
    'basic_auth: "required", auth: "none", cookie: "chocolate chip"',
    "Bearer authentication is needed by the bearer of good news",
    "sk-learn is not installed; sk-SNAPSHOT-model is not known",
    "hf_transfer is not installed; hf_hub_download_v2 failed; HF_HUB_OFFLINE is set",
    "Unable to locate credentials",
]


@pytest.mark.parametrize("message", HARMLESS)
def test_a_message_that_tells_no_secret_stays_as_it_is(message):
    assert Redactor()(message) == message


@pytest.mark.parametrize(
    ("message", "secret"),
    [
        ("401 for hf_abcDEFghijklmnopqrst", "abcDEF"),
        ("s3://key:secretvalue@host/a: no such file", "secretvalue"),
        ("Unable to use credentials: 's3://user:pw12345@host/x'", "pw12345"),
        ("https://b.s3.amazonaws.com/a?X-Amz-Signature=abcdef123456", "abcdef123456"),
        ("url: /a?X-Amz-Credential=AKIA/2024&Signature=abc~DEF%2F", "abc~DEF"),
        ("request('GET', api_key=\"correct horse\")", "correct"),
        ("{'password': '(hunter|2)'}", "hunter"),
        ('{"hf_token": "plain words"}', "plain"),
        ("password: 'hunter'", "hunter"),
        ("storage_options.token: 'abc123def456'", "abc123def456"),
        ("aws_secret_access_key: 'wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY'", "MDENG"),
        ("Authorization: Bearer abcdefghijklmnop", "abcdefghijklmnop"),
        ("sk-proj-abcdefgh12345678 and sk-ant-api03-AbCdEf_12345", "AbCdEf"),
        ("AccountKey=abcdEFGH1234==;", "abcdEFGH"),
    ],
)
def test_a_message_that_tells_one_does_not_any_more(message, secret):
    assert secret not in Redactor()(message)


def test_an_address_and_what_is_in_it_are_shown_but_for_the_login():
    told = Redactor({"path": "s3://bucket/a"})("s3://who:pass-word@bucket/x/*.jsonl: cannot be listed")
    assert told == "s3://[secret]@bucket/x/*.jsonl: cannot be listed"


def test_a_short_secret_hides_no_part_of_a_word():
    redactor = Redactor(redacted({"secret": "test"}))
    assert redactor("the latest tests: test, 'test'") == "the latest tests: [secret], '[secret]'"


def test_words_of_a_schema_or_a_template_are_no_secrets(tmp_path):
    """A property called password has a type, which is no secret."""
    properties = {"password": {"type": "string"}, "api_key": {"type": "strin"}}
    raw = {"runner": "fake", "structured": {"json_schema": {"type": "object", "properties": properties}}}
    (tmp_path / "c.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as error:
        load_config(str(tmp_path / "c.json"))
    assert "[secret]" not in str(error.value)


def vllm_config(**change):
    """Return a config with a secret in every place that takes what a library calls whatever it likes."""
    raw = {
        "model": "m",
        "runner": "vllm",
        "input": "x",
        "speculation": {
            "method": "speculative_config",
            "speculative_config": {"method": "ngram", "hf_token": WORD},
            "extra": {"deep": [{"secret": WORD}]},
        },
        "retrieval": {"index": f"s3://{WORD.replace(' ', '')}:pw@bucket/i", "storage_options": {"region": SHAPED}},
        "runner_args": {
            **{"hf_token": WORD, "generation_config": SHAPED, "sampling_args": {"extra_args": {"password": WORD}}},
            "model_loader_extra_config": {"headers": {"Authorization": WORD}, "credentials": {"user": WORD}},
        },
    }
    return build_config(raw | change)


def test_a_dumped_config_holds_no_secret_wherever_it_stood():
    config = vllm_config()
    for shown in (json.dumps(config.model_dump(mode="json")), repr(config), json.dumps(config.identity())):
        for secret in (WORD, WORD.replace(" ", ""), SHAPED):
            assert secret not in shown
    assert config.retrieval.index.endswith("@bucket/i"), "the address is still to be recognised"
    assert revealed(config.args().model_extra["hf_token"]) == WORD
    assert revealed(config.args().sampling_args) == {"extra_args": {"password": WORD}}


def test_a_config_survives_the_way_to_another_process():
    config = vllm_config()
    again = build_config(json.loads(json.dumps(config.as_given())))
    assert again.as_given() == config.as_given()
    assert again.identity() == config.identity()
    (candidate,) = make_plan(config, ["speculative_config"])
    assert candidate.config.as_given()["runner_args"] == config.as_given()["runner_args"]


def test_a_resumed_run_notices_another_secret_and_names_none(tmp_path):
    path = str(tmp_path / "out.jsonl")
    one, two = vllm_config(), vllm_config(runner_args={"hf_token": "another one"})
    with Journal(path, one.identity()) as journal:
        journal.put(0, {"id": "a"})
    with Journal(path, vllm_config().identity()):
        pass
    with pytest.raises(ConfigError, match=r"hf_token: was \"secret:|generation_config: was \"secret:") as caught:
        Journal(path, two.identity())
    assert WORD not in str(caught.value)
    assert WORD not in (tmp_path / "out.run.json").read_text()


def test_an_environment_variable_stands_for_a_secret(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", WORD)
    args = {"model_args": {"token": "${MY_TOKEN}", "headers": {"Authorization": "Bearer ${MY_TOKEN}"}}}
    config = build_config({"model": "m", "runner_args": args})
    assert config.model_dump(mode="json")["runner_args"] == args
    assert config.as_given()["runner_args"] == args
    assert revealed(config.args().model_args)["token"] == WORD
    assert revealed(config.args().model_args)["headers"] == {"Authorization": f"Bearer {WORD}"}
    assert WORD not in config.redactor()(f"401 for {WORD}")
    monkeypatch.delenv("MY_TOKEN")
    message = r"runner_args\.model_args\.token: \$\{MY_TOKEN\}: this environment variable is not set"
    with pytest.raises(ConfigError, match=message):
        build_config({"model": "m", "runner_args": args})


def test_a_password_may_hold_what_looks_like_a_variable():
    config = redacted({"password": "a${b}c"})
    assert config["password"].startswith("secret:")
    assert revealed(config) == {"password": "a${b}c"}


def test_a_hash_of_a_secret_is_not_taken_for_the_secret():
    shown = vllm_config().model_dump(mode="json")["runner_args"]
    with pytest.raises(ConfigError, match=r"runner_args\.hf_token is a placeholder for a secret that was not saved"):
        vllm_config(runner_args={"hf_token": shown["hf_token"]})


def test_an_object_stores_secrets_may_come_by_name_only(monkeypatch):
    monkeypatch.setenv("MY_KEY", WORD)
    options = {"aws_secret_access_key": "${MY_KEY}"}
    config = vllm_config(retrieval={"index": "s3://b/i", "storage_options": options})
    assert revealed(config.retrieval.storage_options) == {"aws_secret_access_key": WORD}
    with pytest.raises(ConfigError, match="do not put an object store's secrets into a config") as caught:
        vllm_config(retrieval={"index": "s3://b/i", "storage_options": {"aws_secret_access_key": WORD}})
    assert WORD not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"model: m\nrunner: vllm\nrunner_args: {{hf_token: {WORD}, batch_size: {{hf_token: {WORD}}}}}",
        f"model: m\nspeculation: {{extra: {SHAPED}}}",
        f"model: m\nrunner_args: {{model_args: 'token={SHAPED}'}}",
        f"model: m\nrunner_args: {{num_gpus: {{password: {WORD}}}}}",
        f"generator_model_name: m\ngenerator_model_platform_args: {{hf_model_params: {SHAPED}}}",
        f"generator_model_name: m\ngenerator_model_platform: {SHAPED}",
        f"model: https://user:{SHAPED}@host/m\nrunner_args: 3",
        f"model: m\nmodel_args: {{token: {WORD}}}",
    ],
)
def test_a_config_that_is_refused_shows_no_secret(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert WORD not in str(caught.value)
    assert SHAPED not in str(caught.value)


def test_an_override_that_is_refused_shows_no_secret(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: m")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), [f"model.token={WORD}"])
    assert WORD not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        f"401 for {WORD}",
        f"bad value [input_value='{WORD[:10]}...{WORD[-9:]}']",  # as pydantic cuts it short
        f"cut off: {WORD[:-3]}",
        "no config: hf_0123456789ABCDEF",
    ],
)
def test_what_a_library_says_of_its_arguments_is_veiled(said):
    redactor = Redactor(redacted({"password": WORD}))
    assert "horse" not in redactor(said)
    assert "battery" not in redactor(said)
    assert "0123456789" not in redactor(said)
    with pytest.raises(ModelError) as caught, redactor.over_errors():
        raise ModelError(f"could not: {said}") from ValueError(said)
    assert "horse" not in str(caught.value)
    assert caught.value.__cause__ is None, "a traceback would show it"
    with pytest.raises(ModelError, match="ValueError"), redactor.over_errors():
        raise ValueError(said)


def test_an_error_without_secrets_passes_as_it_is():
    error = KeyError("nothing secret here")
    with pytest.raises(KeyError) as caught, Redactor(redacted({"password": WORD})).over_errors():
        raise error
    assert caught.value is error


def test_a_written_config_names_an_environment_variable_in_the_place_of_a_secret(tmp_path, monkeypatch):
    config = build_config(
        {"model": "m", "input": "x", "runner_args": {"model_args": {"token": WORD, "other": SHAPED}, "batch_size": 2}}
    )
    path = tmp_path / "tuned.yaml"
    write_config(Tuned(Candidate("none", config), ["none: 1"], "none is chosen"), path, "a sample")
    text = path.read_text()
    assert WORD not in text
    assert SHAPED not in text
    name = "RAGSPEC_RUNNER_ARGS_MODEL_ARGS_TOKEN"
    assert f"#   {name}: the value of runner_args.model_args.token" in text
    with pytest.raises(ConfigError, match="this environment variable is not set"):
        load_config(str(path))
    monkeypatch.setenv(name, WORD)
    monkeypatch.setenv("RAGSPEC_RUNNER_ARGS_MODEL_ARGS_OTHER", SHAPED)
    again, _ = load_config(str(path))
    assert revealed(again.args().model_args) == {"token": WORD, "other": SHAPED}
    assert yaml.safe_load(text)["runner_args"]["batch_size"] == 2
    assert by_name(redacted({"token": "${A}"}), "", {}) == {"token": "${A}"}


def test_what_is_written_of_a_run_is_its_owners(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    path.chmod(0o644)
    write_json(path, {"a": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_json(tmp_path / "new" / "y.json", {})
    assert stat.S_IMODE((tmp_path / "new" / "y.json").stat().st_mode) == 0o600


# every worker, and the run itself, says its token on stderr; every draft is accepted unseen, so that there are bugs
LOUD = """
import sys
import transformers
from ragspec.engine import acceptance
acceptance.agreement = lambda draft, chosen: len(draft)
load = transformers.AutoModelForCausalLM.from_pretrained
def loud(*args, **kwargs):
    for key in ("token", "proxies"):
        assert kwargs.pop(key)
    if "worker" in sys.argv[0]:
        print("loading with", TOKENS, file=sys.stderr)
    return load(*args, **kwargs)
transformers.AutoModelForCausalLM.from_pretrained = loud
"""


@pytest.fixture
def secretive(tiny, tmp_path):
    """A config with secrets, and an environment in which loading a model tells them."""
    args = {"model_args": {"token": WORD, "proxies": {"http": f"http://me:{SHAPED}@proxy:80"}}}
    config = {
        **{"model": str(tiny), "input": str(SAMPLE), "output": str(tmp_path / "run" / "out.jsonl")},
        **{"sampling": {"max_new_tokens": 8}, "prompt": {"max_prompt_tokens": 200}, "runner_args": args},
        "speculation": {"method": "prompt_lookup", "num_tokens": 4},
    }
    (tmp_path / "c.json").write_text(json.dumps(config))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LOUD.replace("TOKENS", repr(f"{WORD} and {SHAPED}")))
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return tmp_path / "c.json", {**os.environ, "PYTHONPATH": path}


def told(folder):
    """Return the files under `folder` that hold a secret, and those that others may read."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    loose = [path.name for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077]
    return [path for path in files if WORD in path.read_text() or SHAPED in path.read_text()], set(loose)


COMMANDS = {
    "generate": ["generate", "--limit", "2"],
    "benchmark": ["benchmark", "--limit", "2", "--repeat", "1", "-o", "run"],
    "verify": ["verify", "--limit", "2", "-o", "run"],
    "tune": ["tune", "--limit", "1", "--budget", "1", "-o", "run/tuned.yaml"],
}


@pytest.mark.parametrize(
    "command",
    ["generate", *wide("benchmark"), *(pytest.param(name, marks=pytest.mark.long) for name in ("verify", "tune"))],
)
def test_no_command_writes_or_says_a_secret(secretive, tmp_path, command):
    config, environment = secretive
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", *COMMANDS[command], "-c", config],
        **{"capture_output": True, "text": True, "env": environment, "cwd": tmp_path},
    )
    assert done.returncode == (1 if command == "verify" else 0), done.stderr
    assert WORD not in done.stderr
    assert SHAPED not in done.stderr
    held, loose = told(tmp_path / "run")
    assert held == []
    # answers are for whoever the user's umask says
    assert loose <= {"out.jsonl", "none.jsonl", "prompt_lookup.jsonl"}
    if command == "benchmark":
        log = (tmp_path / "run" / "logs" / "none.log").read_text()
        assert "loading with [secret] and [secret]" in log
        configs = json.loads((tmp_path / "run" / "results.json").read_text())["configs"]
        assert configs["none"]["runner_args"]["model_args"]["token"].startswith("secret:")
    if command == "verify":
        assert list((tmp_path / "run" / "bugs").iterdir())


@pytest.mark.wide
def test_a_model_that_does_not_load_shows_no_secret(tmp_path, tiny, monkeypatch):
    """An error line, stderr and a traceback with --debug."""
    (tmp_path / "sitecustomize.py").write_text(
        "import transformers\ndef fail(*args, token=None, **kwargs): raise OSError(f'403 with {token}')\n"
        "transformers.AutoModelForCausalLM.from_pretrained = fail\n"
    )
    config = {"model": str(tiny), "input": str(SAMPLE), "runner_args": {"model_args": {"token": WORD}}}
    (tmp_path / "c.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for more in ([], ["--debug"]):
        done = ragspec("generate", "-c", tmp_path / "c.json", *more, env=environment)
        assert "cannot be loaded" in done.stderr
        assert "403 with [secret]" in done.stderr
        assert WORD not in done.stderr


def test_as_given_is_what_was_given():
    given = {"a": [{"token": WORD}], "b": "${X}", "c": 3}
    assert as_given(redacted(given)) == given


@pytest.mark.parametrize("text", ["a." * 200_000, "sk-" + "a-" * 200_000])  # hours, if it grew with the square
def test_a_long_message_is_searched_at_once(text):
    assert Redactor({})(text) == text
