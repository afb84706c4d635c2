"""Every class of causal model that transformers has: the engine answers as generate() does, or generate() itself."""

import dataclasses

import pytest
import transformers

from tests.zoo.crew import judging
from tests.zoo.others import ABSENT
from tests.zoo.page import PATH, class_names, page
from tests.zoo.table import ASKING, CLASSES, ENTRIES
from tests.zoo.tiny import config_class

PADDED = "generate() answers padded rows otherwise than a row alone"
SCALED_LATE = "RoPE is scaled by the longest row, not by each row's own length"
UNSEEN = "the limit lies behind the text of the self-check"
UNASKED = "the engine does not ask the generation_config"
LEGACY = {  # what old config files say, and configs still read
    ("blt", "num_hidden_layers"),
    ("dbrx", "rope_theta"),
    ("phimoe", "original_max_position_embeddings"),
    *((kind, "global_head_dim") for kind in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")),
    ("gemma4_text", "num_global_key_value_heads"),
}
FAILS_TODAY = {
    **dict.fromkeys(
        [
            *["axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "llama4_text", "minimax_m3_vl_text"],
            *["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"],
            *["plbart", "prophetnet", "trocr", "whisper", "blt", "doge", "git", "reformer", "xlm", "xlnet"],
            *["recurrent_gemma", "rwkv", "xlstm"],
            *["llama: LongRoPE", "phi3: LongRoPE", "phi3: partial LongRoPE and a window", "phimoe: LongRoPE"],
            *["llama4_text: chunks, far", "deepseek_v32: index, far", "doge: experts"],
        ],
        PADDED,
    ),
    **dict.fromkeys(["llama: dynamic RoPE", "llama: dynamic RoPE, far", "phi3: LongRoPE, far"], SCALED_LATE),
    **dict.fromkeys(["qwen2_moe: windows in upper layers, far", "phimoe: window, far"], UNSEEN),
    "hunyuan_v1_moe": "its router looks at the weight of a layer that is packed by then",
    "moshi": "its last MLP does not take a chunk without tokens",
    **dict.fromkeys([entry.name for entry in ASKING], UNASKED),
}


def params(entries):
    for entry in entries:
        why = FAILS_TODAY.get(entry.name)
        marks = [pytest.mark.xfail(reason=why, strict=True, raises=AssertionError)] if why else []
        yield pytest.param(entry, marks=marks, id=entry.name)


@pytest.fixture(scope="module")
def judged(request):
    """Return what came of an entry. All that the chosen tests ask for are judged from the start."""
    asked = [item for item in request.session.items if "judged" in getattr(item, "fixturenames", ())]
    whole = any(item.function is test_the_page_says_who_answers for item in asked)
    entries = {
        item.callspec.params["entry"].name: item.callspec.params["entry"]
        for item in asked
        if "entry" in item.fixturenames
    }
    if whole:
        entries |= {entry.name: entry for entry in ENTRIES}
    with judging(entry for entry in entries.values() if entry.model_type in class_names()) as coming:
        yield lambda entry: coming[entry.name].result()


@pytest.mark.parametrize("entry", params(ENTRIES))
def test_a_model_is_answered_with_the_tokens_of_stock_generate(entry, judged):
    if entry.model_type not in class_names():
        pytest.skip(f"transformers {transformers.__version__} has no {entry.model_type}")
    outcome = judged(entry)
    assert not outcome.fault, f"{class_names()[entry.model_type]}, answered by {outcome.by}: {outcome.fault}"


@pytest.mark.parametrize("entry", params(ASKING))
def test_what_a_generation_config_asks_for_is_done_as_stock_generate_does_it(entry, judged):
    outcome = judged(entry)
    assert not outcome.fault, f"generation_config: {entry.generation}, answered by {outcome.by}: {outcome.fault}"


def test_no_class_of_transformers_is_left_out():
    kinds = class_names()
    met = {kinds.get(name) for name in [*(entry.model_type for entry in CLASSES), *ABSENT]}
    assert set(kinds.values()) <= met, "give each of these classes an entry in tests/zoo, or a reason in ABSENT"


def test_every_known_failure_names_an_entry():
    assert set(FAILS_TODAY) <= {entry.name for entry in ENTRIES + ASKING}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_nothing_that_its_config_does_not_read(entry):
    if entry.model_type not in class_names():
        pytest.skip(f"transformers {transformers.__version__} has no {entry.model_type}")
    unknown = set(unread(config_class(entry.model_type), entry.settings))
    assert {name for name in unknown if (entry.model_type, name) not in LEGACY} == set()


def unread(kind, settings):
    """Yield the keys of `settings` that `kind` has no field for: it would keep them and do nothing."""
    fields = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    for name, value in settings.items():
        part = (kind.sub_configs or {}).get(name)
        if isinstance(value, dict) and dataclasses.is_dataclass(part):
            yield from unread(part, value)
        elif name not in fields:
            yield name


def test_the_page_says_who_answers(judged):
    """Last: it takes what the tests above have found."""
    text = PATH.read_text(encoding="utf-8")
    version = ".".join(transformers.__version__.split(".")[:2])
    if f"with transformers {version}:" not in text:
        pytest.skip(f"docs/models.md is not about transformers {version}")
    assert text == page({entry.name: judged(entry) for entry in ENTRIES}), "run `python -m tests.zoo`"
