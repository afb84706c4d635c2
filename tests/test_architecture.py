"""Arrows point down only (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ragspec"
LEVELS = [  # a module may import modules of lower lines only; a folder counts as one room
    {
        "errors",
        "suggest",
        "baseline",
        "keyset",
        "stats",
        "quiet",
        "zst",
        "live",
        "machine",
        "interrupt",
        "secret_words",
    },
    {"linefile"},
    {"secret", "private"},
    {"veil", "feed", "spill", "outstream"},
    {"runstate", "records", "sections", "yaml_file", "legacy_vllm", "jsonl", "autogluon_retrieval"},
    {"parsing", "autogluon", "journal", "models", "vocabulary", "drafters"},
    {"hf"},
    {"engine"},
    {"runners.base"},
    {"config"},
    {"foreign", "templates"},
    {"prompts", "vllm", "provenance", "retrieval"},
    {"runners"},
    {"answers"},
    {"batch"},
    {"pipeline"},
    {"console", "benchmark", "report", "doctor", "schema"},
    {"cli"},
    {"__main__"},
]
# the config asks the runners for their words and their `Args`; it imports the folder, and the folder no runner
ALLOWED = {("config", "runners")}


def level(name):
    return next((i for i, names in enumerate(LEVELS) if name in names), None)


def room(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "runners.base" if parts == ("runners", "base") else parts[0]


def imported(tree):
    """Yield the rooms that top-level and function-level imports name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ragspec"):
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "ragspec" else [node.module]
            )
            for name in names:
                parts = name.split(".")[1:]
                if parts and not parts[0].startswith("__version"):
                    yield "runners.base" if parts[:2] == ["runners", "base"] else parts[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = room(path)
    if mine == "__init__":
        return
    assert level(mine) is not None, f"{mine} has no place in LEVELS"
    for other in set(imported(ast.parse(path.read_text()))) - {mine}:
        if (mine, other) not in ALLOWED:
            assert level(other) < level(mine), f"{mine} imports {other}"
