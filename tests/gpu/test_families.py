"""FlexAttention, compiled for a GPU and captured, computes what transformers computes: windows, caps, sinks and all."""

import pytest
import torch

from ragspec.engine.model import loaded
from ragspec.models.tokenizer import HFTokenizer
from tests.conftest import train_tokenizer
from tests.engine import test_engine_models as families
from tests.engine.test_paged import MORE

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.slow,  # it starts compilers
]

# heads of at least 16, the least that FlexAttention compiles for
LARGER = {"hidden_size": 128, "head_dim": 32, "n_embd": 128, "word_embed_proj_dim": 128}
NAMES = [*families.FAMILIES, "gpt-oss"]
ROUTED = {"gpt-oss"}  # which experts run depends on the content: rounding may change it, and a graph cannot hold it


@pytest.fixture(scope="module")
def words(sample_texts):
    return HFTokenizer(train_tokenizer(300, sample_texts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NAMES)
def test_a_captured_step_computes_what_transformers_computes(words, family, dtype, monkeypatch):
    kind, settings = (families.FAMILIES | MORE)[family]
    larger = {key: LARGER.get(key, value) for key, value in settings.items()}
    monkeypatch.setitem(families.FAMILIES, family, (kind, larger))
    if family in ROUTED and dtype is torch.bfloat16:
        pytest.skip("rounding chooses other experts")
    notes: list[str] = []
    model = loaded.prepare(families.build(family, words).to("cuda", dtype), notes)
    assert model.steps is not None, notes
    assert not [note for note in notes if note.startswith("attention")]
    assert (model.steps.captured > 0) is (family not in ROUTED), notes
    assert any(note.startswith("graphs") for note in notes) is (family in ROUTED), notes
