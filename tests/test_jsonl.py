import gzip

import pytest
import zstandard

from ragspec.errors import ConfigError, RecordError
from ragspec.jsonl import Lines

TEXT = b'{"id": 1}\n\n  \n{"id": 2}\r\n{"id": 3}'


def values(path):
    with Lines(str(path)) as lines:
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
        (b"{", "not valid JSON"),
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
    assert f"{path}:1: " in str(bad)
    assert good == {"id": 2}


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n')
    assert values(path) == [(1, {"id": 1})]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("cut.gz", gzip.compress(TEXT * 50)[:-20]),
        ("no.gz", TEXT),
        ("cut.zst", zstandard.compress(TEXT * 50)[:-6]),
        ("no.zst", TEXT),
    ],
)
def test_damaged_compressed_data_is_an_error_and_never_a_silent_end(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="the compressed data is damaged"):
        values(path)


def test_missing_input_and_folder_are_known_on_opening(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        Lines(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match="is a folder"):
        Lines(str(tmp_path))
