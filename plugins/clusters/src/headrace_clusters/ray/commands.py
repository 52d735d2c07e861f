"""`headrace ray`: runs on fleets of a Ray cluster. What it needs is imported as it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, grouped
from headrace_cli.commands.starting import FleetOptions, NodeOptions
from headrace_cli.errors import CommandError, refused, user_error
from headrace_cli.launcher.plan import DEFAULT_PORT
from headrace_cli.output import console, error_console, print_json

app = typer.Typer(help="Runs on the nodes of a Ray cluster.", no_args_is_help=True)
Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, such as optimizer.lr=2e-5."),
]

IdempotencyKey = Annotated[
    str,
    typer.Option("--idempotency-key", help="Same key and spec, and the same --node-dir: the same run."),
]


@app.command("run")
@grouped
def run_here(
    spec: Spec,
    options: FleetOptions,
    nodes: NodeOptions,
    head: Annotated[
        str,
        typer.Option(
            help="HOST of the cluster's head for ray://; default: this node's cluster.", show_default=False
        ),
    ] = "",
    sets: Sets = None,
    key: IdempotencyKey = "",
    port: Annotated[
        int, typer.Option(min=1, max=65534, help="First port to try for the fleet's HTTP API.")
    ] = DEFAULT_PORT,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt all traffic of the fleet.")] = False,
) -> None:
    """Start a fleet on the Ray cluster, make one run on it, show it, and give the nodes back.

    The command of a Ray job: `ray job submit --working-dir . -- headrace ray run SPEC`.
    """
    from headrace.client import Client, HeadraceError, load_spec
    from headrace_cli.commands.run import watch
    from headrace_cli.connection import find_target
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.start import last_lines
    from headrace_cli.launcher.stop import stop_fleet, undisturbed

    from headrace_clusters.ray.starting import plan_of, start

    try:
        loaded = load_spec(spec, sets or ())
    except HeadraceError as error:
        raise refused(error) from error
    place = DataDir.at(options.data_dir)
    fleet = start(plan_of(head, nodes, options, port=port, tls=tls), tethered=True)
    try:
        if fleet.notice:
            raise CommandError(fleet.notice, reason="UNREACHABLE")
        target = find_target(fleet.state.url, options.data_dir)
        try:
            with Client(target.url, target.token, ca_file=target.ca_file) as client:
                run = client.submit(loaded, idempotency_key=key or None)
        except HeadraceError as error:
            raise refused(error) from error
        error_console().print(f"run {run.id} at {fleet.state.url}", markup=False)
        watch(run.id, fleet.state.url, options.data_dir, options.as_json)
    except CommandError as error:
        if fleet.launcher.poll() is not None:  # The fleet could not go on, and its driver has said why.
            (words,) = last_lines(place.log_file("launcher"), 1) or [error.message]
            raise CommandError(words) from error
        raise
    finally:
        with undisturbed():
            stop_fleet(place, fleet.launcher.pid)


@app.command()
@grouped
def submit(
    spec: Spec,
    options: FleetOptions,
    nodes: NodeOptions,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Of Ray's dashboard, which takes jobs.")
    ] = "http://127.0.0.1:8265",
    working_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder that the job sees on each node; default: that of SPEC.", show_default=False
        ),
    ] = None,
    sets: Sets = None,
    key: IdempotencyKey = "",
    follow: Annotated[bool, typer.Option(help="Show the job's output until it ends.")] = True,
) -> None:
    """Submit a Ray job that is `headrace ray run SPEC`: its fleet lives on the cluster as long as its run."""
    from headrace_clusters.ray import jobs

    folder = (working_dir or spec.parent).absolute()
    if not spec.absolute().is_relative_to(folder) or not spec.is_file():
        problem = (
            f"{spec} is not there"
            if not spec.is_file()
            else f"{spec} is not below {folder}, which the job sees"
        )
        raise user_error("SPEC", problem, "name a file below --working-dir")
    given = [word for value in sets or () for word in ("--set", value)]
    given += ["--idempotency-key", key] if key else []
    command = ["headrace", "ray", "run", str(spec.absolute().relative_to(folder))]
    job = jobs.submit_job(address, folder, [*command, *jobs.words_of(options, nodes), *given])
    if options.as_json:
        print_json({"job": job})
        return
    console().print(f"job {job}; stop: ray job stop {job} --address {address}", markup=False, soft_wrap=True)
    if follow:
        jobs.follow(address, job)


@app.command()
def nodes(
    count: Annotated[
        int | None,
        typer.Argument(
            metavar="[N]", min=1, help="How many the fleet is to have; none: show them.", show_default=False
        ),
    ] = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Show the nodes of the fleet that `up --on ray` started, or ask Ray for more or fewer. The first ones stay."""
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.state import living_state
    from headrace_cli.output import table

    from headrace_clusters.ray.driver import MEMBERS, WANTED
    from headrace_clusters.ray.node import put

    place = DataDir.at(data_dir)
    file = place.root / MEMBERS
    if living_state(place) is None or not file.is_file():
        raise user_error(
            "--data-dir", f"no fleet on Ray runs on {place.root}", "start one: headrace up --on ray"
        )
    if count is not None:
        put(place.root / WANTED, str(count))
        answer: Any = {"wanted": count}
        text: Any = f"asked for {count}; see: headrace ray nodes"
    else:
        members = json.loads(file.read_text(encoding="utf-8"))
        answer = {"nodes": members}
        text = table(("node", "stage", "host", "why"), [list(each.values()) for each in members])
    if as_json:
        print_json(answer)
    else:
        console().print(text)
