"""Tiny real models, built here from configs, and the demo model."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # test processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing about the code
settings.load_profile("any machine")

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "sample_data" / "questions.jsonl"


def pytest_collection_modifyitems(items):
    """Leave out what has a shorter test beside it, so that all others take less than half an hour.

    Files with tests of vLLM come first: they take longest, and one that came last would leave the other core idle.
    """
    slow = {item.path for item in items if item.get_closest_marker("vllm")}
    items.sort(key=lambda item: item.path not in slow)
    if "RAGSPEC_LONG" not in os.environ:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make test-long"))


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def train_tokenizer(vocab_size, texts):
    """Return a byte-level BPE tokenizer of exactly `vocab_size` tokens, learnt from `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    assert inner.get_vocab_size() == vocab_size
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")


def save_llama(folder, tokenizer, *, vocab_size=None, seed=0, layers=2, hidden=32, tied=False):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,  # so that the next token is no tie
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_gpt2(folder, tokenizer, seed=1, positions=512):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=positions,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def sample_texts():
    return [passage["text"] for record in read_jsonl(SAMPLE) for passage in record["contexts"]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, sample_texts):
    """A random two-layer Llama in float32 with a tokenizer of 400 tokens."""
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", train_tokenizer(400, sample_texts))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory, sample_texts):
    """Another random Llama with the same tokenizer."""
    return save_llama(tmp_path_factory.mktemp("models") / "draft", train_tokenizer(400, sample_texts), seed=7, layers=1)


@pytest.fixture(scope="session")
def tiny_padded(tmp_path_factory, sample_texts):
    """The tiny model's tokenizer with padded embeddings: another vocab_size, the same tokens."""
    tokenizer = train_tokenizer(400, sample_texts)
    return save_llama(tmp_path_factory.mktemp("models") / "padded", tokenizer, vocab_size=448, seed=7)


@pytest.fixture(scope="session")
def tiny_stranger(tmp_path_factory, sample_texts):
    """The same vocab_size, other tokens: what transformers takes for a match."""
    tokenizer = train_tokenizer(400, [text[::-1] for text in sample_texts])
    return save_llama(tmp_path_factory.mktemp("models") / "stranger", tokenizer, seed=9)


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory, sample_texts):
    """A GPT-2 with a tokenizer of its own, of 300 tokens, trained on the sample text."""
    return save_gpt2(tmp_path_factory.mktemp("models") / "gpt2", train_tokenizer(300, sample_texts), positions=2048)


@pytest.fixture(scope="session")
def demo():
    """The folder of the real demo model."""
    from ragspec.models.resolve import resolve

    return resolve("demo").path


@pytest.fixture(scope="session")
def demo_draft(demo, tmp_path_factory):
    """A draft cut from the demo model's own first layers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "demo-first-layers"
    model = AutoModelForCausalLM.from_pretrained(demo)
    model.model.layers = model.model.layers[:6]
    model.config.num_hidden_layers = 6
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:6]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def s3():
    """The address of an S3 server on this machine, with a bucket "box"."""
    from tests.stores import s3_server

    with s3_server() as address:
        yield address
