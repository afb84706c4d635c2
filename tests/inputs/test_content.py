"""The same records whatever they are packed in, encoded in and called: the content says what a file is."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import threading
import tracemalloc
import zipfile

import pytest
import zstandard

from ragspec.config.io import InputConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs import delimited, document
from ragspec.inputs.content import unpacked
from ragspec.inputs.feed import Feed
from ragspec.inputs.sources import open_source
from ragspec.inputs.text import TextSource
from tests.inputs.test_live import PATIENCE_S, Pipe
from tests.inputs.test_tables import as_arrow, as_delimited, as_parquet, as_stream, as_tsv, rows

RECORDS = [
    {"id": "a", "query": "Why is it 日本?", "contexts": ["One, two; three.", "Four\tfive."]},
    {"id": "b", "query": 'He said: "no"\nand left', "contexts": ["Six."]},
    {"id": "c", "query": "x", "contexts": []},
]


def lines(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def zipped(data, name="inner"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def written_by(write):
    def content(tmp_path):
        path = tmp_path / "written"
        write(path, RECORDS)
        data = path.read_bytes()
        path.unlink()
        return data

    return content


PACKINGS = {
    "": bytes,
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": zipped,
    "twice": lambda data: bz2.compress(gzip.compress(data)),
}
FORMATS = {
    "jsonl": lambda _: lines(RECORDS),
    "array": lambda _: json.dumps(RECORDS).encode(),
    "array over lines": lambda _: json.dumps(RECORDS, indent=2).encode(),
    "array, a record per line": lambda _: b"[" + b",\n".join(json.dumps(r).encode() for r in RECORDS) + b"]\n",
    "object": lambda _: json.dumps({"version": 1, "data": RECORDS}).encode(),
    "object over lines": lambda _: json.dumps({"data": RECORDS, "n": [1]}, indent=1).encode(),
    "objects over lines": lambda _: b"\n".join(json.dumps(r, indent=2).encode() for r in RECORDS),
    "csv": written_by(as_delimited),
    "tsv": written_by(as_tsv),
    "semicolons": written_by(lambda path, records: as_delimited(path, records, ";")),
    "parquet": written_by(as_parquet),
    "arrow": written_by(as_arrow),
    "arrow stream": written_by(as_stream),
}
TABLES = ("parquet", "arrow", "arrow stream")
TEXTS = [name for name in FORMATS if name not in TABLES]
NAMES = ["in", "in.jsonl", "IN.JSON", "in.csv", "in.parquet", "in.jsonl.gz", "in.ZST"]
ENCODINGS = {
    "utf-8 with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "utf-16 with a mark": lambda text: text.encode("utf-16"),
    "utf-16, big end": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "utf-16 without a mark": lambda text: text.encode("utf-16-le"),
    "utf-16-be without a mark": lambda text: text.encode("utf-16-be"),
    "utf-32": lambda text: text.encode("utf-32"),
}


def values(path):
    return [row.value for row in rows(path)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_records_are_the_same_in_every_format_and_packing_whatever_the_name(tmp_path, format, packing):
    data = PACKINGS[packing](FORMATS[format](tmp_path))
    for name in NAMES:
        (tmp_path / name).write_bytes(data)
        assert values(tmp_path / name) == RECORDS, name


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("format", TEXTS)
def test_records_are_the_same_in_every_encoding(tmp_path, format, encoding):
    data = ENCODINGS[encoding](FORMATS[format](tmp_path).decode())
    (tmp_path / "in.txt").write_bytes(data)
    assert values(tmp_path / "in.txt") == RECORDS
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(data))
    assert values(tmp_path / "in.csv.gz") == RECORDS


@pytest.mark.parametrize("format", TEXTS)
@pytest.mark.parametrize("packing", [packing for packing in PACKINGS if packing != "zip"])
def test_a_pipe_is_read_in_every_format(tmp_path, format, packing):
    pipe = Pipe(tmp_path / "pipe")
    pipe.write(PACKINGS[packing](FORMATS[format](tmp_path)))
    assert values(tmp_path / "pipe") == RECORDS


@pytest.mark.parametrize("format", ["parquet", "zip"])
def test_what_needs_a_file_says_so_of_a_pipe(tmp_path, format):
    data = PACKINGS["zip"](b"{}") if format == "zip" else FORMATS[format](tmp_path)
    Pipe(tmp_path / "pipe").write(data)
    with pytest.raises(ConfigError, match="cannot be read from a pipe; give the file itself"):
        rows(tmp_path / "pipe")


def take(feed, count):
    """Take `count` rows without waiting for any that come later."""
    found = []
    while len(found) < count:
        found += feed.take(count - len(found), wait=True)
    return [row.value for row in found]


ASKED = {
    "jsonl": (b'{"id": 1}\n', b'{"id": 2}\n', b""),
    "gz": (gzip.compress(b'{"id": 1}\n'), gzip.compress(b'{"id": 2}\n'), b""),
    "zst": (zstandard.compress(b'{"id": 1}\n'), zstandard.compress(b'{"id": 2}\n'), b""),
    "array": (b'[{"id": 1},\n', b'{"id": 2}\n', b"]"),
    "objects over lines": (b'{\n"id": 1}\n', b'{\n"id": 2}\n', b""),
    "csv": (b"query,id\nx,1\n", b"y,2\n", b""),
    "utf-16": ('{"id": 1}\n'.encode("utf-16-le"), '{"id": 2}\n'.encode("utf-16-le"), b""),
}


@pytest.mark.parametrize("format", ASKED)
def test_a_pipe_hands_on_each_record_before_the_next_is_written(tmp_path, format):
    os.mkfifo(tmp_path / "pipe")
    first, second, end = ASKED[format]
    seen = threading.Event()
    waited = []

    def write():
        with open(tmp_path / "pipe", "wb", buffering=0) as file:
            file.write(first)
            waited.append(seen.wait(PATIENCE_S))
            file.write(second + end)

    threading.Thread(target=write, daemon=True).start()
    with TextSource(str(tmp_path / "pipe")) as source:
        feed = Feed(source)
        found = take(feed, 1)
        assert feed.poll() is None  # nothing more has come, and nobody waits for it
        seen.set()
        found += take(feed, 1)
        assert [str(value["id"]) for value in found] == ["1", "2"]
        assert list(feed) == []
    assert waited == [True]


def test_a_pipe_is_not_read_before_somebody_asks(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # open, and silent
    with open_source(InputConfig(path=[str(tmp_path / "pipe")])) as source:
        assert source.count() is None
        assert source.reopen() is None
    os.close(writer)


def test_several_files_of_an_archive_are_one_input(tmp_path):
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("data/b.csv", "id,query\nb,two\n")
        archive.writestr("data/a.jsonl", lines([{"id": "a", "query": "one"}]))
        archive.writestr("README.md", "no records")
        archive.writestr("__MACOSX/data/._a.jsonl", b"\0\0")
    with open_source(str(tmp_path / "in.zip")) as source:
        found = list(source)
        assert [row.value["id"] for row in found] == ["a", "b"]
        assert source.where(1) == f"{tmp_path}/in.zip/data/a.jsonl:1"
        assert source.where(2) == f"{tmp_path}/in.zip/data/b.csv: row 1"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.txt": b"x", "b.txt": b"y"}, "the archive has no file that could be records"),
        ({"[Content_Types].xml": b"<x/>", "xl/workbook.xml": b"<x/>"}, "an Office document, not records; save it as"),
        ({"a.zip": zipped(b"{}")}, "a zip archive inside another archive; unpack it"),
    ],
)
def test_an_archive_without_records_is_one_line(tmp_path, members, message):
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path / "in.zip")


def test_a_damaged_archive_is_one_line_after_what_came_before(tmp_path):
    data = bytearray(zipped(lines([{"id": i, "query": "x" * 50} for i in range(5000)])))
    data[len(data) // 2] ^= 255
    (tmp_path / "in.zip").write_bytes(data)
    with pytest.raises(ConfigError, match=r"in\.zip/inner:\d+: the compressed data is damaged"):
        rows(tmp_path / "in.zip")


@pytest.mark.parametrize("packing", ["gz", "zst", "bz2", "xz"])
def test_rows_before_the_damage_are_read(tmp_path, packing):
    parts = [PACKINGS[packing](lines([{"id": i, "query": "Why?"}])) for i in range(40)]
    (tmp_path / "in").write_bytes(b"".join(parts)[:-5])
    seen = []
    with open_source(str(tmp_path / "in")) as source, pytest.raises(ConfigError, match=r"in:\d+: the compressed data"):
        seen += (row.value["id"] for row in source)
    assert seen[:39] == list(range(39))


SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "The tower is old.",
                    "qas": [
                        {"id": "q1", "question": "What?", "answers": [{"text": "tower", "answer_start": 4}]},
                        {"id": "q2", "question": "Who?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}


@pytest.mark.parametrize("indent", [None, 2])
def test_squads_articles_are_a_row_per_question_as_on_the_hub(tmp_path, indent):
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD, indent=indent))
    first, second = values(tmp_path / "dev.json")
    assert first == {
        "id": "q1",
        "title": "T",
        "context": "The tower is old.",
        "question": "What?",
        "answers": {"text": ["tower"], "answer_start": [4]},
    }
    assert second["answers"] == {"text": [], "answer_start": []}
    assert second["is_impossible"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"query": "a"}, {"query": "b"} {"query": "c"}]', r"in\.json: record 3: not valid JSON \(a comma"),
        ('[{"query": "a"}]]', r"in\.json: record 2: not valid JSON \(\] is not expected\)"),
        ('[{"query": "a"},\n{"query": "b"}', r"in\.json: record 3: the file ends in the middle of it"),
        ('[{"query": "a"},\n{"query": "b', r"in\.json: record 2: the file ends in the middle of it"),
        ('{"data": [{"query": "a"}],\n "n": ', r"in\.json: record 2: the file ends in the middle of it"),
        ('{"data": [{"query": "a"}],\n n: 1}', r"in\.json: record 2: not valid JSON \(a key is missing\)"),
        ('{"data": [{"query": "a"}],\n "n" 1}', r"in\.json: record 2: not valid JSON \(a colon is missing\)"),
        ('{"train": [{"query": "a"}], "test": [{"query": "b"}]}', 'two lists of records, "train" and "test"'),
        ('{"notes": [{"x": "a"}], "query": "b"}\n\n', None),
        ('{"notes": [{"x": "a"}],\n "query": "b"}', 'has "query" next to its list "notes"'),
    ],
)
def test_a_document_that_is_none_is_one_line(tmp_path, text, message):
    (tmp_path / "in.json").write_text(text)
    if message is None:  # a record on a line of its own, whatever else it has
        assert values(tmp_path / "in.json") == [{"notes": [{"x": "a"}], "query": "b"}]
    else:
        with pytest.raises(ConfigError, match=message):
            rows(tmp_path / "in.json")


def test_a_record_over_several_lines_is_one_record(tmp_path):
    record = {"contexts": [{"text": "One."}], "query": "Why?", "passages": [{"x": 1}]}
    (tmp_path / "in.json").write_text(json.dumps(record, indent=2))
    assert values(tmp_path / "in.json") == [record]


def test_items_that_are_no_records_are_error_lines_of_their_own(tmp_path):
    odd = ["5", "null", "[]", '"a, b]"', '{"query": "\\ud800"}', '{"query": NaN}', '{"query": "\\"]}"}', "-1e5"]
    items = ['{"query": "a"}', *odd, '{"query": "b"}']
    (tmp_path / "in.json").write_text(f"[{' ,'.join(items)}]")
    first, *between, last = (row.value for row in rows(tmp_path / "in.json"))
    assert (first, last) == ({"query": "a"}, {"query": "b"})
    assert between[:4] == [5, None, [], "a, b]"]
    assert [isinstance(value, RecordError) for value in between[4:]] == [True, True, False, False]
    assert between[6:] == [{"query": '"]}'}, -1e5]


@pytest.mark.slow
def test_an_array_is_read_in_constant_memory(tmp_path):
    record = json.dumps({"query": "Why?", "contexts": ["x" * 1000]})
    with (tmp_path / "in.json").open("w") as file:
        file.write("[" + ",".join([record] * 20_000) + "]")
    tracemalloc.start()
    try:
        with open_source(str(tmp_path / "in.json")) as source:
            assert sum(1 for _ in source) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_a_record_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "LONGEST", 1 << 20)
    (tmp_path / "in.json").write_text('[{"query": "a"}, {"query": "' + "x" * (4 << 20))
    with pytest.raises(ConfigError, match=r"in\.json: record 2: it is longer than 1 MiB"):
        rows(tmp_path / "in.json")


@pytest.mark.parametrize("quoted", [False, True])
def test_a_csv_without_line_ends_does_not_fill_the_memory(tmp_path, monkeypatch, quoted):
    monkeypatch.setattr(delimited, "WIDEST", 1 << 20)
    data = b"id,query\n1," + (b'"' + b"x\n" * (16 << 20) if quoted else b"x" * (32 << 20))
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(data, 1))
    del data
    tracemalloc.start()
    try:
        with pytest.raises(
            ConfigError, match=r"in\.csv\.gz: row 1: cannot be read \((a line|field) (is longer|larger)"
        ):
            rows(tmp_path / "in.csv.gz")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_line_in_two_is_two_error_lines_among_json_lines(tmp_path):
    (tmp_path / "in.json").write_text('{"id": "x", "query": "a",\n "stop": []}\n{"query": "b"}\n{"query": "c"}\n')
    found = rows(tmp_path / "in.json")
    assert [row.number for row in found] == [1, 2, 3, 4]
    assert [isinstance(row.value, RecordError) for row in found] == [True, True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        b'[1, 2]\n{"query": "a"}\n',
        b'["a", {"query": "b"}\n{"query": "a"}\n',
        b'[{"query": "b"}]\n{"query": "a"}\n',
        b'{\n{"query": "a"}\n',
        b'{"data": [{"query": "b"}]}\n{"query": "a"}\n',
        b'{"query": "cut\n{"query": "a"}\n',
        b'{"query": "cut",\n{"query": "a"}\n',
        b'{"query": "b", "contexts": [\n{"query": "a"}\n',
        b'\0 what\n{"query": "a"}\n',
        b'query, and why?\n{"query": "a"}\n',
    ],
)
def test_a_bad_first_line_of_jsonl_costs_that_line_alone(tmp_path, text):
    (tmp_path / "in.jsonl").write_bytes(text)
    first, second = rows(tmp_path / "in.jsonl")
    assert isinstance(first.value, RecordError) or "query" not in first.value
    assert second.value == {"query": "a"}


@pytest.mark.parametrize("name", ["in", "in.jsonl", "in.csv"])
@pytest.mark.parametrize("content", [b"SQLite format 3\0" + bytes(100), bytes(200), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"])
def test_what_is_no_text_is_one_line_and_not_one_per_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: is neither text nor a supported format"):
        rows(tmp_path / name)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
def test_a_format_that_the_user_names_is_not_guessed(tmp_path, kind):
    other = {"csv": "parquet", "jsonl": "arrow", "parquet": "jsonl", "arrow": "csv"}[kind]
    (tmp_path / "in.csv").write_bytes(FORMATS[other](tmp_path))
    with pytest.raises(ConfigError, match=r"in\.csv: (is an? (Parquet|Arrow) file, not|cannot be read as)"):
        rows(tmp_path / "in.csv", format=kind)


def test_a_folders_files_are_found_in_every_packing(tmp_path):
    (tmp_path / "in").mkdir()
    for place, (packing, pack) in enumerate(PACKINGS.items()):
        ending = {"": "", "twice": ".gz"}.get(packing, f".{packing.upper()}")
        (tmp_path / "in" / f"{place}.JSONL{ending}").write_bytes(pack(lines([{"id": place, "query": "x"}])))
    assert [value["id"] for value in values(tmp_path / "in")] == list(range(len(PACKINGS)))


@pytest.mark.parametrize("packing", [packing for packing in PACKINGS if packing not in ("zip", "")])
def test_a_files_content_is_unpacked_by_what_it_is(packing):
    assert unpacked(PACKINGS[packing](b"text" * 1000)) == b"text" * 1000
    assert unpacked(b"text") == b"text"


def test_a_source_can_be_read_again_unless_it_is_sent(tmp_path):
    for name, data in {"a.jsonl": lines(RECORDS), "a.parquet": FORMATS["parquet"](tmp_path)}.items():
        (tmp_path / name).write_bytes(data)
        with open_source(str(tmp_path / name)) as source:
            next(iter(source))
            with source.reopen() as again:
                assert [row.value for row in again] == RECORDS
