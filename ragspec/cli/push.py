"""`ragspec push`: answers as a dataset on the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.options import Debug, set_debug


def push(
    answers: Annotated[str, typer.Argument(metavar="ANSWERS", help="Output of a run.")],
    dataset: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Dataset on the hub; created if necessary.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Configuration of the dataset.")] = "default",
    split: Annotated[str, typer.Option(metavar="SPLIT", help="Split for these answers.")] = "train",
    revision: Annotated[str, typer.Option(metavar="BRANCH", help="Branch; created if necessary.")] = "main",
    private: Annotated[
        bool, typer.Option("--private", help="Make a new dataset private; refuse a public one.")
    ] = False,
    message: Annotated[str | None, typer.Option("--message", metavar="TEXT", help="Commit message.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Push even if the run has not ended.")] = False,
    debug: Debug = False,
) -> None:
    """Push answers to a dataset on the Hugging Face Hub, in one commit."""
    from ragspec.cli.tables import print_notes, stderr, waiting
    from ragspec.outputs.hub import Destination
    from ragspec.outputs.hub import push as upload

    set_debug(debug)
    console = stderr()
    to = Destination(dataset, name, split, revision, private)
    with waiting(console, f"pushing to {dataset}"):
        pushed = upload(answers, to, message=message, partial=partial)
    print_notes(console, pushed.notes)
    failed = f", {pushed.failed:,} failed (rows with `error`)" if pushed.failed else ""
    records = f"{pushed.records:,} answered{failed}"
    if pushed.commit:
        console.print(f"pushed {records}: {pushed.commit}", markup=False)
    else:
        console.print(f"nothing new: {pushed.url} already has these answers ({records})", markup=False)
