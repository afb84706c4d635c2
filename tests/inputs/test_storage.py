"""Records at addresses: an S3 server and an HTTP server on this machine."""

import functools
import gzip
import http.server
import json
import os
import threading

import pyarrow
import pyarrow.parquet
import pytest

from ragspec.config.io import InputConfig
from ragspec.errors import ConfigError
from ragspec.inputs.sources import files_of, open_source
from tests.cli.test_cli import ragspec
from tests.conftest import write_jsonl
from tests.stores import Breaking, environment

RECORDS = [{"id": f"q{i}", "query": f"Why {i}?", "contexts": ["Because."]} for i in range(5)]


def put(key, data):
    import boto3

    boto3.client("s3").put_object(Bucket="box", Key=key, Body=data)


def lines(records=RECORDS):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(tmp_path, records=RECORDS):
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path.read_bytes()


def read(path, **more):
    with open_source(InputConfig(path=path if isinstance(path, list) else [path], **more)) as source:
        return [row.value for row in source], source.count()


@pytest.fixture
def stored(s3, tmp_path):
    put("in/a.jsonl", lines())
    put("in/b.jsonl.gz", gzip.compress(lines()))
    put("in/c.csv", b"id,query\nq0,Why?\n")
    put("in/d.parquet", table(tmp_path))
    put("in/manifest.json", b"{}")
    put("in/_hidden.jsonl", b"{}")
    return s3


@pytest.mark.parametrize(
    ("name", "count"), [("a.jsonl", None), ("b.jsonl.gz", None), ("d.parquet", 5)], ids=lambda value: str(value)
)
def test_a_file_elsewhere_is_read_as_one_here(stored, name, count):
    assert read(f"s3://box/in/{name}") == (RECORDS, count)


def test_a_table_of_text_elsewhere(stored):
    assert read("s3://box/in/c.csv")[0] == [{"id": "q0", "query": "Why?"}]


def test_folders_and_patterns_elsewhere(stored):
    assert files_of(["s3://box/in/"]) == [
        f"s3://box/in/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.csv", "d.parquet")
    ]
    assert files_of(["s3://box/in/*.jsonl*"]) == [
        "s3://box/in/_hidden.jsonl", "s3://box/in/a.jsonl", "s3://box/in/b.jsonl.gz"
    ]  # fmt: skip
    found, _ = read(["s3://box/in/a.jsonl", "s3://box/in/d.parquet"])
    assert found == RECORDS + RECORDS


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://box/none.jsonl", r"s3://box/none.jsonl: .*no such file or bucket"),
        ("s3://nobox/a.jsonl", r"s3://nobox/a.jsonl: .*bucket does not exist"),
        ("s3://box/none/*.jsonl", "no file matches s3://box/none/"),
        ("nope://x/a.jsonl", "nope:// is not known"),
        ("http://127.0.0.1:9/a.jsonl", "127.0.0.1:9"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(stored, path, message):
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_an_endpoint_may_be_in_the_config(stored):
    with environment(AWS_ENDPOINT_URL="http://127.0.0.1:9"):
        assert read("s3://box/in/a.jsonl", storage_options={"endpoint_url": stored})[0] == RECORDS


def test_a_cut_file_elsewhere_says_so(stored, tmp_path):
    put("cut.parquet", table(tmp_path)[:-20])
    with pytest.raises(ConfigError, match=r"s3://box/cut.parquet: cannot be read as parquet"):
        read("s3://box/cut.parquet")


def test_a_connection_that_breaks_is_taken_up_again(stored):
    put("long.jsonl", lines(RECORDS * 20_000))  # 1 MiB and more: read in several pieces
    broken = []

    def once(direction, data):
        broken.append(direction)
        return direction == "down" and broken.count("down") == 12

    with Breaking(stored, once) as proxy:
        found, _ = read("s3://box/long.jsonl", storage_options={"endpoint_url": proxy.address})
    assert found == RECORDS * 20_000
    assert proxy.broken == 1


def test_the_web(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    handler = functools.partial(Silent, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert read(f"{address}/a.jsonl?part=1")[0] == RECORDS
        many = [{"id": str(i), "query": "x" * 1000} for i in range(12_000)]  # more than is read at once
        write_jsonl(tmp_path / "many.jsonl", many)  # this server does not send parts of files
        assert read(f"{address}/many.jsonl")[0] == many
        with pytest.raises(ConfigError, match="File not found"):
            read(f"{address}/b.jsonl")
    finally:
        server.shutdown()
        server.server_close()


def test_a_credential_that_has_expired_is_said_in_one_line():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Expired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "old", "secret": "hush-hush"}
        with pytest.raises(ConfigError) as caught:
            read("s3://box/a.jsonl", storage_options=options)
    finally:
        server.shutdown()
        server.server_close()
    message = str(caught.value)
    assert message.startswith("s3://box/a.jsonl: ")
    assert "expired" in message
    assert "hush" not in message
    assert "\n" not in message


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


class Expired(Silent):
    """An S3 server that a token has expired for."""

    def do_GET(self):
        body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl", "folder/"])
def test_an_address_without_credentials_is_named_and_so_is_what_is_missing(tmp_path, name):
    nobody = {key: str(tmp_path / "none") for key in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
    env = {**{key: value for key, value in os.environ.items() if not key.startswith("AWS_")}, **nobody}
    (tmp_path / "c.yaml").write_text("runner: fake")
    url = f"s3://bucket/{name}"
    done = ragspec("generate", "-c", tmp_path / "c.yaml", "-i", url, env={**env, "AWS_EC2_METADATA_DISABLED": "true"})
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {url}: cannot be listed (no credentials were found; set them")
    assert "AWS_ACCESS_KEY_ID" in done.stderr
