"""Every class of causal model that transformers has: the engine answers as generate() does, or generate() itself."""

import dataclasses

import pytest
import transformers

from tests.conftest import wide
from tests.zoo.crew import judging
from tests.zoo.others import ABSENT
from tests.zoo.page import PATH, class_names, page
from tests.zoo.table import ASKING, CLASSES, ENTRIES
from tests.zoo.tiny import config_class

LEGACY = {  # what old config files say, and configs still read
    ("blt", "num_hidden_layers"),
    ("dbrx", "rope_theta"),
    ("phimoe", "original_max_position_embeddings"),
    *((kind, "global_head_dim") for kind in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")),
    ("gemma4_text", "num_global_key_value_heads"),
}


def name_of(entry):
    return entry.name


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


@pytest.mark.parametrize("entry", [*ENTRIES[::8], *wide(*(e for e in ENTRIES if e not in ENTRIES[::8]))], ids=name_of)
def test_a_model_is_answered_with_the_tokens_of_stock_generate(entry, judged):
    if entry.model_type not in class_names():
        pytest.skip(f"transformers {transformers.__version__} has no {entry.model_type}")
    outcome = judged(entry)
    assert not outcome.fault, f"{class_names()[entry.model_type]}, answered by {outcome.by}: {outcome.fault}"


@pytest.mark.parametrize("entry", ASKING, ids=name_of)
def test_what_a_generation_config_asks_for_is_done_as_stock_generate_does_it(entry, judged):
    outcome = judged(entry)
    assert not outcome.fault, f"generation_config: {entry.generation}, answered by {outcome.by}: {outcome.fault}"


def test_no_class_of_transformers_is_left_out():
    kinds = class_names()
    met = {kinds.get(name) for name in [*(entry.model_type for entry in CLASSES), *ABSENT]}
    assert set(kinds.values()) <= met, "give each of these classes an entry in tests/zoo, or a reason in ABSENT"


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
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


@pytest.mark.wide
def test_the_page_says_who_answers(judged):
    """Last: it takes what the tests above have found."""
    text = PATH.read_text(encoding="utf-8")
    version = ".".join(transformers.__version__.split(".")[:2])
    if f"with transformers {version}." not in text:
        pytest.skip(f"docs/reference/models.md is not about transformers {version}")
    assert text == page({entry.name: judged(entry) for entry in ENTRIES}), "run `python -m tests.zoo`"
