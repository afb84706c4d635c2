"""Writes what the docs take from the code: `python docs/generate.py`. A test checks that it was run.

Every page of docs/commands holds its command's --help between two markers; docs/config.schema.json is the config's.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- help -->\n```text\n).*?(\n```\n<!-- /help -->)", re.DOTALL)


def help_of(command: str) -> str:
    """Return what `ragspec COMMAND --help` prints, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page_of(path: Path) -> str:
    """Return a command's page with the help of today."""
    text = path.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{path} has no help block"
    return BLOCK.sub(lambda found: found[1] + help_of(path.stem) + found[2], text)


def schema() -> str:
    """Return the config's schema as text."""
    from ragspec.config.schema import config_schema

    return json.dumps(config_schema(), indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write all."""
    for path in sorted((DOCS / "commands").glob("*.md")):
        path.write_text(page_of(path), encoding="utf-8")
    (DOCS / "config.schema.json").write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
