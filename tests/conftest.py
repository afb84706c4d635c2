"""What the tests need and which of them are fast; tiny real models, built here from configs, and the demo model."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # test processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util
import inspect
import json
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing about the code
settings.load_profile("any machine")

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SAMPLE = ROOT / "sample_data" / "questions.jsonl"


# What a test needs beyond Python, told from the fixtures that it asks for; a test that brings it otherwise says so.
BRINGS = {
    "demo": {"demo", "demo_draft"},
    "ray": {"cluster", "address"},
    "slow": {"tiny", "tiny_draft", "tiny_padded", "tiny_stranger", "tiny_gpt2", "s3", "place", "judged", "thinker"},
}
# folders and files whose tests run models; `make test-fast` names what else takes long
SLOW = ("audit/", "engine/", "training/", "models/test_weights.py", "models/test_control_tokens.py")
SLOW_PATHS = tuple(f"tests/{path}" for path in SLOW)
NEEDS = ("vllm", "ray", "demo", "slow", "wide", "long")
IMPORTED = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "ray")}
STARTING = {"subprocess", "multiprocessing", "fork", "warm"}  # what a function that starts a process names
brought = set()  # what this process has imported so far, of IMPORTED
COMPILERS = {"g++", "c++", "clang++"}
started = []  # the processes that the current test has started


def pytest_configure(config):
    """Leave out the longest tests unless they are asked for; see which processes are started."""
    if not config.option.markexpr:
        config.option.markexpr = "not long"
    sys.addaudithook(note_process)


def note_process(event, given):
    """Note a process that is started, except the compiler: drafters ask for it, once in all tests."""
    if event in ("subprocess.Popen", "os.fork") and Path(str(given[0] if given else "")).name not in COMPILERS:
        started.append(given[:1])


def pytest_ignore_collect(collection_path, config):
    """Do not even read, for the fast tests, what has none of them."""
    slow = config.option.markexpr == "fast" and collection_path.relative_to(ROOT).as_posix().startswith(SLOW_PATHS)
    return True if slow else None


def pytest_itemcollected(item):
    """Mark a test by what it needs; `fast` is one that needs nothing."""
    asked, path = set(item.fixturenames), item.path.relative_to(TESTS).as_posix()
    for name, fixtures in BRINGS.items():
        if asked & fixtures:
            item.add_marker(name)
    if path.startswith(SLOW) or starts_processes(item.function):
        item.add_marker("slow")
    if not any(item.get_closest_marker(name) for name in NEEDS):
        item.add_marker("fast")


@cache
def starts_processes(function):
    """Return whether a function of the tests starts processes: by what it names, and what is named there."""
    known, coming = {function}, [function]
    while coming:
        now = coming.pop()
        code, names = [now.__code__], set()
        while code:
            names.update((found := code.pop()).co_names)
            code += [each for each in found.co_consts if inspect.iscode(each)]
        if names & STARTING:
            return True
        named = {one for name in names if inspect.isfunction(one := now.__globals__.get(name))} - known
        coming += [one for one in named if one.__module__.startswith("tests")]
        known |= named
    return False


def pytest_collection_modifyitems(items):
    """Begin with the files whose tests take longest: one that came last would leave the other core idle."""
    ranks = {}
    for item in items:
        rank = next((n for n, name in enumerate(NEEDS) if item.get_closest_marker(name)), len(NEEDS))
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


def pytest_runtest_setup(item):
    """Skip what needs a package that is not here."""
    started.clear()
    for name, there in IMPORTED.items():
        if not there and item.get_closest_marker(name):
            pytest.skip(f"{name} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Keep the marks true: what is `fast` imports neither vLLM nor Ray, and starts no process."""
    yield
    new = {name for name in IMPORTED if name in sys.modules} - brought
    brought.update(new)
    if item.get_closest_marker("fast"):
        assert not new, f"this test imports {new}: mark it so"
        assert not started, f"this test starts {started}: mark it pytest.mark.slow"


def wide(*values):
    """Return parameters of a test that has others of the kind in `make test`; these are tried in `make test-all`."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.wide) for value in values
    ]


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
