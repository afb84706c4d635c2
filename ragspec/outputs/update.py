"""An output that is updated: which of its lines still answer their records, and what takes the place of the others.

New lines wait in `answers.update.jsonl` until all are there; only then is the output rewritten. So a run that is killed
leaves an output that is whole, and new lines that the next `--update` takes up if they still answer their records.
Limit: about half a kilobyte of memory for each line of the output.
"""

from __future__ import annotations

import os
import shutil
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from ragspec.config.io import OutputConfig
from ragspec.errors import ConfigError
from ragspec.json_text import dumps, loads
from ragspec.outputs.base import Store
from ragspec.outputs.ledger import Finished, Ledger
from ragspec.outputs.line_file import LineFile, Spill, SpillPosition, free_number
from ragspec.outputs.run_state import differences, same_model, same_run
from ragspec.outputs.target import Target, opening_errors, target_of
from ragspec.stats import Spent

Why = Literal["new", "failed", "model", "record", "prompt", "passages", "sampling", "bad"]
REASONS: dict[Why, str] = {
    "new": "new",
    "record": "changed in the input",
    "passages": "with other passages",
    "prompt": "with another prompt",
    "sampling": "with other sampling",
    "model": "with another model or dtype",
    "failed": "failed before",
    "bad": "unreadable, too long or without a question",
}


AT_TIMES = ("context_scores", "dropped_contexts")  # fields of some answers only


class RowRequest(NamedTuple):
    """What a row of the input asks now.

    key: its fingerprint. id: "" if this very config has answered it. request: the digest of what the model is asked,
    "" also if nothing can be asked. shown: what lines show of the record, as JSON, for one that answered another row.
    named: whether it is known which record it is; a line that is cut off may have been any.
    """

    key: str
    id: str = ""
    request: str = ""
    shown: bytes = b"{}"
    named: bool = True


class Stamp(NamedTuple):
    """What a line gets that answers another row than the one that it was written for."""

    key: str
    id: str
    shown: bytes

    def on(self, line: bytes) -> bytes:
        """Return the line as the answer of that row."""
        value, shown = loads(line.removeprefix(BOM_UTF8)), loads(self.shown)
        names = dict(zip(value.get("contexts") or (), shown.get("contexts") or (), strict=False))
        value |= {"id": self.id, "fingerprint": self.key}
        if "output" in value:
            value = {name: each for name, each in value.items() if name in shown or name not in AT_TIMES}
            value |= {name: each for name, each in shown.items() if name in value or name in AT_TIMES}
        for span in value.get("copied") or ():
            span["context"] = names.get(span["context"], span["context"])
        return dumps(value) + b"\n"


STAYS = Stamp("", "", b"")  # of a line that does not change


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that is there. place: its number in the output, None in the file of new lines, at `position` there."""

    found: Finished
    place: int | None
    position: SpillPosition | None = None


@dataclass(slots=True)
class UpdatePlan:
    """What an update answers. again: (id, why) of those records; kept: how many answers stay.

    left: ids of the answers whose records left the input. pruned: whether these are removed. copy: where the old
    output is kept because these are more than half of it.
    """

    kept: int = 0
    again: list[tuple[str, Why]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    pruned: bool = False
    most: bool = False
    copy: str = ""

    def __str__(self) -> str:
        counts = Counter(why for _, why in self.again)
        reasons = ", ".join(f"{counts[why]:,} {text}" for why, text in REASONS.items() if counts[why])
        total = self.kept + len(self.again)
        told = f"update: {len(self.again):,} of {total:,} records to answer{f' ({reasons})' if reasons else ''}"
        told += f", {self.kept:,} stay as they are"
        if self.left:
            one = len(self.left) == 1
            stay = f"{'stays' if one else 'stay'} too (--prune removes {'it' if one else 'them'})"
            removed = f"{'is' if one else 'are'} removed"
            whose = "answer of a record that" if one else "answers of records that"
            told += f"; {len(self.left):,} {whose} left the input {removed if self.pruned else stay}"
        if self.most:
            told += f": more than half of all{f', so the old output is kept as {self.copy}' if self.copy else ''}"
        return told


def updated_target(output: OutputConfig) -> Target | None:
    """Return the target of an output that can be updated, None if it has no lines yet.

    Raises ConfigError for an output of another kind.
    """
    target = target_of(output)
    if target is None:
        raise ConfigError(f"--update: {output.path} cannot be updated; give a file with --output")
    if output.format == "openai":
        raise ConfigError("--update: OpenAI's batch lines cannot be updated; choose another output.format")
    if not target.begun() and not target.pending.exists() and not target.updates.exists():
        return None
    began = target.state.read().get("config")
    if not isinstance(began, dict):
        raise ConfigError(f"--update: {target.name} is not an output of `ragspec generate`; choose another --output")
    if began.get("output_format"):
        raise ConfigError(f"--update: {target.name} has OpenAI's batch lines, which cannot be updated")
    return target


def opened_update(
    target: Target, identity: dict[str, Any], *, retry_failed: bool = False, keep_old: bool = False, dry: bool = False
) -> Update:
    """Return the update of an output; arguments as Update's. Raises ConfigError.

    keep_old: keep the output as it was, before the first of an update's runs, as NAME.1, NAME.2, ...
    """
    with opening_errors(target.name):
        fresh = not (target.updates.exists() and target.updates.stat().st_size)
        return Update(target, identity, retry_failed=retry_failed, keep_old=keep_old and fresh, dry=dry)


class Update:
    """An output while it is updated; a Sink (base.py) for the new lines.

    Args:
        target: An output with lines.
        identity: The config that answers from now on.
        retry_failed: Error lines do not stay.
        keep_old: Keep a copy of the output before it answers anything.
        dry: Only look: write nothing.

    Raises:
        OSError: The output cannot be opened; BlockingIOError if another run has it.
    """

    def __init__(
        self,
        target: Target,
        identity: dict[str, Any],
        *,
        retry_failed: bool = False,
        keep_old: bool = False,
        dry: bool = False,
    ) -> None:
        self.target = target
        self.ledger = Ledger()
        self.plan = UpdatePlan()
        self._identity = identity
        self._retry_failed = retry_failed
        self._keep_old = keep_old
        self._begun = self._closed = False
        self._configs = target.state.configs()
        self._same_run = lru_cache(None)(lambda config: self._compares(config, same_run))
        self._same_model = lru_cache(None)(lambda config: self._compares(config, same_model))
        self._whys = lru_cache(None)(self._why_prompt)
        self._news: LineFile | None = None
        self._lines: list[_Line] = []
        self._actions: dict[int, Stamp | str | None] = {}  # of a line's place: a stamp, a row's key, None to remove it
        self._fresh: dict[str, tuple[SpillPosition, Stamp | None]] = {}  # new lines by their rows' keys
        self._awaited: set[str] = set()  # keys of the rows to answer
        self._order: list[str] = []  # keys of the rows whose lines are new, in the order of the input
        with ExitStack() as opened:
            self._store: Store = target.open()
            opened.callback(self._store.close)
            if not dry:
                self._news = LineFile(target.updates)
                opened.callback(self._news.close)
            self._read_lines()
            opened.pop_all()
        if not any(line.found.key is not None for line in self._lines) and self._lines:
            self.close()
            raise ConfigError(f"--update: {target.name} has no lines written by ragspec; choose another --output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read_lines(self) -> None:
        """Read what every line answers. Lines that waited for earlier ones join the new ones."""
        self._lines = [_Line(found, place) for place, found in enumerate(self._store.finished())]
        spill = Spill(self.target.pending)
        try:
            waiting = [line for _, line in spill.lines()]
            if self._news is not None:
                self._news.cut_torn_line()
                for line in waiting:
                    self._news.append(line)
                self._news.sync()
                spill.remove()
                waiting = []
        finally:
            spill.close()
        self._lines += [_Line(Finished.of(line), None) for line in waiting]
        if self._news is not None:
            at = ((SpillPosition(begin, len(line)), line) for begin, line in self._news)
            self._lines += [_Line(Finished.of(line), None, position) for position, line in at]
        elif self.target.updates.exists():
            with self.target.updates.open("rb") as file:
                self._lines += [_Line(Finished.of(line), None) for line in file if line.endswith(b"\n")]

    # -- which lines stay --------------------------------------------------------------------------

    def _compares(self, config: str, same: Any) -> bool:
        old = self._configs.get(config)
        return old is not None and same(old, self._identity)

    def stands(self, key: str) -> bool:
        """Return whether this very config has answered this very row, so that nothing can differ."""
        return self.has_own(RowRequest(key))

    def has_own(self, row: RowRequest) -> bool:
        """Return whether a line that was written for a row still answers it."""
        return any(self._answers(self._lines[at].found, row) for at in self._by_key.get(row.key, ()))

    @property
    def answers(self) -> int:
        """Return how many lines are answers."""
        return sum(line.found.key is not None and not line.found.failed for line in self._lines)

    @cached_property
    def _by_key(self) -> dict[str, list[int]]:
        return self._grouped(lambda found: found.key or "")

    def _grouped(self, name: Callable[[Finished], str]) -> dict[str, list[int]]:
        """Return the numbers of the lines by a name; those of the output first, the latest of them first."""
        groups: dict[str, list[int]] = {}
        there = [at for at, line in enumerate(self._lines) if line.place is not None]
        for at in [*reversed(there), *range(len(there), len(self._lines))]:
            found = self._lines[at].found
            if found.key is not None:
                groups.setdefault(name(found), []).append(at)
        return groups

    def match(self, rows: Sequence[RowRequest], *, whole: bool, prune: bool) -> UpdatePlan:
        """Decide what happens to each line, and return which rows are to be answered.

        whole: `rows` are all of the input; else lines of other records stay. prune: remove those of records that left.
        """
        by_id = self._grouped(lambda found: found.id)
        used: dict[int, RowRequest] = {}
        missing = [row for row in rows if not self._take(row, self._candidates(row, by_id), used)]
        if whole:  # a record may ask the same under another id, as after a line without one was inserted before it
            by_request = self._grouped(lambda found: found.request)
            missing = [row for row in missing if not self._take(row, by_request.get(row.request or "-", ()), used)]
        plan = self.plan = UpdatePlan(len(rows) - len(missing), pruned=prune)
        plan.again = [(row.id, self._why(row, by_id.get(row.id, ()))) for row in missing]
        self._awaited = {row.key for row in missing}
        ids = {row.id for row in rows if row.named} | {
            self._lines[at].found.id for at, row in used.items() if row.named
        }
        fresh = [*missing]
        for at, row in used.items():
            line = self._lines[at]
            found = line.found
            same = found.key == row.key and row.id in (found.id, "")
            stamp = None if same else Stamp(row.key, row.id, row.shown)
            self.ledger.note(found._replace(key=row.key, id=row.id or found.id))
            if line.place is None:
                fresh.append(row._replace(id=row.id or found.id))
                if line.position is not None:
                    self._fresh[row.key] = line.position, stamp
            elif stamp is not None:
                self._actions[line.place] = stamp
        resumed = self.ledger.resumed
        order = {row.key: number for number, row in enumerate(rows)}
        fresh.sort(key=lambda row: order[row.key])
        self._order = [row.key for row in fresh]
        for row in fresh:
            same_id = by_id.get(row.id, ()) if row.named else ()
            self._give_place(row, [*self._by_key.get(row.key, ()), *same_id], used)
        for at, line in enumerate(self._lines):
            if line.place is None or line.found.key is None or at in used or line.place in self._actions:
                continue
            if line.found.id in ids:  # answered anew, or an older answer
                self._actions[line.place] = None
            else:
                if whole:
                    plan.left.append(line.found.id)
                if whole and prune:
                    self._actions[line.place] = None
                else:
                    self.ledger.note(line.found)
        self.ledger.resumed = resumed  # records of the input
        lines = sum(line.place is not None and line.found.key is not None for line in self._lines)
        plan.most = prune and 2 * len(plan.left) > lines
        if plan.most and not self._keep_old and not (self.target.is_folder or Path(self.target.address).is_dir()):
            plan.copy = self._copy_path().name
        return plan

    def _copy_path(self) -> Path:
        path = Path(os.path.realpath(self.target.address))
        return path.with_name(f"{path.name}.{free_number(path)}")

    def _copy(self) -> None:
        """Keep a copy of the output beside it."""
        path = Path(os.path.realpath(self.target.address))
        part = path.with_name(f"{path.name}.copying")  # a killed run leaves no half of a copy under its name
        shutil.copy2(path, part)
        part.rename(self._copy_path())

    def _candidates(self, row: RowRequest, by_id: dict[str, list[int]]) -> Iterator[int]:
        """Yield the lines that may answer a row: its own first, which shows the row as it is."""
        yield from self._by_key.get(row.key, ())
        if row.request:
            yield from by_id.get(row.id, ())

    def _take(self, row: RowRequest, candidates: Iterable[int], used: dict[int, RowRequest]) -> bool:
        """Let the first line that answers a row do so; return whether there is one."""
        for at in candidates:
            if at not in used and self._answers(self._lines[at].found, row):
                used[at] = row
                return True
        return False

    def _answers(self, found: Finished, row: RowRequest) -> bool:
        if found.failed and self._retry_failed:
            return False
        if found.request and row.request:
            return found.request == row.request and self._same_model(found.config)
        return found.key == row.key and self._same_run(found.config)

    def _give_place(self, row: RowRequest, candidates: Iterable[int], used: dict[int, RowRequest]) -> None:
        """Let a row's new line take the place of its old one, or of another of the same id."""
        for at in candidates:
            place = self._lines[at].place
            if place is not None and at not in used and place not in self._actions:
                self._actions[place] = row.key
                return

    def _why(self, row: RowRequest, candidates: Sequence[int]) -> Why:
        """Return why a row is to be answered. candidates: the lines of its id."""
        if not row.request:
            return "bad"
        if not candidates:
            return "new"
        old = self._lines[candidates[0]].found
        if old.failed:
            return "failed"
        if not self._same_model(old.config):
            return "model"
        asked = old.request.partition("-")[0] if old.request else None
        if asked == row.request.partition("-")[0]:
            return "sampling"
        return "record" if old.key != row.key else self._whys(old.config)

    def _why_prompt(self, config: str) -> Why:
        """Return why a prompt differs whose record does not, by what differs between the configs."""
        old = self._configs.get(config)
        changed = {each.path.partition(".")[0] for each in differences(old, self._identity)} if old else set()
        if "prompt" in changed:
            return "prompt"
        return "passages" if changed & {"retrieval", "index"} else "prompt"

    # -- the new lines, as a sink ------------------------------------------------------------------

    def begin(self, spent: Spent, include: Sequence[str] = ()) -> None:
        """Record the config that answers from now on. Only an update can go on from here. Raises ConfigError.

        include: `output.include`.
        """
        if self._keep_old:
            with opening_errors(self.target.name):
                self._copy()
        self._begun = True
        self.target.state.begin(self._identity, spent, kept=True, include=include)

    def append(self, line: bytes) -> None:
        """Write a new line."""
        assert self._news is not None
        key = Finished.of(line).key
        position = SpillPosition(self._news.append(line), len(line))
        if key is not None:
            self._fresh[key] = position, None

    def sync(self) -> None:
        """Make new lines survive a power failure."""
        if self._news is not None:
            self._news.sync()

    @property
    def complete(self) -> bool:
        """Return whether every row that was to be answered has a line."""
        return self._awaited <= self._fresh.keys()

    def finish(self) -> None:
        """Rewrite the output once all new lines are there; before that, leave it as it is."""
        assert self._news is not None
        if not self.complete:
            return
        if self._actions or self._fresh:
            if self.plan.copy:
                self._copy()
            placed = {action for action in self._actions.values() if isinstance(action, str)}
            more = (self._new_line(key) for key in self._order if key not in placed and key in self._fresh)
            places = count()
            self._store.rewrite(lambda line: self._changed(next(places), line), more)
        self._store.sync()
        self._store.finish()
        self.target.state.keep_configs(self._named())
        self._news.remove()

    def _changed(self, place: int, line: bytes) -> bytes | None:
        if place not in self._actions:
            return line
        action = self._actions[place]
        if action is None:
            return None
        return self._new_line(action) if isinstance(action, str) else action.on(line)

    def _new_line(self, key: str) -> bytes:
        assert self._news is not None
        position, stamp = self._fresh[key]
        line = self._news.read(*position)
        return stamp.on(line) if stamp else line

    def _named(self) -> set[str]:
        """Return the digests of configs that lines name."""
        return {self.target.state.signature} | {
            line.found.config
            for line in self._lines
            if line.place is None or isinstance(self._actions.get(line.place, STAYS), Stamp)
        }

    def close(self) -> None:
        """Close the files, and keep new lines for the next run. Another call does nothing."""
        if not self._closed:
            self._closed = True
            self._store.close()
            if self._news is not None and not (self._begun or self._news.size):
                self._news.remove()
            elif self._news is not None:
                self._news.close()
