"""Prefixes kept on disk: the bits of a run without them, whatever happens to the files."""

import json
import os
import random
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragspec.benchmark.worker import without_store
from ragspec.config.load import build_config
from ragspec.engine import stored_prefixes
from ragspec.engine.backends.graphs import emulated
from ragspec.engine.backends.paged_attention import gathered
from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv import prefix_store
from ragspec.engine.kv.budget import KvBudget
from ragspec.engine.kv.prefix_store import Damaged, Prefix, PrefixStore, chained
from ragspec.engine.model import loaded as prepared
from ragspec.engine.model.fingerprint import fingerprint, weights_digest
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.notes import Notes
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.engine.stored_prefixes import StoredPrefixes
from ragspec.errors import ConfigError
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Failure, Request, Sampling
from ragspec.runners import module
from ragspec.speculation.drafters.context import ContextDrafter
from tests.conftest import train_tokenizer, wide
from tests.engine.test_compiled import COMPILER
from tests.engine.test_counts import run
from tests.engine.test_engine_models import build

UNIT = 32
MANY = 10**9


is_slow = StoredPrefixes._is_slow  # noqa: SLF001


@pytest.fixture(autouse=True)
def short_units(monkeypatch):
    for each in (prefix_store, stored_prefixes):
        monkeypatch.setattr(each, "UNIT", UNIT)
    monkeypatch.setattr(prefix_store, "SPARE", 0)
    monkeypatch.setattr(StoredPrefixes, "_is_slow", lambda self: False)  # tiny models compute faster than disks read


def texts(new=10, tails=range(1, 12, 3), **sampling):
    """Return requests over three long texts, two of which begin alike, in an order that mixes them."""
    rng = random.Random(5)
    first, second, third = ([rng.randrange(3, 200) for _ in range(count)] for count in (203, 150, 71))
    heads = [first, first[:130] + second, third]
    found = []
    for tail in tails:
        for head in heads:
            prompt = [*head, *(rng.randrange(3, 200) for _ in range(tail))]
            found.append(Request(len(found), f"q{len(found)}", prompt, Sampling(max_new_tokens=new, **sampling)))
    return found


class Run:
    """One run of the engine, with a store unless folder is None."""

    def __init__(self, model, words, requests, folder, *, rows=3, proposer=None, root=None, most=MANY, room=None):
        model.resize(rows)
        self.notes = Notes()
        self.stored = None
        if folder is not None:
            store = PrefixStore(Path(folder), most)
            self.stored = StoredPrefixes(store, root or fingerprint(model), model, self.notes)
        settings = EngineSettings(stored=self.stored, room=room or KvBudget())
        self.engine = Engine(model, proposer or NoProposer(), words, frozenset(), settings)
        outcomes = list(self.engine.run(iter(requests)))
        if self.stored is not None:
            self.stored.close(finish=True)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        self.outcomes = {outcome.index: outcome for outcome in outcomes}
        self.computed = self.engine.clock.prompt_tokens

    @property
    def tokens(self):
        """Tokens alone."""
        return {index: one.token_ids for index, one in sorted(self.outcomes.items())}

    @property
    def answers(self):
        """Tokens and log-probabilities, to the bit."""
        return {index: (one.token_ids, one.logprobs) for index, one in sorted(self.outcomes.items())}


def in_one_piece(words, family="llama-heads-of-16"):
    return prepared.prepare(build(family, words))


def torchs_own(words, family="llama-heads-of-16"):
    return prepared.prepare(build(family, words), native=False, attention="sdpa")


def in_blocks(words, family="llama-heads-of-16"):
    return Model(build(family, words), 3, None, gathered, emulated)


def exact(words, family="llama-heads-of-16"):
    return Model(build(family, words), 3, None, gathered, emulated, exact=True)


# -- bits --------------------------------------------------------------------------------------------------------------


@COMPILER
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (in_one_piece, 1),
        (in_one_piece, 3),
        (torchs_own, 3),
        (in_blocks, 3),
        (exact, 2),
        *wide(*((make, rows) for make in (in_one_piece, torchs_own, in_blocks, exact) for rows in (1, 2, 4, 8))),
    ],
)
def test_answers_are_those_of_a_run_without_a_store(words, tmp_path, make, rows):
    """To the bit where bits do not depend on what else a step computes, elsewhere but for rounding."""
    some = texts(new=2, tails=(1, 7), logprobs=3) if make is exact else texts(logprobs=3)
    model = make(words)
    without = Run(model, words, some, None, rows=rows)
    first = Run(model, words, some, tmp_path, rows=rows)
    second = Run(model, words, some, tmp_path, rows=rows)
    assert first.answers == without.answers
    if make is exact:
        assert second.answers == without.answers
    assert second.tokens == without.tokens
    for index, one in second.outcomes.items():
        other = without.outcomes[index]
        found, expected = ([token.logprob for token in each.logprobs] for each in (one, other))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert first.computed + first.stored.loaded_tokens == without.computed
    assert first.stored.stored_tokens > 0
    assert second.stored.stored_tokens == 0 < second.stored.loaded_tokens
    assert second.computed + second.stored.loaded_tokens == without.computed
    cached = [sum(one.cached_prompt_tokens for one in run.outcomes.values()) for run in (without, second)]
    assert cached[1] == cached[0] + second.stored.loaded_tokens


@pytest.mark.parametrize("make", [pytest.param(in_one_piece, marks=COMPILER), torchs_own, in_blocks])
def test_a_prefix_from_disk_has_the_bits_of_one_from_another_row(words, tmp_path, make):
    model = make(words)
    head, question = (request.token_ids for request in texts()[:2])
    whole = head[: 3 * UNIT]
    asked = Request(1, "asked", [*whole, *question[-40:]], Sampling(max_new_tokens=20, logprobs=3))
    before = Request(0, "before", [*whole, 1, 2], Sampling(max_new_tokens=1))  # grouped by tokens, it comes first
    other = replace(before, index=2, id="other", token_ids=[*whole, 1, 3])
    shared = Run(model, words, [before, asked], None, rows=1)
    Run(model, words, [before, other], tmp_path, rows=1)
    alone = Run(model, words, [asked], tmp_path, rows=1)
    assert shared.outcomes[1].cached_prompt_tokens == alone.outcomes[1].cached_prompt_tokens == len(whole)
    assert alone.answers[1] == shared.answers[1]


@pytest.mark.parametrize("family", ["gemma2", "phi3", *wide("gpt2", "mistral-sliding", "gemma3-sliding", "opt")])
def test_windows_and_caps_are_served_too(words, tmp_path, family):
    model, some = in_one_piece(words, family), texts()
    without, _, second = (Run(model, words, some, folder) for folder in (None, tmp_path, tmp_path))
    assert second.stored.loaded_tokens > 0
    assert second.tokens == without.tokens


def test_what_is_read_back_is_what_was_computed(words, tmp_path):
    model = in_one_piece(words)
    prompt = texts()[0].token_ids
    model.resize(2)
    model.logits([Segment(0, 0, 100, alone=True)], prompt[:100], [99])
    row, names = 0, chained(b"root", prompt)
    kept = model.cache.read(row, UNIT, 2 * UNIT)
    store = PrefixStore(tmp_path, MANY)
    assert store.put(names[1], Prefix(kept, 0.5))
    found = store.get(names[1])
    assert found.seconds_per_token == 0.5
    assert all(torch.equal(one, other) for one, other in zip(kept, found.tensors, strict=True))
    model.resize(2)  # an empty cache, whose layers are those of the file
    model.cache.reserve(3 * UNIT)
    model.cache.fill(1, UNIT, found.tensors)
    again = model.cache.read(1, UNIT, 2 * UNIT)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@pytest.mark.parametrize("make", [in_one_piece, in_blocks])
def test_drafts_change_nothing(words, tmp_path, make):
    model, some = make(words), texts(new=10, tails=(1, 7))
    without = Run(model, words, some, None)
    for _ in range(2):
        run = Run(model, words, some, tmp_path, proposer=RowProposer(ContextDrafter(), 4, None))
        assert run.tokens == without.tokens
    assert run.stored.loaded_tokens > 0


def test_longer_prompts_share_the_files_of_shorter_ones(tmp_path):
    one, other = chained(b"model", range(100)), chained(b"model", [*range(70), *range(200)])
    assert (len(one), len(other)) == (3, 8)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert not set(one) & set(chained(b"another", range(100)))
    assert len(set(chained(b"model", [7] * 320))) == 10  # the same tokens at another place are another file


def test_prompts_of_other_frequencies_share_nothing(tmp_path, sample_texts):
    from tests.engine.test_limits import dynamic_llama

    words = HFTokenizer(train_tokenizer(300, sample_texts))
    model = prepared.prepare(dynamic_llama())
    vocabulary = model.inner.config.vocab_size
    some = texts(tails=(1, 1, 9, 9))
    some = [replace(one, token_ids=[token % vocabulary for token in one.token_ids]) for one in some]
    without, _, second = (Run(model, words, some, folder, rows=2) for folder in (None, tmp_path, tmp_path))
    assert second.stored.loaded_tokens > 0
    assert second.tokens == without.tokens


# -- keys --------------------------------------------------------------------------------------------------------------


def test_another_model_type_or_machine_finds_nothing(words, monkeypatch):
    inner = build("llama-heads-of-16", words)
    digest = weights_digest(inner)
    model = Model(inner, 2)
    known = {fingerprint(model, digest)}

    def other(found):
        assert found not in known
        known.add(found)

    assert fingerprint(Model(inner, 5), digest) in known  # the number of rows does not count
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:  # vLLM, once loaded in this process, keeps torch from changing the number
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        other(fingerprint(model, digest))
    other(fingerprint(Model(inner, 2, None, gathered, emulated), digest))
    other(fingerprint(Model(inner, 2, None, gathered, emulated, exact=True), digest))
    model.compiled = object()
    other(fingerprint(model, digest))
    model.compiled = None
    with monkeypatch.context() as patch:
        patch.setattr("ragspec.engine.model.fingerprint.version", lambda name: f"{name} 99")
        other(fingerprint(model, digest))
    inner.config.rope_parameters["rope_theta"] = 5.0
    other(fingerprint(model, digest))
    other(fingerprint(model, digest, "another file"))
    other(fingerprint(prepared.prepare(build("llama-heads-of-16", words)), digest))  # kernels, packed weights
    inner.to(torch.bfloat16)
    other(fingerprint(model, digest))
    assert weights_digest(inner) != digest
    changed = build("llama-heads-of-16", words)
    assert weights_digest(changed) == digest
    next(changed.parameters()).data.view(-1)[0] += 1
    assert weights_digest(changed) != digest


@pytest.mark.parametrize("what", ["weights", "dtype"])
def test_a_run_of_another_model_loads_nothing(words, tmp_path, what):
    model, some = Model(build("llama-heads-of-16", words), 3), texts()
    Run(model, words, some, tmp_path, root=fingerprint(model, weights_digest(model.inner)))
    inner = build("llama-heads-of-16", words)
    if what == "weights":
        inner.model.embed_tokens.weight.data[3:] *= -1
    else:
        inner.to(torch.bfloat16)
    model = Model(inner, 3)
    without = Run(model, words, some, None)
    run = Run(model, words, some, tmp_path, root=fingerprint(model, weights_digest(inner)))
    assert run.stored.loaded_tokens == 0 < run.stored.stored_tokens
    assert run.tokens == without.tokens


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def header(content):
    """Return the bytes that a file's header has."""
    return 8 + int.from_bytes(content[:8], "little")


def edited(content, what):
    """Return a file whose header says something else."""
    about = json.loads(content[8 : header(content)])
    what(about)
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text + content[header(content) :]


DAMAGE = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:20],
    "cut": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\0",
    "first bit of the length": lambda content: flip(content, 0),
    "last byte of the length": lambda content: flip(content, 7),
    "a bit of the header": lambda content: flip(content, 40),
    "a bit of the first number": lambda content: flip(content, header(content)),
    "a bit in the middle": lambda content: flip(content, (header(content) + len(content)) // 2),
    "the last bit": lambda content: flip(content, len(content) - 1),
    "zeros": lambda content: bytes(len(content)),
    "other type": lambda content: content.replace(b'"F32"', b'"I32"'),
    "other names": lambda content: edited(content, lambda about: about.update({"00000": about["00001"]})),
    "no metadata": lambda content: edited(content, lambda about: about.pop("__metadata__")),
    "no hash": lambda content: edited(content, lambda about: about["__metadata__"].pop("digest")),
    "other speed": lambda content: content.replace(b'seconds_per_token\\": ', b'seconds_per_token\\": 9'),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_found_and_deleted(tmp_path, how):
    store = PrefixStore(tmp_path, MANY)
    (name,) = chained(b"root", range(UNIT))
    store.put(name, Prefix([torch.randn(2, UNIT, 8), torch.randn(2, UNIT, 8)], 0.25))
    path = tmp_path / name
    content = path.read_bytes()
    damaged = DAMAGE[how](content)
    assert damaged != content
    path.write_bytes(damaged)
    with pytest.raises(Damaged):
        store.get(name)
    assert not path.exists()
    assert store.get(name) is None


def test_no_bit_of_a_file_may_change(tmp_path):
    store = PrefixStore(tmp_path, MANY)
    (name,) = chained(b"root", range(UNIT))
    kept = Prefix([torch.randn(1, UNIT, 2), torch.randn(1, UNIT, 1)], 0.25)
    store.put(name, kept)
    path = tmp_path / name
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(flip(content, at))
        try:
            found = store.get(name)
        except Damaged:
            continue
        assert at < header(content)  # a space between its words, or a name that leaves the order as it was
        assert found.seconds_per_token == kept.seconds_per_token
        assert all(torch.equal(one, other) for one, other in zip(found.tensors, kept.tensors, strict=True))


@pytest.mark.parametrize("which", ["first", "middle", "all", "swapped"])
def test_what_a_damaged_file_held_is_computed_again(words, tmp_path, which):
    model, some = in_one_piece(words), texts()
    without = Run(model, words, some, None)
    Run(model, words, some, tmp_path)
    files = sorted(tmp_path.iterdir())
    if which == "swapped":  # whole files, of other tokens
        one, other = files[0].read_bytes(), files[1].read_bytes()
        files[0].write_bytes(other)
        files[1].write_bytes(one)
    for at, path in enumerate(files):
        if which == "all" or (which, at) in (("first", 0), ("middle", len(files) // 2)):
            path.write_bytes(flip(path.read_bytes(), path.stat().st_size - 5))
    second = Run(model, words, some, tmp_path)
    assert second.tokens == without.tokens
    assert second.stored.damaged > 0
    assert sum("damaged" in note for note in second.notes) == 1
    for _ in files:  # it is written again, and what follows it seen then
        third = Run(model, words, some, tmp_path)
        assert third.tokens == without.tokens
    assert (third.stored.damaged, third.stored.stored_tokens) == (0, 0)
    assert sorted(tmp_path.iterdir()) == files


# -- room --------------------------------------------------------------------------------------------------------------


def small(seed=0):
    return Prefix([torch.full((1, UNIT, 8), float(seed))], 0.1)


def test_least_recently_used_files_go_first_and_ends_before_beginnings(tmp_path):
    store = PrefixStore(tmp_path, MANY)
    one, other = chained(b"one", range(3 * UNIT)), chained(b"other", range(3 * UNIT))
    for name in [*one, *other]:
        store.put(name, small())
    size = (tmp_path / one[0]).stat().st_size
    foreign = tmp_path / "notes.safetensors"
    foreign.write_bytes(bytes(10 * size))
    for names in (other, one):  # `one` was used last
        store.touch(names)
    store = PrefixStore(tmp_path, 5 * size + 5)
    (new,) = chained(b"new", range(UNIT))
    store.put(new, small())
    assert {path.name for path in tmp_path.iterdir()} == {*one, other[0], new, foreign.name}


def test_a_full_store_never_has_more_than_it_may(words, tmp_path):
    model, some = in_one_piece(words), texts()
    without = Run(model, words, some, None)
    Run(model, words, some, tmp_path)
    files = sorted(path.stat().st_size for path in tmp_path.iterdir())
    most = 3 * files[-1]
    for _ in range(3):
        run = Run(model, words, some, tmp_path, most=most)
        assert run.tokens == without.tokens
        assert run.notes == []
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= most


def test_a_store_smaller_than_a_file_says_so(words, tmp_path):
    model, some = in_one_piece(words), texts()
    run = Run(model, words, some, tmp_path, most=1000)
    assert len(run.notes) == 1
    assert "and it may have 1,000" in run.notes[0]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_deleted_once_it_is_old(tmp_path):
    store = PrefixStore(tmp_path, MANY)
    one, other, new = chained(b"one", range(3 * UNIT))
    young, old = tmp_path / f".{one}.77.0", tmp_path / f".{other}.78.3"
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * prefix_store.ABANDONED_S,) * 2)
    store.put(new, small())
    assert {path.name for path in tmp_path.iterdir()} == {young.name, new}


def test_files_are_their_owners_alone(tmp_path):
    folder = tmp_path / "made" / "here"
    (name,) = chained(b"one", range(UNIT))
    PrefixStore(folder, MANY).put(name, small())
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["no folder", "a file", "full"])
def test_a_folder_that_cannot_be_written_costs_a_note(words, tmp_path, monkeypatch, how):
    model, some = in_one_piece(words), texts()
    without = Run(model, words, some, None)
    folder = tmp_path / "here"
    if how == "no folder":
        folder = Path("/proc/none/here")
    elif how == "a file":
        folder.write_text("")
    else:
        monkeypatch.setattr(prefix_store, "SPARE", 1 << 62)
    run = Run(model, words, some, folder)
    assert run.tokens == without.tokens
    assert len(run.notes) == 1
    assert run.notes[0].startswith("prefix_store: stopped storing prefixes: ")
    assert run.stored.about()["stored_tokens"] == 0


def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing(tmp_path):
    import resource

    store = PrefixStore(tmp_path, MANY)
    one, other = chained(b"one", range(2 * UNIT))
    store.put(one, small())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.put(other, small())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [one]


# -- speed -------------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize("slow", [False, True])
def test_prefixes_are_loaded_only_where_that_is_faster(words, tmp_path, monkeypatch, slow):
    model, some = in_one_piece(words), texts()
    without = Run(model, words, some, None)
    clock = Clock()
    monkeypatch.setattr(stored_prefixes, "time", clock)
    monkeypatch.setattr(StoredPrefixes, "_is_slow", is_slow)
    observe, get = StoredPrefixes.observe, PrefixStore.get

    def observed(self, work, seconds):  # a second a token, beside what the store took
        observe(self, work, self._spent_s + sum(len(item.token_ids) for item in work))

    monkeypatch.setattr(StoredPrefixes, "observe", observed)

    def slowly(self, name):
        clock.now += UNIT * (2 if slow else 0.5)
        return get(self, name)

    monkeypatch.setattr(PrefixStore, "get", slowly)
    Run(model, words, some, tmp_path)
    run = Run(model, words, some, tmp_path)
    assert run.tokens == without.tokens
    if slow:
        assert run.stored.loaded_tokens == UNIT  # how fast it is had to be seen
        assert len(run.notes) == 1
        assert "1 tokens/s, against 0" in run.notes[0]
    else:
        assert run.stored.loaded_tokens > 5 * UNIT
        assert run.notes == []


def test_loading_is_tried_again_once_that_costs_little(words, tmp_path, monkeypatch):
    monkeypatch.setattr(StoredPrefixes, "_is_slow", is_slow)
    model = in_one_piece(words)
    stored = StoredPrefixes(PrefixStore(tmp_path, MANY), b"", model, Notes())
    stored._computing.add(UNIT, UNIT * 1.0)  # noqa: SLF001
    stored._loading.add(UNIT, UNIT * 2.0)  # noqa: SLF001
    assert stored._is_slow()  # noqa: SLF001
    stored.observe([], stored_prefixes.AGAIN * UNIT * 2.0 + 1)
    assert not stored._is_slow()  # noqa: SLF001
    stored.close(finish=True)


# -- processes ---------------------------------------------------------------------------------------------------------


def forked(do):
    """Run `do` in a process of its own; return its id."""
    process = os.fork()
    if process:
        return process
    try:
        do()
    except BaseException:
        os._exit(1)
    os._exit(0)


def check_all(folder):
    """Read every file; return how many there are."""
    store = PrefixStore(folder, MANY)
    names = [path.name for path in folder.iterdir() if prefix_store.NAME.fullmatch(path.name)]
    for name in names:
        found = store.get(name)  # raises Damaged
        assert torch.equal(found.tensors[0], small(int(name[:5])).tensors[0])
    return len(names)


@pytest.mark.parametrize("seed", [*range(4), *wide(*range(4, 50))])
def test_a_kill_while_writing_leaves_whole_files(tmp_path, seed):
    names = chained(b"root", range(400 * UNIT))

    def write():
        store = PrefixStore(tmp_path, MANY)
        for at, name in enumerate(names):
            store.put(name, small(at))

    writer = forked(write)
    while not any(tmp_path.glob("*.safetensors")):
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, 0.15))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    before = check_all(tmp_path)
    assert before > 0
    write()
    assert check_all(tmp_path) == len(names)


def test_processes_that_write_read_and_delete_at_once_get_whole_files(tmp_path):
    names = chained(b"root", range(40 * UNIT))
    PrefixStore(tmp_path, MANY).put(names[0], small())
    size = (tmp_path / names[0]).stat().st_size

    def use(seed):
        rng, store, held = random.Random(seed), PrefixStore(tmp_path, 12 * size), 0
        for _ in range(400):
            at = rng.randrange(len(names))
            found = store.get(names[at])
            if found is None:
                store.put(names[at], small(at))
            else:
                held += 1
                assert torch.equal(found.tensors[0], small(at).tensors[0])
                store.touch(names[: at + 1])
        assert held > 20

    users = [forked(lambda seed=seed: use(seed)) for seed in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(user, 0)[1]) for user in users] == [0, 0, 0]
    PrefixStore(tmp_path, 12 * size).put(chained(b"new", range(UNIT))[0], small())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 12 * size


# -- blocks that run short ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [5, *wide(20)])
def test_a_pool_that_is_full_changes_no_answer(words, tmp_path, blocks):
    model = in_blocks(words)
    model.logits([Segment(0, 0, 1)], [1], [0])
    model.cache.clear(3)
    model.cache.allocate(1 + blocks)
    model.cache.fixed = True
    room, some = KvBudget(1, blocks * model.cache.size, model.cache.size), texts(new=4)
    without = Run(model, words, some, None, rows=1, room=room)
    for rows in (3, *((4, 2) if blocks > 5 else ())):
        Run(model, words, some, tmp_path, rows=rows, room=room)
        run = Run(model, words, some, tmp_path, rows=rows, room=room)
        assert run.tokens == without.tokens
        assert run.stored.loaded_tokens > 0


# -- the runner --------------------------------------------------------------------------------------------------------


def test_runs_of_the_runner_share_a_store(tiny, tmp_path):
    prompts = [[5 + i % 90 for i in range(3 * UNIT)] + [100 + tail] for tail in range(3)]
    args = {"batch_size": 2, "prefix_store": str(tmp_path / "prefixes")}
    config = {"runner": "huggingface", "model": tiny, "speculation": {"method": "none"}, "runner_args": args}
    for loaded in (0, 3 * UNIT):
        runner = module("huggingface").Runner(build_config(config))
        runner.check()
        with runner:
            requests = [Request(i, str(i), prompt, Sampling(max_new_tokens=4)) for i, prompt in enumerate(prompts)]
            assert len(list(runner.generate(requests))) == len(prompts)
        about = runner.about()["prefix_store"]
        assert about["loaded_tokens"] == loaded
        assert (about["load_s"] > 0) == (loaded > 0)
        assert any("prompt tokens were loaded" in note for note in runner.notes) == (loaded > 0)


def test_a_store_that_is_no_folder_is_refused_before_weights_load(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    config = build_config({"model": tiny, "runner": "huggingface", "runner_args": {"prefix_store": f"{tmp_path}/file"}})
    with pytest.raises(ConfigError, match=r"runner_args.prefix_store: .* is not a folder"):
        module("huggingface").Runner(config).check()


@pytest.mark.parametrize("given", [{"prefix_store": ""}, {"prefix_store_gb": 0}, {"prefix_store_gb": "much"}])
def test_settings_that_mean_nothing_are_refused(tiny, given):
    with pytest.raises(ConfigError, match=f"runner_args.{next(iter(given))}"):
        build_config({"model": tiny, "runner": "huggingface", "runner_args": given})


def test_what_has_no_effect_is_said(tiny, tmp_path):
    *_, runner = run("huggingface", tiny, "none", {"max_new_tokens": 2}, prefix_store_gb=3.0)
    assert any("no effect without prefix_store" in note for note in runner.notes)
    stock = {"engine": "transformers", "prefix_store": str(tmp_path / "none")}
    *_, runner = run("huggingface", tiny, "none", {"max_new_tokens": 2}, **stock)
    assert any("prefix_store: has no effect in stock generate()" in note for note in runner.notes)
    assert not (tmp_path / "none").exists()


def test_a_resumed_run_may_have_another_store(tiny, tmp_path):
    configs = [{"prefix_store": str(tmp_path / name), "prefix_store_gb": 2.0} for name in "ab"] + [{}]
    made = [build_config({"model": tiny, "runner": "huggingface", "runner_args": args}) for args in configs]
    assert made[0].identity() == made[1].identity() == made[2].identity()


def test_passes_of_a_benchmark_leave_nothing_to_each_other():
    raw = {"model": "demo", "runner_args": {"prefix_store": "x", "prefix_store_gb": 1.0, "batch_size": 2}}
    assert without_store(raw) == {"model": "demo", "runner_args": {"batch_size": 2}}


@pytest.mark.vllm
def test_vllm_says_how_it_keeps_prefixes_itself(tiny):
    config = build_config({"model": tiny, "runner": "vllm", "runner_args": {"prefix_store": "x"}})
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        module("vllm").Runner(config).check()
