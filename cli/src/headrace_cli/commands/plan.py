"""`headrace plan SPEC`: how a workflow would use its devices, predicted, without a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag
from headrace_cli.launcher.data_dir import DataDir
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
        Path | None,
        typer.Option(help="YAML file: what the stages cost; default: as measured.", show_default=False),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Run the plan on a simulated cluster as well, with drawn lengths."),
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, max=100, help="Steps to simulate.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn output lengths.")] = 0,
    chrome_trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated timeline to this file, for Perfetto.", show_default=False),
    ] = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Predict the fastest use of devices, and say why it is. Needs no GPU, model or fleet."""
    from headrace_cli.planning import explain_file, write_trace
    from headrace_cli.show.plan import plan_lines

    wanted = None
    if simulate or chrome_trace is not None:
        wanted = {"iterations": iterations, "seed": seed, "chrome_trace": chrome_trace is not None}
    found = explain_file(file, sets or [], devices, cluster, profile, wanted, DataDir.at(data_dir).profiles)
    if chrome_trace is not None:
        write_trace(found["simulation"].pop("chrome_trace"), chrome_trace)
    if as_json:
        print_json(found)
        return
    for line in plan_lines(found, console().width):
        console().print(line, markup=False)
