"""Passages in every shape that datasets and frameworks give them, and the mapping that `inspect` offers for each."""

import json
import time

import pytest

from ragspec.config.io import InputConfig
from ragspec.config.load import build_config
from ragspec.errors import RecordError
from ragspec.inputs.columns import Columns
from ragspec.inputs.passages import guessed_fields, passages_of
from ragspec.inputs.record import parse_record
from ragspec.records import Passage
from ragspec.run.generate import generate
from ragspec.run.inspect import inspect
from tests.cli.test_cli import ragspec
from tests.conftest import read_jsonl, write_jsonl
from tests.inputs.test_tables import as_arrow, as_delimited, as_parquet, rows

LONG = "The old tower stands on a hill."
SENTENCES = ["One.", " Two."]
FORMS = {
    "one text": (LONG, [Passage("1", LONG)]),
    "an empty text": (" ", []),
    "an empty list as JSON": ("[ ]\n", []),
    "one object": ({"text": LONG, "title": "T"}, [Passage("1", LONG, "T")]),
    "texts and objects": (
        ["a", {"id": 7, "text": "b", "score": "0.5"}],
        [Passage("1", "a"), Passage("7", "b", None, 0.5)],
    ),
    "HotpotQA on the hub": (
        {"title": ["A", "B"], "sentences": [SENTENCES, ["Three", "four"]]},
        [Passage("1", "One. Two.", "A"), Passage("2", "Three four", "B")],
    ),
    "HotpotQA": ([["A", SENTENCES], ["B", []]], [Passage("1", "One. Two.", "A"), Passage("2", "", "B")]),
    "sentences of one passage": ({"title": "A", "sentences": SENTENCES}, [Passage("1", "One. Two.", "A")]),
    "lists side by side": (
        {"id": ["x", "y"], "text": ["a", "b"], "score": [1, 2]},
        [Passage("x", "a", None, 1.0), Passage("y", "b", None, 2.0)],
    ),
    "with scores": (
        [[{"text": "a", "id": "x"}, 3], ["b", 0.5], [{"text": "c"}, -1.5]],
        [Passage("x", "a", None, 3.0), Passage("2", "b", None, 0.5), Passage("3", "c", None, -1.5)],
    ),
    "an id of floats": ([{"id": 3.0, "text": "a"}], [Passage("3", "a")]),
}


@pytest.mark.parametrize("name", FORMS)
def test_passages_are_read_in_every_form(name):
    given, expected = FORMS[name]
    assert list(parse_record({"query": "Why?", "contexts": given}, 1).contexts) == expected


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["a", {"id": "1", "text": "b"}, "c"], ["passage-1", "1", "3"]),
        ([{"id": 2, "text": "a"}, "b", {"id": "passage-2", "text": "c"}], ["2", "passage-passage-2", "passage-2"]),
        (["a", "b"], ["1", "2"]),
        ([{"id": "", "text": "a"}, {"id": None, "text": "b"}], ["1", "2"]),
    ],
)
def test_ids_of_passages_come_before_made_ones(given, ids):
    assert [passage.id for passage in passages_of(given)] == ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, '"contexts" must be a list of strings or objects, got a number'),
        ("['a', 'b']", "is a text that looks like a list"),
        ('[{"text": "a"}, 3]', "item 2 must be a string or an object"),
        ("{'text': 'a'}", "is a text that looks like a list"),
        ({"text": ["a", "b"], "id": ["x"]}, r'lists of different lengths \("text" 2, "id" 1\)'),
        (
            [{"doc": "d", "body": "b"}],
            r'item 1: "text" must be a string, got nothing; it has "doc", "body": input.columns',
        ),
        ([["A", ["b", 3]]], "item 1 must be a string or an object"),
        ([["The tower", 3]], "item 1 must be a string or an object"),
        ([[{"text": "a"}, True]], "item 1 must be a string or an object"),
        ({"ids": [["x"], ["y"]], "documents": [["a"], ["b"]]}, '"text" must be a string, got nothing'),
        ([{"text": "a", "score": "high"}], '"score" must be a number, got a string'),
        ([{"text": "a", "id": 1.5}], '"id" must be a string or a whole number'),
    ],
)
def test_what_is_no_passage_says_so(given, message):
    with pytest.raises(RecordError, match=message):
        passages_of(given)


def test_a_text_in_brackets_is_a_passage():
    assert passages_of("[1] The tower is old [2].")[0].text == "[1] The tower is old [2]."


# what records look like elsewhere -> the mapping to write, and the first passages that it reads
OUTSIDE = {
    "other names": (
        {"question": "q", "passages": [{"doc_id": "d1", "heading": "H", "body": LONG, "rank_score": 0.4}]},
        {
            "query": "question",
            "contexts": {"path": "passages", "id": "doc_id", "title": "heading", "text": "body", "score": "rank_score"},
        },
        [Passage("d1", LONG, "H", 0.4)],
    ),
    "LangChain": (
        {"input": "q", "context": [{"page_content": LONG, "metadata": {"source": name}} for name in "ab"]},
        {"query": "input", "contexts": {"path": "context", "id": "metadata.source", "text": "page_content"}},
        [Passage("a", LONG), Passage("b", LONG)],
    ),
    "LangChain, one source": (
        {"question": "q", "context": [{"page_content": LONG, "metadata": {"source": "a"}}] * 2},
        {"query": "question", "contexts": {"path": "context", "title": "metadata.source", "text": "page_content"}},
        [Passage("1", LONG, "a"), Passage("2", LONG, "a")],
    ),
    "LangChain, serialized with scores": (
        {
            "input": "q",
            "context": [
                [{"lc": 1, "id": ["Document"], "kwargs": {"page_content": LONG, "metadata": {"source": name}}}, 0.5]
                for name in "ab"
            ],
        },
        {"query": "input", "contexts": {"path": "context", "id": "metadata.source", "text": "page_content"}},
        [Passage("a", LONG, None, 0.5), Passage("b", LONG, None, 0.5)],
    ),
    "LlamaIndex's newer nodes": (
        {"query": "q", "source_nodes": [{"node": {"id_": "n", "text_resource": {"text": LONG}}, "score": 0.5}]},
        {"contexts": {"path": "source_nodes", "id": "node.id_", "text": "node.text_resource.text"}},
        [Passage("n", LONG, None, 0.5)],
    ),
    "Chroma": (
        {
            "question": "q",
            "contexts": {
                "ids": [["x", "y"]],
                "documents": [[LONG, "b"]],
                "metadatas": [[{"page": 1}, None]],
                "distances": [[0.1, 0.4]],
                "embeddings": None,
                "included": ["documents", "metadatas", "distances"],
            },
        },
        {"query": "question", "contexts": {"path": "contexts", "id": "ids", "text": "documents"}},
        [Passage("x", LONG), Passage("y", "b")],
    ),
    "Pinecone": (
        {"question": "q", "matches": [{"id": "m", "score": 0.8, "metadata": {"text": LONG}}]},
        {"query": "question", "contexts": {"path": "matches", "text": "metadata.text"}},
        [Passage("m", LONG, None, 0.8)],
    ),
    "LlamaIndex": (
        {"query": "q", "source_nodes": [{"node": {"id_": "n", "text": LONG, "metadata": {}}, "score": 0.5}]},
        {"contexts": {"path": "source_nodes", "id": "node.id_", "text": "node.text"}},
        [Passage("n", LONG, None, 0.5)],
    ),
    "Haystack": (
        {"query": "q", "documents": [{"id": "h", "content": LONG, "meta": {"name": "N"}, "score": 0.2}]},
        {"contexts": {"path": "documents", "title": "meta.name", "text": "content"}},
        [Passage("h", LONG, "N", 0.2)],
    ),
    "Elasticsearch": (
        {"query": "q", "docs": [{"_id": "e", "_score": 3, "_source": {"text": LONG}}]},
        {"contexts": {"path": "docs", "id": "_id", "text": "_source.text", "score": "_score"}},
        [Passage("e", LONG, None, 3.0)],
    ),
    "SQuAD": (
        {
            "id": "x",
            "title": "T",
            "context": LONG,
            "question": "q",
            "answers": {"text": ["tower"], "answer_start": [8]},
        },
        {"query": "question", "contexts": "context"},
        [Passage("1", LONG)],
    ),
    "HotpotQA on the hub": (
        {"id": "x", "question": "q", "answer": "yes", "context": {"title": ["A"], "sentences": [SENTENCES]}},
        {"query": "question", "contexts": "context", "reference": "answer"},
        [Passage("1", "One. Two.", "A")],
    ),
    "HotpotQA": (
        {"_id": "x", "question": "q", "answer": "yes", "context": [["A", SENTENCES]]},
        {"id": "_id", "query": "question", "contexts": "context", "reference": "answer"},
        [Passage("1", "One. Two.", "A")],
    ),
    "MS MARCO": (
        {"query_id": 3, "query": "q", "passages": {"is_selected": [0, 1], "passage_text": [LONG, "b"]}},
        {"id": "query_id", "contexts": {"path": "passages", "text": "passage_text"}},
        [Passage("1", LONG), Passage("2", "b")],
    ),
    "PubMedQA": (
        {"question": "q", "context": {"contexts": [LONG], "labels": ["X"], "meshes": ["m", "n"]}},
        {"query": "question", "contexts": "context.contexts"},
        [Passage("1", LONG)],
    ),
    "DPR": (
        {"question": "q", "answers": ["a"], "ctxs": [{"id": "1", "title": "t", "text": LONG, "score": "81.2"}]},
        {"query": "question", "contexts": "ctxs"},
        [Passage("1", LONG, "t", 81.2)],
    ),
    "BEIR's queries": ({"_id": "x", "text": "q", "metadata": {}}, {"id": "_id", "query": "text"}, []),
    "names of a language": (
        {"question": "q", "passages": [{"nr": 4, "inhalt": LONG}]},
        {"query": "question", "contexts": {"path": "passages", "text": "inhalt"}},
        [Passage("1", LONG)],
    ),
}


# Parquet has no lists of two types, and no empty structs
MIXED = {"HotpotQA", "BEIR's queries", "LlamaIndex", "LangChain, serialized with scores"}


@pytest.mark.parametrize("write", [write_jsonl, as_parquet, as_arrow])
@pytest.mark.parametrize("name", OUTSIDE)
def test_inspect_offers_the_mapping_that_reads_them(tmp_path, name, write):
    record, mapping, passages = OUTSIDE[name]
    if write is not write_jsonl and name in MIXED:
        pytest.skip("Parquet has no lists of two types, and no empty structs")
    path = tmp_path / "in"
    write(path, [record])
    assert inspect(InputConfig(path=[str(path)])).mapping == mapping
    found = inspect(InputConfig(path=[str(path)], columns=mapping))
    assert found.record.query == "q"
    assert list(found.record.contexts) == passages
    assert found.mapping == {}


def test_inspect_prints_a_mapping_of_passages_that_can_be_pasted(tmp_path):
    record, _, _ = OUTSIDE["other names"]
    write_jsonl(tmp_path / "in.jsonl", [record])
    shown = ragspec("inspect", tmp_path / "in.jsonl")
    (tmp_path / "c.yaml").write_text(shown.stdout + "runner: fake\n")
    done = ragspec("generate", "-c", tmp_path / "c.yaml")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["contexts"], line["context_scores"]) == (["d1"], [0.4])
    assert LONG in line["output"]
    assert "have no passages" not in done.stderr


def test_passages_of_a_csv_cell_are_mapped_too(tmp_path):
    as_delimited(tmp_path / "a.csv", [{"question": "q", "contexts": [{"doc": "d", "body": "b"}]}])
    mapping = {"query": "question", "contexts": {"id": "doc", "text": "body"}}
    (row,) = rows(tmp_path / "a.csv", columns=mapping)
    assert parse_record(row.value, 1).contexts == (Passage("d", "b"),)


@pytest.mark.parametrize(
    ("mapping", "passages"),
    [
        ({"contexts": "docs.body"}, [Passage("1", "a"), Passage("2", "b")]),
        ({"contexts": {"path": "docs", "text": "body"}}, [Passage("x", "a", "T"), Passage("2", "b")]),
        ({"contexts": {"path": "found.docs", "text": "in.text", "title": "in.t"}}, [Passage("1", "c", "U")]),
        ({"contexts": {"path": "found.docs.0", "text": "body"}}, []),
    ],
)
def test_a_path_leads_into_objects_and_lists(mapping, passages):
    value = {
        "query": "q",
        "docs": [{"id": "x", "title": "T", "body": "a"}, {"body": "b"}],
        "found": {"docs": [{"in": {"text": "c", "t": "U"}}]},
    }
    assert list(parse_record(Columns(mapping).of(value), 1).contexts) == passages


def test_a_passage_that_lacks_the_mapped_text_is_that_records_error(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"query": "q", "docs": [{"body": "a"}, {"other": "b"}]}])
    (row,) = rows(tmp_path / "a.jsonl", columns={"contexts": {"path": "docs", "text": "body"}})
    with pytest.raises(RecordError, match='item 2: "text" must be a string, got nothing'):
        parse_record(row.value, 1)


# -- notes -------------------------------------------------------------------------------------------------------------

WITH = {"query": "Why is it so?", "contexts": ["The tower is old."]}
WITHOUT = {"query": "Why is it so?"}
SAYING = "The old tower stands on a hill above the river, and it was built of red stone in 1871."
TEMPLATE = "{% for c in contexts %}{{ c.text }}{% endfor %}{{ query }}"


BESIDE = "2 records have passages beside messages or a prompt; only `query` uses them"
UNREAD = '"Passage" that is not read: see ragspec inspect'


def notes(tmp_path, records, **more):
    write_jsonl(tmp_path / "in.jsonl", records)
    columns = more.pop("columns", {})
    source = {"path": str(tmp_path / "in.jsonl"), "columns": columns}
    raw = {"runner": "fake", "input": source, "output": str(tmp_path / "out.jsonl"), "sampling": {"max_new_tokens": 5}}
    summary = generate(build_config(raw | more))
    return [note for note in summary.notes if "passages" in note]


@pytest.mark.parametrize(
    ("records", "more", "note"),
    [
        ([WITHOUT] * 3, {}, None),
        ([WITH] * 3, {}, None),
        ([WITH, WITH, WITHOUT], {}, "1 of 3 records have no passages"),
        ([WITH, WITHOUT, WITHOUT], {}, None),
        ([WITHOUT] * 3, {"prompt": {"template": TEMPLATE}}, "3 of 3 records have no passages"),
        ([WITHOUT] * 3, {"prompt": {"template": "citations"}}, "3 of 3 records have no passages"),
        ([WITHOUT] * 3, {"prompt": {"template": "{{ query }}!"}}, None),
        ([{**WITHOUT, "docs": []}] * 3, {"columns": {"contexts": "docs"}}, "3 of 3 records have no passages"),
        (
            [{**WITHOUT, "passages": [["a", 3]]}] * 2,
            {},
            '2 of 2 records have no passages; 2 with a field "passages" that is not read: see ragspec inspect',
        ),
        ([{"prompt": "p", "contexts": ["x"]}] * 2, {"prompt": {"template": TEMPLATE}}, BESIDE),
        ([{"messages": [{"role": "user", "content": "p"}], "documents": "x"}] * 2, {}, BESIDE),
        ([{"prompt": "p", "sources": ["https://example.org"], "contexts": []}] * 2, {}, None),
        (
            [WITH, {**WITHOUT, "found_for_you": [{"nr": 3, "inhalt": SAYING}]}, {**WITHOUT, "found": [SAYING]}],
            {},
            '2 of 3 records have no passages; 2 with a field "found_for_you" that is not read: see ragspec inspect',
        ),
        (
            [
                {**WITHOUT, "history": [{"role": "user", "content": SAYING}]},
                {**WITHOUT, "answers": [SAYING]},
                {**WITHOUT, "choices": ["yes", "no", "It is not known when."]},
                {**WITHOUT, "tags": [["a", 3], 7, None, {}]},
                {**WITHOUT, "images": ["https://example.org/" + "a" * 80]},
                {
                    **WITHOUT,
                    "options": [{"label": "A", "text": SAYING}],
                    "incorrect_answers": [SAYING],
                    "steps": [SAYING],
                },
            ],
            {},
            None,
        ),
        ([{**WITHOUT, "hints": [SAYING]}] * 2, {"prompt": {"template": "{{ metadata.hints[0] }} {{ query }}"}}, None),
        ([{"prompt": "p", "chosen": [SAYING]}, {"prompt": "p", "rubric": [{"is": SAYING}]}], {}, None),
        (
            [WITH, {**WITHOUT, "Passage": "text"}, WITHOUT],
            {},
            "2 of 3 records have no passages; 1 with a field " + UNREAD,
        ),
        (
            [WITH] * 2,
            {"prompt": {"template": "{{ query }}!"}},
            "2 records have passages that prompt.template does not use: write a loop over `contexts` into it",
        ),
    ],
)
def test_a_run_says_where_passages_are_missing(tmp_path, records, more, note):
    assert notes(tmp_path, records, **more) == ([note] if note else [])


@pytest.mark.parametrize("limit", [{"prompt": {"max_prompt_tokens": 60}}, {"runner_args": {"context_length": 65}}])
def test_a_run_says_how_many_records_lost_their_only_passages(tmp_path, limit):
    big = {"query": "Why?", "contexts": ["x" * 100]}
    (note,) = notes(tmp_path, [big, big, WITH | {"query": "Why?"}], **limit)
    assert note.startswith("2 of 3 records were answered without passages, because not even their first one fits")
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert [(len(line["contexts"]), len(line.get("dropped_contexts", []))) for line in lines] == [
        (0, 1),
        (0, 1),
        (1, 0),
    ]


@pytest.mark.parametrize("nan", ["nan", "NaN", " -nan "])
def test_a_passage_whose_score_is_not_a_number_has_none(nan):
    """It compares with no other, so that a ranking by scores would depend on where it stands."""
    found = passages_of([{"text": "a", "score": nan}, {"text": "b", "score": "0.5"}])
    assert [passage.score for passage in found] == [None, 0.5]


def test_passages_that_a_template_does_not_use_are_not_said_to_be_in_the_prompt(tmp_path):
    given = {"output": {"path": str(tmp_path / "out.jsonl"), "include": ["contexts"]}}
    notes(tmp_path, [WITH], prompt={"template": "{{ query }}!"}, **given)
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert (line["contexts"], line["passages"]) == ([], [])


def test_a_template_may_write_a_passage_itself(tmp_path):
    notes(
        tmp_path, [WITH], prompt={"template": '{{ contexts | join("+") }}{{ query }}'}, sampling={"max_new_tokens": 90}
    )
    assert "The tower is old." in read_jsonl(tmp_path / "out.jsonl")[0]["output"]
    assert "Passage(" not in read_jsonl(tmp_path / "out.jsonl")[0]["output"]


@pytest.mark.parametrize(
    ("passage", "fields"),
    [
        ({"inhalt": 5 * LONG, "meta": {"from": {"document": "Annual report of 2021, 3"}}}, {"text": "inhalt"}),
        ({"inhalt": 5 * LONG, "documents": ["Annual report of 2021.pdf"]}, {"text": "inhalt"}),
        ({"text": LONG, "meta": {"author": {"name": "Ann", "id": "u1"}, "mood": {"score": 0.3}}}, {}),
        (
            {"_source": {"text": LONG, "meta": {"title": "T"}}, "by": {"author": {"name": "Ann"}}},
            {"title": "_source.meta.title", "text": "_source.text"},
        ),
    ],
)
def test_what_is_nested_in_a_passage_does_not_replace_its_own_fields(passage, fields):
    assert guessed_fields([[passage]]) == fields


def test_names_that_are_ids_are_not_all_searched():
    passages = [{"text": LONG, "links": {f"Q{i}": {"name": "n"}}, f"P{i}": {"of": {}}} for i in range(1000)]
    started = time.perf_counter()
    assert guessed_fields([passages]) == {}
    assert time.perf_counter() - started < 10  # each name in each passage takes minutes


def test_a_mapping_may_name_the_kwargs_of_langchains_serialized_objects(tmp_path):
    passage = {"lc": 1, "id": ["Document"], "kwargs": {"page_content": LONG, "metadata": {"source": "a"}}}
    fields = {"path": "docs", "id": "kwargs.metadata.source", "text": "kwargs.page_content"}
    write_jsonl(tmp_path / "in.jsonl", [{"query": "q", "docs": [passage]}])
    found = inspect(InputConfig(path=[str(tmp_path / "in.jsonl")], columns={"contexts": fields}))
    assert found.record.contexts == (Passage("a", LONG),)
