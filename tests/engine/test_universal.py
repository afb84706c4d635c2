"""A draft of other tokens in the batched engine: five families of tokenizers, and a draft that is mostly right."""

import pytest
import torch

from ragspec.engine.model.loaded import prepare
from ragspec.engine.proposers.draft_model import DraftModel
from ragspec.models.translation import Translation
from ragspec.records import Request, Sampling
from ragspec.speculation.step_cost import StepCost
from tests.conftest import save_llama, train_tokenizer, wide
from tests.engine.test_engine import NEW, answers, ids, loaded, requests_for  # noqa: F401
from tests.families import FAMILIES, learn_by_heart, tokenizer_of

SAMPLINGS = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, sample_texts):
    """A random model of each family's tokenizer."""
    base = tmp_path_factory.mktemp("drafts")
    return {
        family: save_llama(base / family, tokenizer_of(family, sample_texts), seed=11, layers=1) for family in FAMILIES
    }


def proposer(target, folder, rows, num_tokens=4, cost=None, tokenizer=None):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = prepare(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    model.resize(rows)
    draft = AutoTokenizer.from_pretrained(folder)
    both = Translation(target, draft, frozenset([draft.eos_token_id]), None)
    return DraftModel(model, 400, None, num_tokens, cost, lambda row: both.open(row.tokens))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("rows", [*wide(1), 4, *wide(16)])
def test_a_draft_of_other_tokens_changes_no_answer(loaded, tiny, drafts, family, rows, sampling):  # noqa: F811
    tokenizer = loaded(tiny)[1]
    requests = list(requests_for(tokenizer, Sampling(max_new_tokens=NEW, **sampling)))
    expected = ids(answers(loaded, tiny, rows=rows, requests=iter(requests)))
    outcomes = answers(loaded, tiny, proposer(tokenizer.inner, drafts[family], rows), rows, requests=iter(requests))
    assert ids(outcomes) == expected
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) > 0


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory, sample_texts):
    """A target and a draft of other tokens that know one text by heart. Returns their folders, and the text."""
    from transformers import AutoModelForCausalLM

    text = sample_texts[0][:500]
    base, folders = tmp_path_factory.mktemp("by_heart"), []
    for name, tokenizer in (("target", train_tokenizer(400, sample_texts)), ("draft", tokenizer_of("unigram", [text]))):
        folder = save_llama(base / name, tokenizer, hidden=64)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert learn_by_heart(model, tokenizer, [text]) < 0.2
        model.save_pretrained(folder)
        folders.append(folder)
    return *folders, text


@pytest.mark.parametrize("num_tokens", [4, None])
def test_a_draft_of_other_tokens_that_is_right_is_accepted(loaded, by_heart, num_tokens):  # noqa: F811
    target, draft, text = by_heart
    tokenizer = loaded(target)[1]
    whole = tokenizer.encode(text, special_tokens=False)
    requests = [Request(i, f"r{i}", whole[: 20 + 3 * i], Sampling(max_new_tokens=40)) for i in range(5)]
    plain = answers(loaded, target, rows=3, requests=iter(requests))
    cost = StepCost([(1, 0.1), (8, 0.1), (64, 0.12), (256, 0.2)])  # of a target that is far dearer than the draft
    used = proposer(tokenizer.inner, draft, 3, num_tokens, cost)
    drafted = answers(loaded, target, used, 3, requests=iter(requests))
    assert ids(drafted) == ids(plain)
    steps = sum(outcome.spec.steps for outcome in drafted.values())
    assert steps < 0.6 * sum(outcome.spec.steps for outcome in plain.values())
    accepted = sum(outcome.spec.accepted for outcome in drafted.values())
    assert accepted > 0.6 * sum(outcome.spec.drafted for outcome in drafted.values())


def test_a_draft_that_cannot_pay_is_left_alone(loaded, tiny, drafts):  # noqa: F811
    """Steps of the target that cost next to nothing: after a few tries, hardly a step drafts."""
    tokenizer = loaded(tiny)[1]
    requests = requests_for(tokenizer, Sampling(max_new_tokens=120), count=9)
    used = proposer(tokenizer.inner, drafts["byte_fallback"], 4, None, StepCost([(1, 1e-6), (64, 1e-5)]))
    outcomes = answers(loaded, tiny, used, 4, requests=iter(requests))
    steps = sum(outcome.spec.steps for outcome in outcomes.values())
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) < 0.2 * steps


def run_with(target, draft, texts=("The sky", "A cat sat", "One two"), **spec):
    """Return a runner that answered three records with a draft of other tokens."""
    from ragspec.config.load import build_config
    from ragspec.runners.huggingface.runner import Runner

    speculation = {"method": "draft_model", "draft_model": draft, "draft_tokenizer": draft, **spec}
    config = build_config(
        {"model": target, "speculation": speculation, "runner_args": {"batch_size": 2, "compile": "off"}}
    )
    runner = Runner(config)
    runner.check()
    with runner:
        requests = [
            Request(i, f"r{i}", runner.tokenizer.encode(text, special_tokens=True), Sampling(max_new_tokens=8))
            for i, text in enumerate(texts)
        ]
        assert not [one for one in runner.generate(requests) if not one.token_ids]
    return runner


def test_a_tokenizer_that_changes_texts_is_named(tiny, drafts):
    runner = run_with(tiny, drafts["word_piece"], num_tokens=2)
    assert any("changes texts" in note and "the answer" in note for note in runner.notes)
    assert not any("changes texts" in note for note in run_with(tiny, drafts["bytes"], num_tokens=2).notes)


def test_a_draft_that_can_write_nothing_is_refused_before_weights_load(tiny, tmp_path, sample_texts):
    from ragspec.errors import ConfigError

    mute = tokenizer_of("word_piece", ["東京 日本"], size=12)
    folder = save_llama(tmp_path / "mute", mute)
    with pytest.raises(ConfigError, match="cannot write plain text"):
        run_with(tiny, folder)


def test_a_draft_larger_than_the_target_is_said_to_cost_more_than_it_brings(tiny, tmp_path, sample_texts):
    large = save_llama(tmp_path / "large", tokenizer_of("bytes", sample_texts), hidden=64, layers=3)
    notes = run_with(tiny, large).notes
    assert any("times the target's weights" in note and "cannot pay" in note for note in notes)


def test_a_text_that_is_too_long_in_the_drafts_tokens_goes_on_without_drafts(tiny, tmp_path, sample_texts):
    from tests.conftest import save_gpt2

    short = save_gpt2(tmp_path / "short", tokenizer_of("bytes", sample_texts), positions=64)
    runner = run_with(tiny, short, [text[:80] for text in sample_texts[:3]], num_tokens=3)
    assert any("exceeded the draft model's context of 64 tokens" in note for note in runner.notes)
    assert not any("drafting failed" in note for note in runner.notes)


def test_a_text_that_the_draft_cannot_read_goes_on_without_drafts(tiny, tmp_path, sample_texts):
    """Its tokenizer knows a few letters, and passes over all others."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ?")}, []))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    deaf = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    assert Translation(deaf, deaf, frozenset(), None).encode("日本") == []
    runner = run_with(tiny, save_llama(tmp_path / "deaf", deaf), ["日本", "the sky", "東京"], num_tokens=3)
    assert not any("drafting failed" in note for note in runner.notes)


def test_a_guess_that_the_target_has_no_room_for_is_not_verified(loaded, tiny, drafts, monkeypatch):  # noqa: F811
    """Its tokenizer may know more tokens than its embeddings have rows."""
    from ragspec.models.translation import Transcript

    right = Transcript.guesses

    def beyond(self, drafted):
        guesses, rests = right(self, drafted)
        return [*guesses[:1], 400, *guesses[1:]], [*rests[:1], len(drafted), *rests[1:]]

    tokenizer = loaded(tiny)[1]
    expected = ids(answers(loaded, tiny, rows=2))
    monkeypatch.setattr(Transcript, "guesses", beyond)
    outcomes = answers(loaded, tiny, proposer(tokenizer.inner, drafts["bytes"], 2), 2)
    assert ids(outcomes) == expected
    assert sum(outcome.spec.drafted for outcome in outcomes.values()) > 0
