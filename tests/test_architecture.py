"""Arrows point down only (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ragspec"
LEVELS = [  # a room may import rooms of lower lines only; a folder is one room, but for the two that are named below
    {"errors", "stats", "host", "json_text"},
    {"records"},
    {"structured"},
    {"speculation"},
    {"runners.base"},
    {"config"},
    {"inputs"},
    {"models"},
    {"prompts", "retrieval"},
    {"engine"},
    {"outputs"},
    {"runners"},
    {"run"},
    {"quality"},
    {"benchmark"},
    {"audit", "report", "training"},
    {"cli", "frames"},
    {"__main__"},
]
APART = {("runners", "base")}  # a module of a room that stands lower than the others
# the config asks the runners for their `Args`; it imports the folder, and the folder no runner
ALLOWED = {("config", "runners")}


def level(name):
    return next((i for i, names in enumerate(LEVELS) if name in names), None)


def room(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return place(parts)


def place(parts):
    return ".".join(parts[:2]) if tuple(parts[:2]) in APART else parts[0]


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
                    yield place(parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = room(path)
    if mine == "__init__":
        return
    assert level(mine) is not None, f"{mine} has no place in LEVELS"
    for other in set(imported(ast.parse(path.read_text()))) - {mine}:
        if (mine, other) not in ALLOWED:
            assert level(other) < level(mine), f"{mine} imports {other}"
