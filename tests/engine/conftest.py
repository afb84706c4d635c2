"""What several tests of the engine are given."""

import pytest

from ragspec.models.tokenizer import HFTokenizer
from tests.conftest import train_tokenizer


@pytest.fixture(scope="module")
def words(sample_texts):
    """A small tokenizer."""
    return HFTokenizer(train_tokenizer(300, sample_texts))
