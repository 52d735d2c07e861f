"""`headrace run timeline RUN`: what each device did when, labelled, beside the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, RunId, Url
from headrace_cli.connection import connect, find_target
from headrace_cli.output import console, print_json


def timeline(
    run: RunId,
    steps: Annotated[int, typer.Option(min=1, max=200, help="The newest so many steps.")] = 3,
    chrome_trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline to this file, for Perfetto.", show_default=False),
    ] = None,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Show what each device did when: who held it, for which stage, working or waiting."""
    from headrace_cli.planning import write_trace
    from headrace_cli.show.timeline import chrome_trace as trace_of
    from headrace_cli.show.timeline import timeline_lines

    with connect(find_target(url, data_dir)) as client:
        view = client.timeline(run, steps)
        plan = None if client.get(run).suite else client.plan(run)
    if chrome_trace is not None:
        write_trace(trace_of(view), chrome_trace)
    if as_json:
        print_json({"timeline": view, "plan": plan})
        return
    if not view["labels"]:
        console().print("no step of the run has ended yet, or its timeline is gone")
        return
    for line in timeline_lines(view, plan, console().width):
        console().print(line, markup=False)
