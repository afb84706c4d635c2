"""What a shell offers for the values of flags. Nothing heavy is imported, and nothing leaves the machine."""

from __future__ import annotations

import os
from pathlib import Path


def complete_methods(begun: str) -> list[str]:
    """Return the methods that begin so."""
    from ragspec.speculation.methods import METHODS

    return _beginning(begun, METHODS)


def complete_runners(begun: str) -> list[str]:
    """Return the runners that begin so."""
    from ragspec import runners

    return _beginning(begun, ["auto", *runners.names()])


def complete_models(begun: str) -> list[str]:
    """Return demo, the models in the hub's cache, and folders, that begin so."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    cached = (folder.name.removeprefix("models--").replace("--", "/") for folder in cache.glob("models--*--*"))
    parent, _, name = begun.rpartition("/")
    inside = sorted(Path(parent or ".").glob(f"{name}*")) if not begun.startswith("~") else []
    folders = [str(path) for path in inside if (path / "config.json").is_file() or path.suffix == ".gguf"]
    return _beginning(begun, ["demo", *sorted(cached), *folders])


def complete_dtypes(begun: str) -> list[str]:
    """Return the data types that begin so."""
    return _beginning(begun, ["auto", "float32", "bfloat16", "float16"])


def complete_includes(begun: str) -> list[str]:
    """Return the values of output.include that begin so."""
    return _beginning(begun, ["query", "contexts"])


def _beginning(begun: str, words: object) -> list[str]:
    return [word for word in words if word.startswith(begun)]  # type: ignore[attr-defined]
