"""A draft of other tokens reads what the target wrote, and is read by it."""

import random

import pytest

from ragspec.engine.sampling import agreement
from ragspec.models.translation import Translation
from tests.families import END, FAMILIES, LOSSY, tokenizer_of

TEXTS = [
    "The sky is blue because air scatters blue light more than red light.  It's called Rayleigh scattering!",
    "Zürich's café costs €3.50 (20% more), naïve façade; 東京は日本の首都です。 Привет, мир! 🙂🙃 done",
    "def f(x):\n    return x ** 2  # spaces\t and tabs\n\n\nThe end.",
]
LONG = " ".join(TEXTS[:1] * 9) + " " + TEXTS[1]


@pytest.fixture(scope="module")
def tokenizers():
    return {family: tokenizer_of(family, TEXTS) for family in FAMILIES}


def translation(target, draft):
    return Translation(target, draft, frozenset([draft.eos_token_id]), target.eos_token_id)


def pieces(ids, seed):
    rng, at = random.Random(seed), 0
    while at < len(ids):
        count = rng.choice((1, 1, 2, 3, 7))
        yield ids[at : at + count]
        at += count


@pytest.mark.parametrize("target", ["byte_bpe", "byte_fallback", "bytes"])
@pytest.mark.parametrize("draft", list(FAMILIES))
@pytest.mark.parametrize("text", [*TEXTS, LONG], ids=["english", "languages", "code", "long"])
def test_a_draft_reads_the_text_that_the_target_wrote(tokenizers, target, draft, text):
    both = translation(tokenizers[target], tokenizers[draft])
    ids = both.target_encode(text)
    for seed in range(3):
        script = both.open(ids[:5])
        for piece in pieces(ids[5:], seed):
            before = list(script.tokens)
            kept = script.extend(piece)
            assert script.tokens[:kept] == before[:kept]
        said = [token for token in script.tokens if token not in both.begin]
        assert both.decode(said) == both.decode(both.encode(text))
        if draft not in LOSSY:
            assert both.decode(said) == text


@pytest.mark.parametrize("target", ["byte_bpe", "byte_fallback", "bytes"])
@pytest.mark.parametrize("draft", [family for family in FAMILIES if family not in LOSSY])
def test_a_draft_that_is_right_is_right_in_the_targets_tokens(tokenizers, target, draft):
    """Whatever the draft guesses of the rest of the text is what the target writes, but for where it was cut short."""
    both = translation(tokenizers[target], tokenizers[draft])
    checked = right = 0
    for text in [*TEXTS, LONG]:
        ids = both.target_encode(text)
        for at in range(6, len(ids) - 12, 5):
            script = both.open(ids[:at])
            known = both.target_decode(ids[:at])
            if not text.startswith(known) or script.guesses([]) != ([], []):
                continue
            rest = both.encode(text)[len(script.tokens) - len(both.begin) :][:8]
            if both.encode(text)[: len(script.tokens) - len(both.begin)] != script.tokens[len(both.begin) :]:
                continue  # the draft joins what was read to what follows
            guesses, rests = script.guesses(rest)
            assert len(guesses) == len(rests)
            assert rests == sorted(rests)
            assert all(1 <= count <= len(rest) for count in rests)
            agreed = agreement(guesses, ids[at:])
            assert agreed >= len(guesses) - 4  # the last word may have another division with its end
            checked, right = checked + len(guesses), right + agreed
    assert checked > 100
    assert right > 0.85 * checked


def test_the_end_of_a_draft_is_the_end_of_the_answer(tokenizers):
    both = translation(tokenizers["byte_bpe"], tokenizers["byte_fallback"])
    script = both.open(both.target_encode("The sky is"))
    end = next(iter(both.ends))
    drafted = [*both.encode("blue"), end]
    guesses, rests = script.guesses(drafted)
    assert guesses[-1] == both.end == tokenizers["byte_bpe"].eos_token_id
    assert rests[-1] == len(drafted)
    assert script.ends(end)


def test_control_tokens_are_the_drafts_own_where_it_has_them_and_left_out_where_not(tokenizers):
    target = tokenizers["byte_bpe"]
    both = translation(target, tokenizers["byte_fallback"])
    end = target.eos_token_id
    script = both.open([*both.target_encode("The sky"), end, *both.target_encode("is blue")])
    assert script.tokens == [
        *both.begin,
        *both.encode("The sky"),
        tokenizers["byte_fallback"].convert_tokens_to_ids(END),
        *both.encode("is blue"),
    ]


def test_half_a_character_waits(tokenizers):
    both = translation(tokenizers["bytes"], tokenizers["byte_bpe"])
    ids = both.target_encode("a🙂b")
    script = both.open(ids[:2])
    assert both.decode(script.tokens) == "a"
    assert script.guesses(both.encode("b")) == ([], [])
    script.extend(ids[2:5])
    assert both.decode(script.tokens) == "a🙂"
