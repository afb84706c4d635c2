"""Damaged archives and decompression bombs: never a silent end, never a full memory, one line that says where."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
import struct
import zipfile
import zlib
from collections import Counter
from itertools import chain, islice
from pathlib import Path

import zstandard

from tests.campaign.forked import ragspec

RECORDS = 400
MOST_MIB = 700  # a line may have 256 MiB, and is joined from its pieces
PACKED = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress}


def _zip(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in.jsonl", data)
    return file.getvalue()


def campaign(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Read `count` damaged archives, and a bomb for every ten of them; return how they ended."""
    (folder / "c.yaml").write_text("runner: fake\nsampling: {max_new_tokens: 8}\n")
    ends: Counter[str] = Counter(archives=count)
    for number in range(count):
        ends += _damaged(random.Random(f"{seed} archives {number}"), folder)
    chosen = islice(bombs().items(), max(2, count // 10))
    peaks = [_bomb(name, chunks, folder) for name, chunks in chosen]
    return dict(ends) | {"bombs": len(peaks), "largest_peak_mib": round(max(peaks))}


def _damaged(chance: random.Random, folder: Path) -> Counter:
    kind = chance.choice([*PACKED, "zip"])
    name = f"in.{chance.choice(['jsonl', 'CSV', 'parquet'])}.{kind}"
    lines = [json.dumps({"id": f"q{n}", "query": f"Why {chance.random()}?"}).encode() + b"\n" for n in range(RECORDS)]
    pieces = [lines] if kind == "zip" else _split(chance, lines)
    parts = [PACKED.get(kind, _zip)(b"".join(piece)) for piece in pieces]
    whole = b"".join(parts)
    ends = {sum(map(len, parts[:n])) for n in range(len(parts) + 1)}
    cut = chance.random() < 0.6
    if cut:
        at = chance.choice([chance.randrange(1, len(whole)), len(whole) - chance.randrange(1, 12)])
        data = whole[:at]
    else:
        at = chance.randrange(len(whole))
        data = whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :]
    (folder / name).write_bytes(data)
    (folder / "out.jsonl").unlink(missing_ok=True)
    done = ragspec(folder, "generate", "-c", "c.yaml", "-i", name, "-o", "out.jsonl")
    where = f"{kind}, {'cut' if cut else 'flipped'} at {at} of {len(whole)}, exit code {done.code}: {done.stderr}"
    assert done.code in (0, 1, 2), where
    assert "Traceback" not in done.stderr, where
    if cut:
        assert (done.code == 2) == (at not in ends), where  # an archive of whole parts is whole
        written = (folder / "out.jsonl").read_bytes().splitlines() if (folder / "out.jsonl").exists() else []
        assert [json.loads(line)["id"] for line in written] == [f"q{n}" for n in range(len(written))], where
    if done.code == 2:
        assert len(done.lines()) == 1, where
        assert re.search(rf"{name}(/in\.jsonl)?:", done.lines()[0]), where
    return Counter({"refused" if done.code == 2 else "read": 1})


def _split(chance, lines):
    places = sorted(chance.sample(range(1, RECORDS), chance.choice([0, 0, 1, 5])))
    return [lines[begin:end] for begin, end in zip([0, *places], [*places, RECORDS], strict=True)]


def bombs():
    """Return, by file name, what a bomb is made of, piece by piece."""
    mib = bytes(1 << 20)
    wide = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3])  # a window of 2 GiB
    block = struct.pack("<I", (1 << 17) << 3 | 1 << 1)[:3] + b"a"  # 128 KiB of one byte
    return {
        "line.gz": _gz(mib for _ in range(300)),
        "line.zst": _zst(mib for _ in range(300)),
        "line": (mib for _ in range(300)),
        "after-a-good-one.zst": _zst([b'{"query": "Why?"}\n', *(mib for _ in range(300))]),
        "wide.zst": [wide, block * 3000],
        "frames.zst": [zstandard.compress(mib)] * 300,
        "members.gz": [gzip.compress(mib)] * 300,
        "line.bz2": _packed(bz2.BZ2Compressor(), (mib for _ in range(300))),
        "line.xz": _packed(lzma.LZMACompressor(), (mib for _ in range(300))),
        "line.zip": _zipped(mib for _ in range(300)),
        "array.json": chain([b'[{"query": "Why?"}, {"query": "'], (b"x" * (1 << 20) for _ in range(300))),
        "deep.json": chain([b'[{"query": "Why?"}, '], (b"[" * (1 << 20) for _ in range(300))),
        "cell.csv.gz": _gz(chain([b'id,query\n1,"'], (b"x\n" * (1 << 19) for _ in range(300)))),
        "row.csv.gz": _gz(chain([b"id,query\n1,"], (b"x" * (1 << 20) for _ in range(300)))),
    }


def _zipped(chunks):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("in.jsonl", "w") as member:
        for chunk in chunks:
            member.write(chunk)
    yield file.getvalue()


def _packed(packer, chunks):
    yield from map(packer.compress, chunks)
    yield packer.flush()


def _gz(chunks):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    yield from map(packer.compress, chunks)
    yield packer.flush()


def _zst(chunks):
    packer = zstandard.ZstdCompressor(level=9).compressobj()
    yield from map(packer.compress, chunks)
    yield packer.flush()


def _bomb(name: str, chunks, folder: Path) -> float:
    path = folder / f"bomb-{name}"
    with path.open("wb") as file:
        file.writelines(chunks)
    done = ragspec(folder, "generate", "-c", "c.yaml", "-i", path.name, "-o", "/dev/null")
    path.unlink()
    where = f"{name}, {done.peak_mib:.0f} MiB, exit code {done.code}: {done.stderr}"
    if done.code == 1:  # a line that is too long costs its record
        assert "the line has 300 MiB, 256 at most" in done.stderr, where
    else:
        assert done.code == 2, where
        assert len(done.lines()) == 1, where
    assert re.search(rf"{path.name}(/in\.jsonl)?:", done.stderr), where
    assert done.peak_mib < MOST_MIB, where
    return done.peak_mib
