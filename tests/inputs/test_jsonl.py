import bz2
import gzip
import io
import lzma
import tracemalloc

import pytest
import zstandard

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs import text as jsonl
from ragspec.inputs.content import FEED, ZstReader
from ragspec.inputs.text import TextSource
from tests.conftest import wide

TEXT = b'{"id": 1}\n\n  \n{"id": 2}\r\n{"id": 3}'


def values(path):
    with TextSource(str(path), format="jsonl") as lines:
        return [(line.number, line.value) for line in lines]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_all_three_formats_give_the_same_lines_and_skip_empty_ones(tmp_path, suffix):
    path = tmp_path / f"in.jsonl{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path.write_bytes(pack(TEXT))
    assert values(path) == [(1, {"id": 1}), (4, {"id": 2}), (5, {"id": 3})]


def test_several_zst_frames_in_one_file_are_read_to_the_end(tmp_path):
    path = tmp_path / "in.zst"
    path.write_bytes(zstandard.compress(b'{"id": 1}\n') + zstandard.compress(b'{"id": 2}\n'))
    assert len(values(path)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON (the line ends too early: cut off?)"),
        (b'{"id": "q1", "query": "why', "the line ends "),
        (b'{"id": "q1", "query": "why\n', "(the line ends inside a string: cut off?)"),
        (b'{"id": "q1", "query": "a\tb"}\n', "unexpected control character in string"),
        (b'"\xff"', "byte 2 is 0xff"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'"\\ud800"', "not valid"),
    ],
)
def test_a_bad_line_is_a_value_that_says_why_and_the_next_line_comes(tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_bytes(line + b'\n{"id": 2}\n')
    (_, bad), (_, good) = values(path)
    assert isinstance(bad, RecordError)
    assert message in str(bad)
    assert good == {"id": 2}


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n')
    assert values(path) == [(1, {"id": 1})]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("cut.gz", gzip.compress(TEXT * 50, mtime=0)[:-20]),
        ("no.gz", b"\x1e" + gzip.compress(TEXT, mtime=0)[1:]),
        ("cut.zst", zstandard.compress(TEXT * 50)[:-6]),
        ("no.zst", b"\x29" + zstandard.compress(TEXT)[1:]),
        ("cut.bz2", bz2.compress(TEXT * 50)[:-6]),
        ("flipped.bz2", bz2.compress(TEXT * 50).replace(b"1AY&SY", b"1AY&SY\x00", 1)),
        ("cut.xz", lzma.compress(TEXT * 50)[:-6]),
        ("cut-at-once.gz", gzip.compress(TEXT, mtime=0)[:3]),
    ],
)
def test_damaged_compressed_data_is_an_error_and_never_a_silent_end(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="the compressed data is damaged"):
        values(path)


def test_missing_input_and_folder_are_known_on_opening(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        TextSource(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match="is a folder"):
        TextSource(str(tmp_path))


PACKED = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", *wide(*filter(None, PACKED))])
def test_a_line_without_an_end_is_an_error_with_its_number_and_not_a_full_memory(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(jsonl, "LONGEST", 4 << 20)
    monkeypatch.setattr(jsonl, "ENDLESS", 64 << 20)
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(PACKED[suffix](b'{"id": 1}\n' + bytes(256 << 20)))
    seen = []
    tracemalloc.start()
    try:
        with (
            TextSource(str(path), format="jsonl") as lines,
            pytest.raises(ConfigError, match=r":2: the line is longer than 0 GiB"),
        ):
            seen += lines
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert [line.value for line in seen] == [{"id": 1}]
    assert peak < 96 << 20


@pytest.mark.parametrize("more", [0, 1])
def test_the_bound_on_a_line_is_exact(tmp_path, monkeypatch, more):
    monkeypatch.setattr(jsonl, "LONGEST", 3 << 20)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'"%s"\n{}\n' % (b"x" * ((3 << 20) - 3 + more)))
    found = dict(values(path))
    assert found.keys() == {1, 2}
    assert isinstance(found[1], RecordError) == bool(more)


def test_a_line_that_is_too_long_is_that_lines_error_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LONGEST", 3 << 20)
    path = tmp_path / "in.jsonl"
    first, second = (b'{"query": "%s"}\n' % (letter * (5 << 20)) for letter in (b"x", b"y"))
    path.write_bytes(b'{"id": 1}\n' + first + second + first + b'{"id": 3}\n')
    with TextSource(str(path), format="jsonl") as lines:
        rows = list(lines)
    assert [row.number for row in rows] == [1, 2, 3, 4, 5]
    assert [row.value for row in rows if isinstance(row.value, dict)] == [{"id": 1}, {"id": 3}]
    assert "the line has 5 MiB, 3 at most; one record per line" in str(rows[1].value)
    assert rows[1].raw == rows[3].raw != rows[2].raw, "a resumed run knows the line by its content"
    assert len(rows[1].raw) < 64


def test_no_more_of_an_archive_is_decompressed_than_is_read():
    """What waits between the decompressor and its reader is bounded: else reading is quadratic, and a bomb goes off."""
    packed = io.BytesIO(zstandard.compress(b'{"id": 1, "query": "always the same"}\n' * 2_000_000, 19))
    assert len(packed.getvalue()) > 3 * FEED
    reader = ZstReader(packed)
    assert reader.read(10) == b'{"id": 1, '
    assert packed.tell() <= FEED


def test_a_frame_that_wants_absurd_memory_is_refused(tmp_path):
    path = tmp_path / "wide.zst"
    window = (31 - 10) << 3  # of 2 GiB
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + b"\x53\x00\x00a")
    with pytest.raises(ConfigError, match=r"wide.zst:1: .* needs more than 128 MiB to be decompressed"):
        values(path)


PACK = {"zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress}


@pytest.mark.parametrize("cut", [1, 2, 5, 9, 13])
@pytest.mark.parametrize("packing", PACK)
def test_an_archive_cut_in_its_last_frame_is_noticed_wherever_the_cut_is(tmp_path, packing, cut):
    path, pack = tmp_path / f"in.{packing}", PACK[packing]
    path.write_bytes(pack(b'{"id": 1}\n') * 200 + pack(b'{"id": 2}\n')[:-cut])
    with pytest.raises(ConfigError, match=rf"in.{packing}:\d+: the compressed data is damaged"):
        values(path)


@pytest.mark.parametrize("packing", PACK)
def test_a_frame_that_does_not_begin_like_one_is_no_silent_end(tmp_path, packing):
    path, pack = tmp_path / f"in.{packing}", PACK[packing]
    path.write_bytes(pack(b'{"id": 1}\n') + b"\x01" + pack(b'{"id": 2}\n')[1:])
    with pytest.raises(ConfigError, match=rf"in.{packing}:2: the compressed data is damaged"):
        values(path)


def test_zeros_may_stand_between_the_streams_of_an_xz_file(tmp_path):
    (tmp_path / "in.xz").write_bytes(
        lzma.compress(b'{"id": 1}\n') + bytes(8) + lzma.compress(b'{"id": 2}\n') + bytes(4)
    )
    assert len(values(tmp_path / "in.xz")) == 2


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\x1e", b""])
def test_a_mark_is_no_part_of_a_lines_text(tmp_path, mark):
    path = tmp_path / "in.jsonl"
    path.write_bytes((mark + b' {"a": 1} \n') * 2)
    with TextSource(str(path), format="jsonl") as lines:
        assert [(line.text, line.value) for line in lines] == [(b' {"a": 1} ', {"a": 1})] * 2
