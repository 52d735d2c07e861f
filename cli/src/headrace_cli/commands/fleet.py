"""`up`, `down` and `status`: a fleet of local processes."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, NoToken, Url
from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.plan import (
    DEFAULT_PORT,
    FleetPlan,
    backend_python,
    engine_python,
    kind_and_count,
    simulator_python,
)
from headrace_cli.output import console, error_console, print_json

if TYPE_CHECKING:
    from headrace_cli.launcher.repair import Examination
    from headrace_cli.launcher.start import ReadyFleet

SAY_S = 30.0
Count = Annotated[int, typer.Option(min=0, max=256, help="Instances of this service.")]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(status)
    app.command()(repair)
    app.command("open")(open_dashboard)


def up(
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the HTTP API on 127.0.0.1.")
    ] = DEFAULT_PORT,
    rollout: Count = 1,
    trainer: Count = 1,
    reward: Count = 1,
    simulator: Count = 1,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=N", help="Instances of a service, as `headrace scale` says it: simulator=4."
        ),
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            help="Devices to lease, such as cpu:0,cpu:1 or gpu:0; default: the GPUs, or else all cores."
        ),
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            help="Engine that the rollout instances must have: vllm or sglang from this Python or from .envs/ENGINE."
        ),
    ] = "transformers",
    sim: Annotated[
        str,
        typer.Option(
            help="Simulator that the simulator instances must have: metaworld, maniskill or libero from this Python "
            "or from .envs/SIM."
        ),
    ] = "gymnasium",
    backend: Annotated[
        str,
        typer.Option(
            help="Training backend that the trainer instances must have: megatron from this Python or from "
            ".envs/megatron. Such trainers have fsdp too."
        ),
    ] = "fsdp",
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C stops the fleet.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest start in seconds; one without progress ends after 60.")
    ] = 600,
    no_token: NoToken = False,
    as_json: JsonFlag = False,
) -> None:
    """Start the services as local processes and return when they are ready."""
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.stop import stop_fleet

    counts = {"rollout": rollout, "trainer": trainer, "reward": reward, "simulator": simulator}
    counts |= dict(kind_and_count(text, "--scale") for text in scale or ())
    named = _device_names(devices)
    folder = str(data_dir.expanduser().absolute())
    pythons = {
        "rollout": engine_python(engine),
        "simulator": simulator_python(sim),
        "trainer": backend_python(backend),
    }
    plan = FleetPlan(folder, port, counts, named, tethered=foreground, no_token=no_token, pythons=pythons)
    start = start_quietly if as_json or not sys.stdout.isatty() else start_with_spinner
    fleet = start(plan, timeout)
    try:
        if as_json:
            print_json(_ready_document(fleet))
        else:
            _show_ready(fleet, data_dir, foreground)
        if foreground:
            _stay(fleet, data_dir)
    except KeyboardInterrupt:
        if not foreground:
            raise
        stop_fleet(DataDir.at(data_dir), fleet.launcher.pid)


def _device_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(r"cpu:\d+|gpu:\d+(\.\d+)?", name):
            raise user_error(
                "--devices", f"{name!r} is no device", "write cpu:0 or gpu:0, separated by commas"
            )
    return names


def start_quietly(plan: FleetPlan, timeout_s: float = 600) -> ReadyFleet:
    """Starts a fleet; says on standard error what it waits for when that takes long."""
    from headrace_cli.launcher.start import start_fleet

    began, said = time.monotonic(), 0

    def progress(missing: str) -> None:
        nonlocal said
        if (periods := int((time.monotonic() - began) / SAY_S)) > said:
            said = periods
            error_console().print(f"still starting after {periods * SAY_S:.0f} s: waiting for {missing}")

    return start_fleet(plan, progress, timeout_s)


def start_with_spinner(plan: FleetPlan, timeout_s: float = 600) -> ReadyFleet:
    """Starts a fleet and shows what it waits for."""
    from headrace_cli.launcher.start import start_fleet

    with console().status("starting the fleet") as spinner:
        return start_fleet(
            plan, lambda missing: spinner.update(f"starting the fleet: waiting for {missing}"), timeout_s
        )


def _ready_document(fleet: ReadyFleet) -> dict[str, Any]:
    state = fleet.state
    return {
        "url": state.url,
        "launcher_pid": state.launcher_pid,
        "ready_s": round(fleet.seconds, 3),
        "token_file": state.token_file,
        "notice": fleet.notice,
        "instances": [item.raw for item in fleet.instances],
    }


def _show_ready(fleet: ReadyFleet, data_dir: Path, foreground: bool) -> None:
    from headrace_cli.show.fleet import instances_table

    where = "" if data_dir == DEFAULT_DATA_DIR else f" --data-dir {data_dir}"
    out = console()
    out.print(instances_table(fleet.instances, coordinator=fleet.state.url))
    out.print(
        f"[green]ready[/] in {fleet.seconds:.1f} s at [bold]{fleet.state.url}[/], logs in {data_dir / 'logs'}"
    )
    if fleet.notice:
        out.print(f"[yellow]note[/] {fleet.notice}")
    out.print(f"next: headrace run submit examples/tiny.yaml --watch{where}")
    out.print(f"look: headrace open{where}")
    out.print("stop: Ctrl-C" if foreground else f"stop: headrace down{where}")


def _stay(fleet: ReadyFleet, data_dir: Path) -> None:
    if status := fleet.launcher.wait():
        raise CommandError(
            f"the launcher ended with status {status}; see {data_dir / 'logs' / 'launcher.log'}"
        )


def down(data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonFlag = False) -> None:
    """Stop the local fleet; its runs stay and go on with the next `up`.

    Trainers stop first and have 30 s to save a checkpoint; then the other services, the coordinator, the store.
    """
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.stop import stop_fleet

    stopped = stop_fleet(DataDir.at(data_dir), progress=_say_nothing if as_json else error_console().print)
    if as_json:
        print_json({"stopped": stopped})
    elif stopped:
        console().print(f"stopped; runs are kept in {data_dir}")
    else:
        console().print(f"no fleet runs on {data_dir}")


def repair(
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show where the store of a fleet that is down is damaged, and go on from what is good before it.

    The damaged files are kept. Exit code 1 where it is damaged and was not repaired.
    """
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.repair import adopt, discard, examine
    from headrace_cli.launcher.state import FleetLock

    place = DataDir.at(data_dir)
    lock = FleetLock(place.lock_file)
    if not place.root.is_dir() or not lock.acquire():
        problem = "a fleet runs on it" if place.root.is_dir() else "there is no such directory"
        raise user_error("--data-dir", f"{place.root}: {problem}", "stop it first: headrace down")
    try:
        found = examine(place)
        if not as_json:
            _show_examination(found)
        wanted = bool(found.damages) and (yes or (not as_json and sys.stdin.isatty() and _asks()))
        kept = adopt(place) if wanted else None
    finally:
        discard(place)
        lock.release()
    if as_json:
        damages = [vars(each) | {"file": str(each.file)} for each in found.damages]
        print_json(vars(found) | {"damages": damages, "kept": str(kept or "")})
    elif kept:
        console().print(f"repaired; the damaged files are kept in {kept}. next: headrace up")
    if found.damages and not kept:
        raise typer.Exit(1)


def _show_examination(found: Examination) -> None:
    out = console()
    for damage in found.damages:
        out.print(
            f"[red]damaged[/] {damage.file}, byte {damage.offset}: {damage.what}; {damage.lost} bytes are lost"
        )
    if not found.damages:
        out.print("the store is sound")
    snapshot = f"snapshot of event {found.snapshot}" if found.snapshot else "no snapshot"
    out.print(
        f"good: {snapshot}, events up to {found.last}, {len(found.runs)} runs that have not been archived"
    )
    for run, state in found.runs.items():
        out.print(f"  {run} {state}")
    if found.damages:
        out.print(
            "what runs did after that comes from their checkpoints and histories with the next `headrace up`"
        )


def _asks() -> bool:
    return typer.confirm("keep the damaged files aside and go on from what is good?")


def _say_nothing(text: str) -> None:
    pass


def status(data_dir: DataDirOption = DEFAULT_DATA_DIR, url: Url = None, as_json: JsonFlag = False) -> None:
    """Show the fleet: services, devices and runs. Exit code 1 when none answers."""
    from headrace_cli.connection import connect, find_target

    with connect(find_target(url, data_dir)) as client:
        instances, leases, runs = client.instances(), client.leases(), client.list()
    if as_json:
        documents = {"instances": instances, "devices": leases.devices, "leases": leases.leases, "runs": runs}
        print_json(
            {"url": client.base_url} | {key: [item.raw for item in rows] for key, rows in documents.items()}
        )
        return
    from headrace_cli.show.fleet import devices_table, instances_table
    from headrace_cli.show.runs import runs_list

    out = console()
    out.print(instances_table(instances, coordinator=client.base_url, width=out.width))
    out.print(devices_table(leases, out.width))
    out.print(
        runs_list(runs[:10], console().width)
        if runs
        else "no runs yet: headrace run submit examples/tiny.yaml --watch"
    )


def open_dashboard(
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    url: Url = None,
    browser: Annotated[bool, typer.Option(help="Open it, where there is a browser.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Open the dashboard in a browser and print its address: a link that is good once and for a minute."""
    from headrace_cli.connection import connect, find_target

    with connect(find_target(url, data_dir)) as client:
        link = client.link()
    show_link(link, browser, as_json)


def show_link(link: str, browser: bool, as_json: bool) -> None:
    """Prints a link to the dashboard, and opens it where there is a browser and somebody who looks."""
    if as_json:
        print_json({"url": link})
        return
    console().print(link, markup=False, soft_wrap=True)
    if browser and sys.stdout.isatty() and (sys.platform == "darwin" or _has_display()):
        import webbrowser

        webbrowser.open(link)


def _has_display() -> bool:
    """Whether a browser would get a window, not this terminal."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
