"""Forms of answers as grammars: what they admit, what cannot be one, and a matcher that is never left elsewhere."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from ragspec.config.load import build_config
from ragspec.errors import ConfigError, RecordError
from ragspec.records import Passage
from ragspec.structured.form import Form
from ragspec.structured.grammars import Grammars, problem_of
from ragspec.structured.quotes import spans
from ragspec.structured.schema import completed

EOS = 0
PASSAGES = [
    Passage("p1", 'He said "no",\nand left. The quick brown fox.', "A title"),
    Passage("p2", "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002 Caf\u00e9 \u00fcber alles."),
]
QUOTES = {
    "type": "object",
    "properties": {
        "note": {"$ref": "#/$defs/word"},
        "quotes": {"type": "array", "items": {"$quote": True, "minLength": 3, "maxLength": 24}, "minItems": 1},
        "by": {"type": "object", "properties": {"exact": {"$quote": True}}, "required": ["exact"]},
    },
    "required": ["note", "quotes", "by"],
    "$defs": {"word": {"type": "string", "pattern": "^[a-z]+$"}},
}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, len(tokenizer), {EOS})


def admits(grammars, tokenizer, form, text, passages=PASSAGES):
    """Return whether a text is a whole answer."""
    matcher = grammars.matcher(form.grammar(passages))
    ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return matcher.admitted(ids) == len(ids)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (Form("choice", ["yes", 'say "no"']), ["yes", 'say "no"'], ["y", "maybe", "yes "]),
        (Form("regex", r"a/b\d{2,3}"), ["a/b12", "a/b123"], ["a/b1", "a/b1234"]),
        (Form("regex", "a\nb"), ["a\nb"], ["a", "anb"]),
        (Form("grammar", 'start: "a"+ "b"'), ["ab", "aaab"], ["b", "a"]),
        (Form("grammar", 'root ::= "a" | "b" root'), ["a", "bba"], ["b"]),
        (
            Form("json_schema", {"type": "object"}),
            ['{}', '{"a": [1, {"b": null}]}'],
            ['{"a":1}', "[]", '{ }', '{"a": 1 }'],
        ),
        (
            Form("json_schema", {"enum": {"$contexts": "id"}}),
            ['"p1"', '"p2"'],
            ['"p3"', '"p"'],
        ),
        (Form("json_schema", {"enum": {"$contexts": "title"}}), ['"A title"'], ['"p1"', "null"]),
        (
            Form("json_schema", {"type": "object", "x-guidance": {"item_separator": ","}}),
            ['{"a": 1,"b": 2}'],
            ['{"a": 1, "b": 2}'],
        ),
    ],
)  # fmt: skip
def test_what_a_form_admits(grammars, tokenizer, form, good, bad):
    assert [admits(grammars, tokenizer, form, text) for text in good] == [True] * len(good)
    assert [admits(grammars, tokenizer, form, text) for text in bad] == [False] * len(bad)


def quoted(quotes, note="x", exact="left"):
    return json.dumps({"note": note, "quotes": quotes, "by": {"exact": exact}}, ensure_ascii=False)


def test_a_quote_is_a_part_of_a_passage_from_word_to_word(grammars, tokenizer):
    form = Form("json_schema", QUOTES)
    for good in ['said "no",\nand', "quick brown", "fox.", "\u65e5\u672c\u306e\u9996\u90fd", "Caf\u00e9 \u00fcber"]:
        assert admits(grammars, tokenizer, form, quoted([good])), good
    for bad in ["uick", "quick  brown", "qu", " quick", "fox. \u6771", "", "The quick brown fox. And more"]:
        assert not admits(grammars, tokenizer, form, quoted([bad])), bad
    assert admits(grammars, tokenizer, form, quoted(["left", "The quick"]))
    assert not admits(grammars, tokenizer, form, quoted([]))
    assert not admits(grammars, tokenizer, form, quoted(["left"], note="X"))
    assert not admits(grammars, tokenizer, form, quoted(["The quick brown fox jumped over"]))
    assert not admits(grammars, tokenizer, form, quoted(['said "no",\nand left. The']))  # longer than 24


@given(st.text(max_size=80))
def test_the_parts_of_a_text_are_the_text(text):
    assert json.loads(f'"{"".join(spans(text))}"') == text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": {"$contexts": "text"}}, '"enum": {"$contexts": "text"} must be a list, or {"$contexts": "id"}'),
        ({"enum": {"$context": "id"}}, "must be a list, or"),
        ({"type": "object", "properties": {"a": {"$quote": True}}}, 'all properties of $ must be "required"; "a" is'),
        ({"anyOf": [{"$quote": True}]}, "only objects and lists may hold one; $ is neither"),
        ({"$quote": True, "pattern": "a"}, '"pattern" at $ cannot be combined with it'),
        (
            {"type": "array", "items": {"$quote": True}, "minItems": "a"},
            '"minItems" at $ must be a whole number, not "a"',
        ),
        ({"type": "array", "items": {"$quote": True}, "minItems": 3, "maxItems": 2}, '"maxItems" at $ is less than'),
        ({"$quote": True, "maxLength": -1}, '"maxLength" at $ must be a whole number, not -1'),
        ({"type": "object", "properties": [{"$quote": True}]}, 'needs "properties" (an object)'),
        ({"type": "object", "properties": {"q": {"$quote": True}, "a": None}, "required": ["q", "a"]}, "null must be"),
        (json.loads('{"items": ' * 400 + "{}" + "}" * 400), "nested deeper than 100 levels"),
        ({"type": "array", "prefixItems": [{"$quote": True}]}, '$ has "prefixItems"; use "items"'),
    ],
)
def test_references_that_mean_nothing(schema, message):
    with pytest.raises(RecordError) as raised:
        Form("json_schema", schema).grammar(PASSAGES)
    assert message in str(raised.value)


def test_a_record_without_passages_cannot_cite():
    with pytest.raises(RecordError, match=r"no passage in the prompt has one"):
        completed({"enum": {"$contexts": "id"}}, [])
    with pytest.raises(RecordError, match=r"no passages to quote"):
        Form("json_schema", {"$quote": True}).grammar([])


BAD = {
    "unsatisfiable": ({"json_schema": {"enum": []}}, "structured.json_schema: Unsatisfiable schema"),
    "nothing may follow": (
        {"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
        "structured.json_schema: Unsatisfiable schema",
    ),
    "unsupported keyword": ({"json_schema": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
    "regex": ({"regex": "(a"}, "structured.regex: "),
    "regex bomb": ({"regex": "|".join(f"w{i}x" * 40 for i in range(20_000))}, "1,048,576 at most"),
    "grammar": ({"grammar": "start: nothing"}, "structured.grammar: "),
    "neither grammar": ({"grammar": "what is this?"}, "structured.grammar: "),
    "choice": ({"choice": []}, "structured.choice: "),
    "two": ({"regex": "a", "choice": ["a"]}, "structured.choice: the section has regex and choice; it takes exactly"),
    "none": ({}, "structured.json_schema: the section is empty; it takes exactly one key"),
    "unknown": ({"json_shema": {}}, '"structured.json_shema" is not a known key; did you mean "json_schema"?'),
    "word": ("json", "structured: "),
    "file": ({"json_schema": "no-such.json"}, 'structured.json_schema: cannot read "no-such.json"'),
    "reference": ({"json_schema": {"enum": {"$contexts": "url"}}}, "structured.json_schema: "),
    "quote": ({"json_schema": {"anyOf": [{"$quote": True}]}}, "structured.json_schema: "),
    "refers to itself": (
        {"json_schema": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}},
        "structured.json_schema: llguidance cannot compile it (most often, it is too large or refers to itself)",
    ),
    "requires itself": (
        {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "structured.json_schema: no answer would end: its first 75,003 bytes follow from it (a schema that requires",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_form_is_a_config_error(name):
    given, message = BAD[name]
    with pytest.raises(ConfigError) as raised:  # and never stuck
        build_config({"runner": "fake", "structured": given})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_llguidance_says_to_its_authors_is_said_in_words(grammars):
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    with pytest.raises(RecordError, match=r"llguidance cannot compile it .* refers to itself\): NoExtensionBias"):
        grammars.matcher(Form("json_schema", loop).grammar())


def test_a_long_text_that_follows_from_its_grammar_is_an_answer_that_ends():
    text = "tower " * 10_000
    assert problem_of(Form("choice", [text]).grammar()) == ""
    assert problem_of(Form("json_schema", {"const": text}).grammar()) == ""


def test_files_are_read_into_the_config(tmp_path):
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "a"')
    config = build_config({"runner": "fake", "structured": {"json_schema": str(schema)}})
    assert config.structured.json_schema == {"type": "object"}
    config = build_config({"runner": "fake", "structured": {"grammar": str(grammar)}})
    assert config.structured.grammar == 'start: "a"'
    assert build_config({"runner": "fake", "structured": "json_object"}).structured.form.spec == {"type": "object"}
    schema.write_text('{"type": ')
    with pytest.raises(ConfigError, match=r"s\.json:1: not JSON"):
        build_config({"runner": "fake", "structured": {"json_schema": str(schema)}})


@pytest.mark.parametrize("seed", range(40))
def test_asking_leaves_a_matcher_where_it_was(grammars, tokenizer, seed):
    """Random answers: at every place, what is forced is the only way on, and nothing is moved by asking."""
    chance = random.Random(seed)
    form = chance.choice(
        [Form("json_schema", QUOTES), Form("choice", ["one two", "one three"]), Form("regex", "a{2,9}b")]
    )
    text, bytes_of = form.grammar(PASSAGES), from_tokenizer(tokenizer).decode_bytes
    matcher, written = grammars.matcher(text), []
    for _ in range(60):
        mask = allowed(matcher, len(tokenizer))
        guesses = [chance.choice(mask), *(chance.randrange(len(tokenizer)) for _ in range(chance.randint(0, 4)))]
        count = matcher.admitted(guesses)
        assert 1 <= count <= len(guesses)
        forced = matcher.forced()
        assert matcher.admitted(forced) == len(forced)
        if forced and forced != [EOS]:
            way = bytes_of([token for token in forced if token != EOS])
            for token in mask:
                other = bytes_of([token])
                assert way.startswith(other) or other.startswith(way), "another way on"
        after = matcher.forced(guesses[:count])
        assert matcher.admitted([*guesses[:count], *after]) == count + len(after)
        assert allowed(matcher, len(tokenizer)) == mask
        fresh = grammars.matcher(text)
        fresh.take(written)
        assert allowed(fresh, len(tokenizer)) == mask
        step = guesses[: chance.randint(1, count)]
        matcher.take(step)
        written += step
        assert not matcher.problem
        if EOS in step:
            assert matcher.ended
            return


def allowed(matcher, size):
    import numpy as np
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    mask = allocate_token_bitmask(1, matcher.width)
    fill_next_token_bitmask(matcher.inner, mask)
    return [i for i in np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist() if i < size]


GRAMMAR = [
    "root",
    "::=",
    "start:",
    '"a"',
    "|",
    "(",
    ")",
    "[a-z]",
    "*",
    "\n",
    "{",
    "/x/",
    "%json",
    "{}",
    "\\",
    "#",
    "A:",
]
REGEX = ["(", ")", "a", "*", "+", "{2,5}", "[a-z]", "[^x]", "\\d", ".", "|", "\\", "/", "^", "(?i)", "\\p{L}", "\n"]
WORDS = [
    "type",
    "properties",
    "items",
    "enum",
    "anyOf",
    "$ref",
    "required",
    "minItems",
    "pattern",
    "$quote",
    "x-guidance",
]
VALUES = st.recursive(
    st.sampled_from(
        ["object", "array", "string", True, None, 0, 5, -1, 1e9, "^a", {"$contexts": "id"}, {"$contexts": 5}]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
)
FORMS = st.one_of(
    st.lists(st.sampled_from(GRAMMAR), min_size=1, max_size=12).map(lambda parts: Form("grammar", " ".join(parts))),
    st.lists(st.sampled_from(REGEX), min_size=1, max_size=12).map(lambda parts: Form("regex", "".join(parts))),
    st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=4).map(lambda schema: Form("json_schema", schema)),
)


@pytest.mark.slow
@settings(max_examples=600)
@given(FORMS)
def test_whatever_a_record_asks_for_is_a_grammar_or_a_line(form):
    try:
        problem = problem_of(form.grammar(PASSAGES))
    except RecordError as error:
        problem = str(error)
        assert problem
    assert "\n" not in problem


def test_a_problem_is_one_line():
    assert problem_of('start: "a"') == ""
    problem = problem_of('start: %json {"enum": []}')
    assert problem.startswith("Unsatisfiable schema")
    assert "\n" not in problem
