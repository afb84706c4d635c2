"""`ragspec plan`: what a run will take, before it is started."""

from __future__ import annotations

from typing import Annotated

import typer

from ragspec.cli.flags import with_settings
from ragspec.cli.generate import SETTINGS, Output
from ragspec.cli.options import (
    ConfigIfAny,
    Debug,
    Format,
    Input,
    Limit,
    MaxNewTokens,
    Plugin,
    Prices,
    Set,
    Workers,
    overrides,
    print_table,
    scaled,
    set_debug,
    settings_of,
    unused_plugins,
)


@with_settings(*SETTINGS)
def plan(
    settings: list[str],
    config: ConfigIfAny = None,
    input: Input = None,
    output: Output = None,
    max_new_tokens: MaxNewTokens = None,
    limit: Limit = None,
    sample: Annotated[
        int | None,
        typer.Option("--sample", min=1, metavar="N", help="Load the model and answer N records to measure."),
    ] = None,
    price: Prices = None,
    workers: Workers = None,
    format: Format = None,
    plugin: Plugin = None,
    override: Set = None,
    debug: Debug = False,
) -> None:
    """Estimate what a run will take: tokens, hours, memory, disk and money."""
    import sys

    from ragspec.cli.answer_view import stdout
    from ragspec.cli.tables import print_notes, print_plan, stderr, with_durations
    from ragspec.report.table import check_format
    from ragspec.run.inspect import with_columns
    from ragspec.run.plan import make_plan
    from ragspec.run.price import Price

    set_debug(debug)
    check_format(format)
    prices = [Price.of(each) for each in price or ()]
    settings = [*overrides(None, max_new_tokens), *settings, *scaled(workers, None)]
    run_config, notes, _ = settings_of(config, settings, override, input=input, output=output)
    notes += unused_plugins(run_config, plugin)
    run_config, read_as = with_columns(run_config)
    found = make_plan(run_config, limit=limit, sample=sample, prices=prices)
    print_notes(stderr(), [*notes, *read_as, *found.notes])
    if format is None and sys.stdout.isatty():
        print_plan(stdout(), found.lines)
    else:
        kind = format or "md"
        print_table(with_durations(found.rows()) if kind in ("md", "latex") else found.rows(), kind)
