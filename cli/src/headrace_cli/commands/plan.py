"""How devices are used: `headrace plan` and `profile`, and a run's own plan and timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, RunId, Url, complete_key
from headrace_cli.connection import Answer, asking, connect, find_target
from headrace_cli.errors import refused, writing
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.output import console, error_console, print_json
from headrace_cli.show.plan import run_plan_table

if TYPE_CHECKING:
    from headrace.client import Client


def add_to(app: typer.Typer, runs: typer.Typer) -> None:
    """Adds the commands; `runs` is the group of those that name a run."""
    app.command()(plan)
    app.command()(profile)
    runs.command("plan")(run_plan)
    runs.command("timeline")(run_timeline)


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
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Memory of a GPU: also say how the trainers would hold the spec's model on such ones, and why.",
            show_default=False,
        ),
    ] = None,
    host_gib: Annotated[
        float | None,
        typer.Option(min=1.0, help="Memory of a host of eight such GPUs; default: 1800.", show_default=False),
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
    from headrace_cli.errors import user_error
    from headrace_cli.planning import HOST_GIB, explain_file, trainer_layout, write_trace
    from headrace_cli.show.plan import plan_lines

    if host_gib is not None and gpu_gib is None:
        raise user_error("--host-gib", "is of the hosts of the GPUs that --gpu-gib names", "give both")
    wanted = None
    if simulate or chrome_trace is not None:
        wanted = {"iterations": iterations, "seed": seed, "chrome_trace": chrome_trace is not None}
    stored = DataDir.at(data_dir).profiles
    found = explain_file(file, sets or [], devices, cluster, profile, wanted, stored, gpu_gib)
    if gpu_gib is not None:
        found["layout"] = trainer_layout(file, sets or [], gpu_gib, host_gib or HOST_GIB)
    if chrome_trace is not None:
        write_trace(found["simulation"].pop("chrome_trace"), chrome_trace)
    if as_json:
        print_json(found)
        return
    for line in plan_lines(found, console().width):
        console().print(line, markup=False)


def profile(
    file: Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the spec.", autocompletion=complete_key
        ),
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Use only runs that the fleet has made; start none.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=10, help="Steps of each short run that count.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the YAML here instead of the data directory.", show_default=False),
    ] = None,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Measure what the stages of a run cost, with three short runs, and store it for `headrace plan`."""
    from headrace.client import HeadraceError, load_spec
    from headrace_schema.spec import RunSpec
    from headrace_schema.yaml_text import write_yaml

    from headrace_cli.dry_run import check_schema
    from headrace_cli.planning import check_profile, kind_of
    from headrace_cli.profiling import (
        measured_document,
        profile_file,
        runs_alike,
        short_runs,
        store,
    )

    try:
        document = load_spec(file, sets or [])
    except HeadraceError as error:
        raise refused(error) from error
    check_schema(document)
    spec = RunSpec.model_validate(document)
    with connect(find_target(url, data_dir)) as client:
        if not stored:
            short_runs(client, spec, steps, lambda words: error_console().print(words, markup=False))
        found = measured_document(client, spec, runs_alike(client, spec))
    errors = check_profile(found)
    place = out or profile_file(DataDir.at(data_dir).profiles, spec, kind_of(found))
    with writing(place):
        store(place, found)
    if as_json:
        print_json({"file": str(place), "profile": found, "fit_errors": errors})
        return
    console().print(write_yaml(found), markup=False)
    fits = ", ".join(f"{stage} {error:.1%}" for stage, error in errors.items() if error)
    console().print(f"worst error of the fits: {fits or 'none'}; stored in {place}", markup=False)


@asking
def run_plan(client: Client, run: RunId) -> Answer:
    """Show how the run uses its devices, and why."""
    found = client.plan(run)
    return found, lambda: run_plan_table(found)


@asking
def run_timeline(
    client: Client,
    run: RunId,
    steps: Annotated[int, typer.Option(min=1, max=200, help="The newest so many steps.")] = 3,
    chrome_trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline to this file, for Perfetto.", show_default=False),
    ] = None,
) -> Answer:
    """Show what each device did when: who held it, for which stage, working or waiting."""
    from headrace_cli.planning import write_trace
    from headrace_cli.show.timeline import chrome_trace as trace_of

    view = client.timeline(run, steps)
    plan = None if client.get(run).suite else client.plan(run)
    if chrome_trace is not None:
        write_trace(trace_of(view), chrome_trace)

    def text() -> str:
        from headrace_cli.show.timeline import timeline_lines

        if not view["labels"]:
            return "no step of the run has ended yet, or its timeline is gone"
        return "\n".join(timeline_lines(view, plan, console().width))

    return {"timeline": view, "plan": plan}, text
