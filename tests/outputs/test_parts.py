"""Outputs that are folders of parts: here, and on an S3 server."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import orjson
import pyarrow.parquet
import pytest
import zstandard

from ragspec.config.io import OutputConfig
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.outputs.codecs import codec_of
from ragspec.outputs.journal import Journal
from ragspec.outputs.target import check_name, target_of
from ragspec.run.generate import generate
from tests.conftest import ROOT, write_jsonl
from tests.outputs.test_journal import IDENTITY, answer
from tests.stores import Breaking, environment

UNPACK = {".jsonl": bytes, ".gz": gzip.decompress, ".zst": lambda data: zstandard.ZstdDecompressor().decompress(data)}
FORMS = ["a.jsonl.zst", "a.jsonl.gz", "a.parquet", "a/"]


class Here:
    """A place for outputs on this machine."""

    def __init__(self, folder):
        self._folder = folder

    def path(self, name):
        return f"{self._folder}/{name}"

    def files(self, name):
        folder = Path(self._folder, name)
        return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.is_file()}

    def put(self, name, data):
        path = Path(self._folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, name):
        Path(self._folder, name).unlink()

    def names(self):
        return sorted(each.name for each in Path(self._folder).iterdir())


class Bucket:
    """The same in a bucket. prefix: of this test's own."""

    def __init__(self, prefix):
        import boto3

        self._prefix = prefix
        self._client = boto3.client("s3")

    def path(self, name):
        return f"s3://box/{self._prefix}/{name}"

    def _keys(self):
        found = self._client.list_objects_v2(Bucket="box", Prefix=f"{self._prefix}/").get("Contents", [])
        return [item["Key"].removeprefix(f"{self._prefix}/") for item in found]

    def files(self, name):
        folder = f"{name.rstrip('/')}/"
        keys = sorted(key for key in self._keys() if key.startswith(folder))
        read = lambda key: self._client.get_object(Bucket="box", Key=f"{self._prefix}/{key}")["Body"].read()  # noqa: E731
        return {key.removeprefix(folder): read(key) for key in keys}

    def put(self, name, data):
        self._client.put_object(Bucket="box", Key=f"{self._prefix}/{name}", Body=data)

    def delete(self, name):
        self._client.delete_object(Bucket="box", Key=f"{self._prefix}/{name}")

    def names(self):
        return sorted({key.partition("/")[0] for key in self._keys()})


@pytest.fixture(params=["here", "s3"])
def place(request, tmp_path):
    if request.param == "here":
        yield Here(tmp_path / "out")
    else:
        request.getfixturevalue("s3")
        with environment(RAGSPEC_CACHE=str(tmp_path / "cache")):
            yield Bucket(hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12])


def lines_of(name, data):
    if name.endswith(".parquet"):
        return pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
    unpack = next(unpack for ending, unpack in UNPACK.items() if name.endswith(ending))
    return [orjson.loads(line) for line in unpack(data).splitlines()]


def parts_of(place, name):
    files = place.files(name)
    return {key: lines_of(key, data) for key, data in files.items() if key.startswith("part-")}


def ids(place, name):
    return [line["id"] for lines in parts_of(place, name).values() for line in lines]


def config_of(place, name, **more):
    return OutputConfig(path=place.path(name), **more)


def journal(place, name, *, part_records=2, identity=IDENTITY, **options):
    return Journal(config_of(place, name, part_records=part_records), identity, **options)


def write(place, name, *keys, **options):
    with journal(place, name, **options) as sink:
        for index, key in enumerate(keys):
            sink.put(index, answer(key))


def check_manifest(place, name):
    files = place.files(name)
    manifest = json.loads(files["_manifest.json"])
    parts = {part["name"]: part for part in manifest["parts"]}
    assert list(parts) == [key for key in files if key.startswith("part-")]
    for key, part in parts.items():
        assert part["records"] == len(lines_of(key, files[key]))
        assert (part["bytes"], part["sha256"]) == (len(files[key]), hashlib.sha256(files[key]).hexdigest())
    assert manifest["records"] == sum(part["records"] for part in parts.values())
    return manifest


@pytest.mark.parametrize("name", FORMS)
def test_lines_become_parts_in_order_with_a_manifest(place, name):
    with journal(place, name) as sink:
        for index in (1, 0, 4, 2, 3):
            sink.put(index, answer(f"q{index}"))
    assert ids(place, name) == [f"q{index}" for index in range(5)]
    assert [len(lines) for lines in parts_of(place, name).values()] == [2, 2, 1]
    assert check_manifest(place, name)["records"] == 5
    assert "_run.json" in place.files(name)


@pytest.mark.parametrize("name", FORMS)
def test_a_run_that_goes_on_knows_what_is_in_parts_and_writes_further_ones(place, name):
    write(place, name, "a", "b", "c")
    with journal(place, name) as sink:
        assert all(f"f-{key}" in sink.ledger for key in "abc")
        sink.put(0, answer("d"))
    assert ids(place, name) == ["a", "b", "c", "d"]
    check_manifest(place, name)


@pytest.mark.parametrize("name", FORMS)
def test_what_was_not_sealed_when_a_run_ended_is_not_lost(place, name):
    with suppress(RuntimeError), journal(place, name) as sink:
        for index, key in enumerate("abc"):
            sink.put(index, answer(key))
        sink.put(7, answer("ahead"))
        raise RuntimeError
    assert ids(place, name) == ["a", "b"]
    assert "_manifest.json" not in place.files(name)
    with journal(place, name) as sink:
        assert all(key in sink.ledger for key in ("f-c", "f-ahead"))
        sink.skip(0, "f-a")
        sink.skip(1, "f-b")
        sink.skip(2, "f-c")
        sink.put(3, answer("d"))
        sink.skip(4, "f-ahead")
    assert ids(place, name) == ["a", "b", "c", "d", "ahead"]
    check_manifest(place, name)


def test_lines_in_a_part_and_in_the_spool_are_there_once(place):
    name = "a.jsonl"
    write(place, f"{name}/", "a", "b")
    target = target_of(config_of(place, f"{name}/"))
    store = target.open()  # as a run leaves it that is killed after it has written a part
    for key in "abc":
        store.append(orjson.dumps(answer(key)) + b"\n")
    store.close()
    with journal(place, f"{name}/") as sink:
        assert "f-c" in sink.ledger
        assert sink.ledger.resumed == 3
    assert ids(place, f"{name}/") == ["a", "b", "c"]


@pytest.mark.parametrize("name", FORMS)
def test_failed_lines_are_left_out_when_they_are_tried_again(place, name):
    failed = {"id": "x", "error": {"type": "RecordError", "message": "m"}, "fingerprint": "f-x"}
    with journal(place, name) as sink:
        for index, line in enumerate([answer("a"), failed, failed | {"id": "y", "fingerprint": "f-y"}]):
            sink.put(index, line)
    assert check_manifest(place, name)["failed"] == 2
    with journal(place, name, retry_failed=True) as sink:
        assert ("f-a" in sink.ledger, "f-x" in sink.ledger, "f-y" in sink.ledger) == (True, False, False)
        sink.put(0, answer("x"))
        sink.put(1, answer("y"))
    assert sorted(ids(place, name)) == ["a", "x", "y"]
    assert check_manifest(place, name)["failed"] == 0


@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_resumed_is_kept_as_a_copy(place, name):
    write(place, name, "a", "b", "c")
    write(place, name, "d", resume=False)
    write(place, name, "e", resume=False)
    bare = name.rstrip("/")
    assert place.names() == [bare, f"{bare}.1", f"{bare}.2"]
    assert [ids(place, each) for each in place.names()] == [["e"], ["a", "b", "c"], ["d"]]


def test_another_config_or_format_does_not_mix(place):
    write(place, "a/", "a")
    with pytest.raises(ConfigError, match="was started with a different config: model"):
        journal(place, "a/", identity={"model": "other"})
    with pytest.raises(ConfigError, match=r"part-00000.jsonl.zst, and this run would write parts that end in .parquet"):
        Journal(config_of(place, "a/", format="parquet"), IDENTITY)


def test_a_part_that_is_there_with_other_lines_is_another_runs(place):
    with journal(place, "a/") as sink:
        sink.put(0, answer("a"))
        place.put("a/part-00000.jsonl.zst", b"something else")
        with pytest.raises(ConfigError, match=r"part-00000.jsonl.zst: .*another run is writing this output"):
            sink.put(1, answer("b"))
        place.delete("a/part-00000.jsonl.zst")


def test_a_damaged_part_is_named(place):
    write(place, "a/", "a")
    place.put("a/part-00000.jsonl.zst", b"\x28\xb5\x2f\xfdjunk")
    with pytest.raises(ConfigError, match=r"part-00000.jsonl.zst: .*compressed data is damaged .*delete that part"):
        journal(place, "a/")
    place.delete("a/part-00000.jsonl.zst")
    with journal(place, "a/") as sink:
        assert sink.ledger.resumed == 0, "its records are answered again"


@pytest.mark.parametrize("content", [b"", b"{}\n"])
def test_a_file_where_the_folder_would_be_is_named(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.parquet: is a file, and this run would write a folder of parts"):
        Journal(OutputConfig(path=str(tmp_path / "a.parquet")), IDENTITY)
    assert (tmp_path / "a.parquet").read_bytes() == content


def test_two_runs_on_this_machine_cannot_write_one_output(place):
    with journal(place, "a/"), pytest.raises(ConfigError, match="another run is writing it"):
        journal(place, "a/")


def test_a_bucket_that_is_not_there_is_named_before_anything_is_answered(s3, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "p"}])
    raw = {"runner": "fake", "input": source, "output": "s3://nobox/a/"}
    with environment(RAGSPEC_CACHE=str(tmp_path)), pytest.raises(ConfigError, match=r"s3://nobox/a.*bucket does not"):
        generate(build_config(raw))


def test_a_store_that_does_not_answer_is_named_without_what_it_was_told(s3, tmp_path):
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "hush-hush"}
    raw = {
        "runner": "fake",
        "input": write_jsonl(tmp_path / "in.jsonl", [{"prompt": "p"}]),
        "output": {"path": "s3://box/no/", "storage_options": options},
    }
    with environment(RAGSPEC_CACHE=str(tmp_path)), pytest.raises(ConfigError) as caught:
        generate(build_config(raw))
    message = str(caught.value)
    assert message.startswith("s3://box/no")
    assert "127.0.0.1:9" in message
    assert "hush" not in message
    assert "\n" not in message


class Once:
    """Breaks the connection that uploads a part, once. answer: after the part was stored, before the answer arrives."""

    def __init__(self, answer):
        self._answer = answer
        self._asked = self._done = False

    def __call__(self, direction, data):
        if direction == "up" and b"PUT" in data and b"part-00001" in data:
            self._asked = True
        breaks = self._asked and not self._done and direction == ("down" if self._answer else "up")
        self._done |= breaks
        return breaks


@pytest.mark.parametrize("answer_lost", [False, True])
def test_an_upload_that_breaks_is_sent_again_and_nothing_is_doubled(s3, tmp_path, answer_lost):
    place = Bucket(f"broken-{answer_lost}")
    with Breaking(s3, Once(answer_lost)) as proxy, environment(RAGSPEC_CACHE=str(tmp_path)):
        options = {"endpoint_url": proxy.address}
        with Journal(config_of(place, "a/", part_records=2, storage_options=options), IDENTITY) as sink:
            for index in range(7):
                sink.put(index, answer(f"q{index}"))
    assert proxy.broken == 1
    assert ids(place, "a/") == [f"q{index}" for index in range(7)]
    assert check_manifest(place, "a/")["records"] == 7


@pytest.mark.parametrize(
    ("path", "format", "ending"),
    [
        ("a.jsonl.gz", "auto", ".jsonl.gz"),
        ("a.zst", "auto", ".jsonl.zst"),
        ("s3://b/a.jsonl", "auto", ".jsonl"),
        ("s3://b/a", "auto", ".jsonl.zst"),
        ("a/", "parquet", ".parquet"),
        ("a.parquet", "auto", ".parquet"),
        ("A.JSONL.GZ", "auto", ".jsonl.gz"),
        ("s3://b/A.NDJSON", "auto", ".jsonl"),
        ("a.Parquet/", "auto", ".parquet"),
    ],
)
def test_a_name_says_how_parts_are_written(path, format, ending):
    assert codec_of(path, format).ending == ending


def test_a_format_that_the_name_denies_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"output.format: openai, but .*a.parquet ends in .parquet"):
        target_of(OutputConfig(path=str(tmp_path / "a.parquet"), format="openai"))


REFUSED = [
    *("a.tsv", "a.json", "a.xlsx", "a.arrow", "a.feather", "a.bz2", "a.jsonl.xz", "a.jsonl.ZIP"),
    *(
        "a.csv.gz",
        "a.json.zst",
        "a.parquet.gz",
        "a.tar.gz",
        "a.csv/",
        "s3://bucket/a.csv",
        "a.sqlite",
        "a.html",
        "a.yaml",
    ),
]


@pytest.mark.parametrize("path", REFUSED)
def test_a_name_that_promises_another_format_is_refused_before_anything_is_read(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        generate(build_config({"runner": "fake", "input": "nowhere.jsonl", "output": path}))
    assert str(caught.value).startswith(f"{path}: cannot write .")
    assert "files; choose one of NAME.jsonl, NAME.jsonl.gz" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["a.jsonl", "a.JSONL", "a.ndjson", "a", "a.txt", "a.v2", "OUT #1.jsonl", "a.out", "a.csv.jsonl"]
)
def test_a_name_that_promises_nothing_else_is_a_file_of_lines(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"id": "a", "query": "Why?"}')
    generate(build_config({"runner": "fake", "input": "in.jsonl", "output": path}))
    assert orjson.loads((tmp_path / path).read_bytes())["id"] == "a"


@pytest.mark.parametrize("format", ["jsonl", "openai"])
def test_lines_may_be_called_json_where_the_config_asks_for_them(tmp_path, format):
    check_name(OutputConfig(path=str(tmp_path / "a.json"), format=format))


def test_parquet_under_the_name_of_lines_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"output\.format: parquet, but .*a\.jsonl ends in \.jsonl"):
        check_name(OutputConfig(path=str(tmp_path / "a.jsonl"), format="parquet"))


def test_an_output_of_another_name_that_was_begun_goes_on(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot write \.json files"):
        check_name(OutputConfig(path=str(tmp_path / "a.json")))
    (tmp_path / "a.json.run.json").write_text("{}")
    check_name(OutputConfig(path=str(tmp_path / "a.json")))


RECORDS = [
    {"id": f"q{i}", "query": f"question {i}", "contexts": [{"id": "d", "text": "t", "score": 1.5}]} for i in range(7)
]


def test_a_run_of_the_command_killed_at_any_time_goes_on(place, tmp_path):
    """The lines of all parts are those of one appended file, whatever happened in between."""
    source = write_jsonl(tmp_path / "in.jsonl", [*RECORDS, {"id": "bad"}])
    raw = {"runner": "fake", "runner_args": {"delay_s": 0.05, "batch_size": 1}, "input": source}
    generate(build_config(raw | {"output": str(tmp_path / "one.jsonl")}))
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(raw | {"output": {"path": place.path("parts/"), "part_records": 2}}))
    command = [sys.executable, "-m", "ragspec", "generate", "--config", str(config)]
    for seconds in (1.2, 1.5):
        with suppress(subprocess.TimeoutExpired):  # and so killed
            subprocess.run(command, cwd=ROOT, env=os.environ, timeout=seconds, capture_output=True, check=False)
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, check=False, text=True)
    assert done.returncode == 1, done.stderr  # one record is bad
    one = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    found = [line for lines in parts_of(place, "parts/").values() for line in lines]
    timings = ("latency_s", "time_to_first_token_s")
    assert [{k: v for k, v in line.items() if k not in timings} for line in found] == [
        {k: v for k, v in line.items() if k not in timings} for line in one
    ]
    assert check_manifest(place, "parts/")["failed"] == 1
    assert json.loads(place.files("parts/")["_stats.json"])["records"] <= 7


def test_parquet_says_what_lines_say(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [*RECORDS, {"id": "bad", "topic": "x"}])
    raw = {"runner": "fake", "input": source, "sampling": {"logprobs": 1, "max_new_tokens": 2}}
    generate(build_config(raw | {"output": str(tmp_path / "one.jsonl")}))
    generate(build_config(raw | {"output": str(tmp_path / "a.parquet")}))
    rows = pyarrow.parquet.read_table(tmp_path / "a.parquet" / "part-00000.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row, line in zip(rows, lines, strict=True):
        for key in ("metadata", "logprobs"):
            row[key] = None if row[key] is None else json.loads(row[key])
        told = {key: value for key, value in row.items() if value is not None}
        line.pop("time_to_first_token_s", None)
        if "speculation" in line:  # what is null in a line is null in a column
            line["speculation"] = {k: line["speculation"].get(k) for k in told["speculation"]}
        assert told == {key: value for key, value in line.items() if value is not None}


def test_parts_are_not_read_as_records_by_the_next_run(place, tmp_path):
    """Whatever way the input names the place of the output."""
    ask = {"runner": "fake"}
    for name in ("in/answers/", "in/"):
        with pytest.raises(ConfigError, match="is inside the input's folder"):
            generate(build_config(ask | {"input": made(place, "in"), "output": place.path(name)}))
    source = f"{place.path('in')}/**/*.zst"
    made(place, "in")
    output = {"output": place.path("in/answers/"), "input": source}
    target_of(config_of(place, "in/answers/")).open().close()
    write(place, "in/answers/", "a")
    with pytest.raises(ConfigError, match=r"contains the input .*part-00000.jsonl.zst"):
        generate(build_config(ask | output))


def made(place, name):
    """Return the path of a folder with records."""
    data = zstandard.ZstdCompressor().compress(b'{"id": "a", "prompt": "p"}\n')
    place.put(f"{name}/records.jsonl.zst", data)
    return place.path(name)


def test_a_folder_of_somebody_elses_is_not_written_to(place):
    made(place, "site")
    place.put("site/_manifest.json", b'{"name": "site"}')
    with pytest.raises(ConfigError, match=r"site/: already has _manifest.json, but no _run.json written by ragspec"):
        journal(place, "site/")
    assert place.files("site/")["_manifest.json"] == b'{"name": "site"}'


def test_a_folder_of_an_older_version_is_not_started_over(place):
    write(place, "a.jsonl.zst", "a")
    place.put("a.jsonl.zst/run.json", place.files("a.jsonl.zst")["_run.json"])
    place.delete("a.jsonl.zst/_run.json")
    with pytest.raises(ConfigError, match=r"a.jsonl.zst: its run.json is of ragspec 0.2 .* rename it to _run.json"):
        journal(place, "a.jsonl.zst")
    assert ids(place, "a.jsonl.zst") == ["a"]


def test_pandas_reads_a_folder_of_parts_as_one_table(tmp_path):
    import pandas

    with Journal(OutputConfig(path=f"{tmp_path}/a.parquet", part_records=2), IDENTITY) as sink:
        for index in range(5):
            sink.put(index, answer(f"q{index}"))
    assert pandas.read_parquet(tmp_path / "a.parquet")["id"].tolist() == [f"q{index}" for index in range(5)]


def test_the_folder_that_one_is_in_may_be_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in "ab":
        with Journal(".", IDENTITY, resume=False) as sink:
            sink.put(0, answer(key))
    assert (tmp_path.with_name(f"{tmp_path.name}.1") / "part-00000.jsonl.zst").is_file()


def test_the_same_address_elsewhere_has_a_spool_of_its_own(s3, tmp_path):
    with environment(RAGSPEC_CACHE=str(tmp_path)):
        spools = [
            target_of(OutputConfig(path="s3://box/a/", storage_options=options)).pending
            for options in ({}, {"endpoint_url": "http://127.0.0.1:9"}, {"client_kwargs": {"endpoint_url": "x"}})
        ]
    assert len(set(spools)) == 3


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_slash_at_the_end_changes_nothing(tmp_path, slash):
    assert codec_of(f"{tmp_path}/a.parquet{slash}").ending == ".parquet"
    with pytest.raises(ConfigError, match=r"ends in \.parquet"):
        target_of(OutputConfig(path=f"{tmp_path}/a.parquet{slash}", format="openai"))


def test_an_address_of_this_machine_is_a_path(tmp_path):
    with Journal(f"file://{tmp_path}/a%20b/", IDENTITY) as sink:
        sink.put(0, answer("a"))
    assert (tmp_path / "a b" / "part-00000.jsonl.zst").is_file()


def test_a_store_without_exclusive_files_gets_whole_ones():
    import fsspec

    for key in "ab":
        with Journal(OutputConfig(path="memory://deep/er/", part_records=1), IDENTITY) as sink:
            sink.put(0, answer(key))
    names = sorted(name.rpartition("/")[2] for name in fsspec.filesystem("memory").ls("/deep/er", detail=False))
    assert names == ["_manifest.json", "_run.json", "part-00000.jsonl.zst", "part-00001.jsonl.zst"]


def test_a_damaged_gzip_part_is_named(place):
    write(place, "a.jsonl.gz", "a")
    data = bytearray(place.files("a.jsonl.gz")["part-00000.jsonl.gz"])
    data[12:20] = b"\xff" * 8
    place.put("a.jsonl.gz/part-00000.jsonl.gz", bytes(data))
    with pytest.raises(ConfigError, match=r"part-00000.jsonl.gz: .*the compressed data is damaged"):
        journal(place, "a.jsonl.gz")


def test_a_signed_address_is_never_written(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "p"}])
    signed = "https://127.0.0.1:9/in.jsonl?X-Goog-Signature=abcdef0123456789&X-Amz-Security-Token=fedcba9876543210"
    with pytest.raises(ConfigError) as caught:
        generate(build_config({"runner": "fake", "input": signed, "output": str(tmp_path / "a.jsonl")}))
    written = str(caught.value) + json.dumps(build_config({"runner": "fake", "input": signed}).model_dump(mode="json"))
    assert "127.0.0.1:9/in.jsonl" in written
    assert "abcdef0123456789" not in written
    assert "fedcba9876543210" not in written
    with environment(PLACE=str(tmp_path)):  # a ${NAME} may be part of a path
        summary = generate(build_config({"runner": "fake", "input": source, "output": "${PLACE}/b.jsonl"}))
    assert summary.records == 1
    assert (tmp_path / "b.jsonl").is_file()
