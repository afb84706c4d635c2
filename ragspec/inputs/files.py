"""Which files an input names, and what they are: one path, several, a pattern, a folder.

>>> kind_of("questions.jsonl.gz")
'jsonl'
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ragspec.config.places import InputConfig
from ragspec.errors import ConfigError
from ragspec.inputs import storage
from ragspec.inputs.content import PACKED

KINDS = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
SAVED = "dataset_info.json", "dataset_dict.json"  # in a folder that save_to_disk wrote
BESIDE = {"run.json", "stats.json", "manifest.json"}  # in a folder of answers, beside the parts


def kind_of(path: str) -> str:
    """Return what a file's name promises; "jsonl" where it says nothing. Its content may be something else."""
    name = storage.bare(path).lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return next((kind for kind, endings in KINDS.items() if name.endswith(endings)), "jsonl")


def is_saved_dataset(path: str) -> bool:
    """Return whether `path` is a folder that a Hugging Face dataset was saved to."""
    return any((Path(path) / name).is_file() for name in SAVED)


def files_of(paths: Iterable[str], options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the files that `paths` name: patterns and folders by name, in order. Raises ConfigError for none.

    options: of the file systems of addresses.
    """
    found: list[str] = []
    for path in map(storage.local_path, paths):
        if storage.is_url(path):
            found += _elsewhere(path, options)
        elif path == "-" or Path(path).is_file() or not (glob.has_magic(path) or Path(path).is_dir()):
            found.append(path)
        elif Path(path).is_dir():
            found += _in_folder(path)
        else:
            matching = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())
            if not matching:
                raise ConfigError(f"input: no file matches {path}")
            found += matching
    return found


def digest(config: InputConfig | None) -> str | None:
    """Return the SHA-256 of an input's files; None for a pipe, which is read once, and for what is not there."""
    found = hashlib.sha256()
    files = _local(config)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    return found.hexdigest() if files else None


def size_of(config: InputConfig | None) -> int | None:
    """Return the bytes of an input's files, None where that is not known."""
    files = _local(config)
    return sum(path.stat().st_size for path in files) if files else None


def _local(config: InputConfig | None) -> list[Path]:
    """Return the files of an input that lie here and can be read again; none if one of them does not."""
    if config is None or config.is_stdin or config.format == "dataset":
        return []
    if any(map(storage.is_url, config.path)):
        return []
    try:
        files = [Path(path) for path in files_of(config.path)]
    except ConfigError:
        return []
    return files if all(path.is_file() for path in files) else []


def _elsewhere(url: str, options: Mapping[str, Any] | None) -> list[str]:
    """Return the addresses of the files that `url`, its pattern or its folder names."""
    if url.lower().startswith(("http://", "https://")):  # a ? is a query there, and folders cannot be listed
        return [url]
    system, path = storage.filesystem(url, options)
    try:
        with storage.told(url):
            if glob.has_magic(path):
                found = sorted(name for name in system.glob(path) if not system.isdir(name))
                if not found:
                    raise ConfigError(f"input: no file matches {url}")
            elif system.isdir(path):
                found = _records(url, (name.removeprefix(path).lstrip("/") for name in system.find(path)))
                found = [f"{path.rstrip('/')}/{name}" for name in found]
            else:
                return [url]
    except OSError as error:
        raise ConfigError(f"{url}: cannot be listed ({storage.reason(error)})") from None
    return [str(system.unstrip_protocol(name)) for name in found]


def _in_folder(path: str) -> list[str]:
    inside = (str(each.relative_to(path)) for each in Path(path).rglob("*") if each.is_file())
    return [str(Path(path) / name) for name in _records(path, inside)]


def _records(folder: str, names: Iterable[str]) -> list[str]:
    """Return those of a folder's files, by their names in it, that could be records. Raises ConfigError for none."""
    files = records_among(names)
    if not files:
        shown = ", ".join(ending for kind in KINDS.values() for ending in kind)
        raise ConfigError(f"{folder}: the folder has no file that could be records ({shown}, compressed or not)")
    return files


def records_among(names: Iterable[str]) -> list[str]:
    """Return the names that files of records have, in order; hidden ones, and those of an output's own, left out."""
    plain = tuple(ending for kind in KINDS.values() for ending in kind)
    endings = plain + tuple(f"{ending}{packed}" for ending in plain for packed in PACKED)
    return sorted(
        name
        for name in names
        if name.lower().endswith(endings)
        and name.rpartition("/")[2] not in BESIDE
        and not any(part.startswith((".", "_")) for part in name.split("/"))
    )
