"""`headrace plan SPEC`: how a workflow would use its devices, predicted, without a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.options import JsonFlag
from headrace_cli.output import console, print_json


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan")(plan)


def plan(
    file: Annotated[
        Path, typer.Argument(metavar="SPEC", help="Run spec, or workflow with profile, a YAML file.")
    ],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, such as items=1024.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="GPUs; other kinds as the spec says.", show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="YAML file: kind of device: {count, memory_gib}.", show_default=False)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="YAML file: what the stages cost.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict the fastest use of devices, and say why it is. Needs no GPU, model or fleet."""
    from headrace_cli.planning import explain_file
    from headrace_cli.show.plan import plan_lines

    found = explain_file(file, sets or [], devices, cluster, profile)
    if as_json:
        print_json(found)
        return
    for line in plan_lines(found, console().width):
        console().print(line, markup=False)
