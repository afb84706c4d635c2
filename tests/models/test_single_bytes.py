"""Tokenizers that write unknown characters byte by byte: a text grows with its tokens, and ends at the same one."""

from itertools import pairwise

import pytest

from ragspec.models.stopping import ends_with_stop, trim
from ragspec.models.tokenizer import HFTokenizer
from tests.families import tokenizer_of


@pytest.fixture(scope="module")
def falls_back(sample_texts):
    """A tokenizer that writes what it does not know byte by byte, and a function that returns the bytes' tokens."""
    inner = tokenizer_of("byte_fallback", sample_texts)
    return HFTokenizer(inner), lambda written: [inner.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in written]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("\n\U0001f600".encode(), "\n\U0001f600"),
        ("\n\U0001f600".encode()[:-1], "\n\ufffd"),
        (b"\n\xff\xc3\xa9\xf0\x9f", "\n\ufffd\u00e9\ufffd"),
        ("\u2581\ufffd".encode(), "\u2581\ufffd"),
    ],
)
def test_bytes_that_are_valid_do_not_change_with_those_after_them(falls_back, written, text):
    tokenizer, tokens_of = falls_back
    a, end = tokenizer.encode("a", special_tokens=False), tokenizer.inner.eos_token_id
    assert tokenizer.decode([*a, *tokens_of(written[:1]), end, *tokens_of(written[1:]), *a]) == f"a{text} a"
    heard = [tokenizer.decode([*a, *tokens_of(written[:count])]).rstrip("\ufffd") for count in range(len(written) + 1)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(heard))


def test_a_line_end_is_a_stop_string_whatever_bytes_come_with_it(falls_back):
    tokenizer, tokens_of = falls_back
    answer = tokens_of("ab\n\U0001f600".encode())
    for size in (3, 4, 6, 7):  # a step may bring several tokens
        assert ends_with_stop(tokenizer, answer[:size], size, ["\n"])
        assert trim(answer[:size], frozenset(), ["\n"], tokenizer) == (answer[:3], "stop")
