"""Kills and interruptions at random moments: nothing finished is lost, nothing is there twice, totals add up."""

import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.conftest import SAMPLE, read_jsonl, save_llama, train_tokenizer, write_jsonl
from tests.processes import start_interruptible

RECORDS = {"fake": 100, "real": 30}
SHARE = {"fake": 0.75, "real": 0.25}  # of the faults; a real model takes seconds to load
FAKE = """\
runner: fake
runner_args: {batch_size: 6, delay_s: 0.02, reverse: true, fail_ids: [q5, q40]}
"""
REAL = """\
model: %s
sampling: {max_new_tokens: 32}
speculation: {method: context}
runner_args: {engine: ragspec, batch_size: 4, lookahead: 16}
"""
PATIENCE_S = 300


def campaign(count: int, seed: int, folder: Path, model: str | None = None) -> dict[str, int]:
    """Strike `count` times; return how often which way, over how many runs and records. model: a tiny one's folder."""
    totals: Counter[str] = Counter()
    for kind, share in SHARE.items():
        config = folder / f"{kind}.yaml"
        config.write_text(FAKE if kind == "fake" else REAL % (model or _tiny(folder / "tiny")))
        number = 0
        struck = 0
        while struck < max(1, round(count * share)):
            chance = random.Random(f"{seed} faults {kind} {number}")
            job = Job(kind, config, folder / f"{kind}-{number}", chance)
            struck += job.run(min(chance.randrange(1, 9), max(1, round(count * share)) - struck))
            totals += job.totals
            number += 1
    return dict(totals)


def _tiny(folder: Path) -> str:
    texts = [passage["text"] for record in read_jsonl(SAMPLE) for passage in record["contexts"]]
    return save_llama(folder, train_tokenizer(400, texts))


class Job:
    """One output, begun, struck and resumed until it is finished."""

    def __init__(self, kind, config, folder, chance):
        folder.mkdir()
        self.totals = Counter(jobs=1)
        self._chance = chance
        self._out, self._pending = folder / "out.jsonl", folder / "out.pending.jsonl"
        self._stats = folder / "out.stats.json"
        self._error = folder / "stderr.txt"
        self._orders = chance.choice([["input"], ["input"], ["finish"], ["input", "finish"]])
        self._count = RECORDS[kind]
        records = [
            {"id": f"q{n}"} if n % 11 == 3 else {"id": f"q{n}", "query": f"Why is it {n}? " + "Say more. " * (n % 5)}
            for n in range(self._count)
        ]
        source = write_jsonl(folder / "in.jsonl", records)
        self._command = [sys.executable, "-m", "ragspec", "generate", "-c", str(config), "-i", source]
        self._command += ["-o", str(self._out)]
        self._known: set[str] = set()
        self._counted = 0  # answers and failures that statistics tell of, where a run lived to write any
        self._uncounted = 0  # those of runs that were killed

    def run(self, faults: int) -> int:
        """Strike `faults` times at most, then let it finish; return how many struck."""
        struck = 0
        for _ in range(faults):
            how = self._chance.choice([signal.SIGKILL, signal.SIGINT])
            if not self._struck(how):
                break  # it was faster
            struck += 1
            self.totals[how.name] += 1
        self._struck(None)
        self._check_whole()
        self.totals["records"] += self._count
        return struck

    def _struck(self, how) -> bool:
        """Run once more, and let a signal end it; return whether it came in time."""
        self._stats.unlink(missing_ok=True)
        order = self._chance.choice(self._orders)
        with self._error.open("wb") as error:
            process = start_interruptible([*self._command, "--order", order], stderr=error, text=False)
        self.totals["runs"] += 1
        if how is not None:
            self._wait(process)
            process.send_signal(how)
        code = process.wait(PATIENCE_S)
        said = self._error.read_text(errors="replace")
        where = f"{self._out}, {how}, exit code {code}: {said}"
        started = code in (130, 1) and "init_import_site" not in said  # else it was struck before it was ragspec
        if started:
            assert "Traceback" not in said, where
            assert code == 1 or how is signal.SIGINT, where  # 1: some records fail
        else:
            assert how is not None, where
        self._check_kept(where, counted=started)
        return not started or code != 1

    def _wait(self, process):
        """Wait for a moment at random: while it starts, or when some more lines are there."""
        deadline = time.monotonic() + PATIENCE_S
        if self._chance.random() < 0.2:
            time.sleep(self._chance.random() * 3)
            return
        wanted = self._size() + self._chance.randrange(1, 4000)
        while process.poll() is None and self._size() < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(self._chance.random() * 0.03)

    def _size(self):
        return sum(path.stat().st_size for path in (self._out, self._pending) if _exists(path))

    def _lines(self):
        """Return all whole lines on disk by their fingerprints: those of the output, and those that wait."""
        found = {}
        for path in (self._out, self._pending):
            raw = path.read_bytes() if path.exists() else b""
            whole = [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]
            keys = [line["fingerprint"] for line in whole]
            assert len(set(keys)) == len(keys), f"{path}: a line is there twice"
            found |= dict(zip(keys, whole, strict=True))
        return found

    def _check_kept(self, where, *, counted):
        now = self._lines()
        assert self._known <= now.keys(), f"lines are gone; {where}"
        fresh = len(now.keys() - self._known)
        stats = json.loads(self._stats.read_text()) if self._stats.exists() else {}
        if stats.get("state", "running") != "running":  # a killed run leaves those of a moment before
            assert stats["records"] + stats["failed"] == fresh, f"{fresh} new lines, statistics {stats}; {where}"
            assert stats["skipped"] <= len(self._known), where
            self._counted += fresh
        else:
            assert not fresh or not counted, f"{fresh} new lines and no statistics; {where}"
            self._uncounted += fresh
        self._known = set(now)

    def _check_whole(self):
        ids = [json.loads(line)["id"] for line in self._out.read_bytes().splitlines()]
        wanted = [f"q{n}" for n in range(self._count)]
        assert (ids if self._orders == ["input"] else sorted(ids)) == (
            wanted if self._orders == ["input"] else sorted(wanted)
        ), f"{self._out}: {ids}"
        assert self._counted + self._uncounted == self._count, self._out
        left = sorted(path.name for path in self._out.parent.glob("*out*"))
        assert left in (
            ["out.jsonl", "out.run.json", "out.stats.json"],
            ["out.jsonl", "out.run.json"],
        ), f"{self._out}: {left} are left"


def _exists(path):
    return path.exists()
