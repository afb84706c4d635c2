"""Finished passes on disk, so that a benchmark that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import orjson

from ragspec.benchmark.plan import Candidate
from ragspec.outputs.runstate import write_json


class Passes:
    """`folder`/passes/NAME.json: what was run, what its process said of itself, and one result per pass."""

    def __init__(self, folder: Path, limit: int | None, resume: bool) -> None:
        self._folder = folder / "passes"
        self._limit = limit
        self._entries: dict[str, dict[str, Any]] = {}
        self.kept = 0  # passes of an earlier run
        if not resume:
            shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, candidate: Candidate) -> dict[str, Any]:
        """Return the candidate's {identity, ready, results, details}: an earlier run's if it is the same."""
        path, identity = self._path(candidate), self._identity(candidate)
        entry: dict[str, Any] = {"identity": identity, "ready": None, "results": [], "details": None}
        if path.is_file():
            found = orjson.loads(path.read_bytes())
            if found["identity"] == identity:
                entry = found
                self.kept += len(found["results"])
        self._entries[candidate.name] = entry
        return entry

    def save(self, candidate: Candidate) -> None:
        """Write the candidate's entry."""
        write_json(self._path(candidate), self._entries[candidate.name])

    def _path(self, candidate: Candidate) -> Path:
        return self._folder / f"{candidate.name}.json"

    def _identity(self, candidate: Candidate) -> str:
        """Return a hash of what a pass depends on: config, limit, and the input's bytes."""
        with Path(candidate.config.input or "").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(orjson.dumps([candidate.config.model_dump(mode="json"), self._limit]))
        return digest.hexdigest()
