"""`headrace demo`: the main job from nothing to a trained model, on a fleet of its own."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import (
    DEFAULT_DATA_DIR,
    DataDirOption,
    JsonFlag,
    NoToken,
    Url,
    complete_key,
)
from headrace_cli.connection import Target, connect, find_target
from headrace_cli.errors import EXIT_INTERRUPTED, CommandError
from headrace_cli.launcher.plan import FleetPlan
from headrace_cli.output import console, error_console, print_json

if TYPE_CHECKING:
    from headrace.client import Client
    from rich.console import Console

    from headrace_cli.watching import Reporter, Snapshot

PATIENCE_S = 60.0
CANCEL_S = 5.0
REAP_S = 10.0
DEMO_DATA_DIR = Path(".headrace/demo")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command()(demo)


def demo(
    preset: Annotated[
        str, typer.Option(help="tiny (about a minute) or smollm2 (about four minutes).")
    ] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; default: the preset's.", show_default=False)
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override of the spec.", autocompletion=complete_key),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port of the demo's fleet; 0: a free one.")
    ] = 0,
    url: Url = None,
    data_dir: DataDirOption = DEMO_DATA_DIR,
    no_token: NoToken = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a model end to end: make it, start a fleet, run, show what it learned, stop the fleet."""
    started_at = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # SIGINT too: in the background of a script it would be ignored
    overrides = [f"seed={seed}", *([f"steps={steps}"] if steps else []), *(sets or [])]
    try:
        _demo(_Request(preset, overrides, port, url, data_dir, no_token, as_json), started_at)
    except KeyboardInterrupt:
        error_console().print("interrupted: the run is cancelled and the fleet stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@dataclass(frozen=True)
class _Request:
    """What the user asked for."""

    preset: str
    overrides: list[str]
    port: int
    url: str | None
    data_dir: Path
    no_token: bool
    as_json: bool

    @property
    def out(self) -> Console:
        return error_console() if self.as_json else console()


def _demo(request: _Request, started_at: float) -> None:
    from headrace_cli.demo import ModelMaker, check_counts, example, outcome, placement, print_report
    from headrace_cli.launcher.data_dir import DataDir

    spec_file = example(request.preset)
    data_dir = DataDir.at(request.data_dir)
    data_dir.prepare()
    # The examples name the models of the default data directory, whose fleet is not the demo's.
    models = DataDir.at(DEFAULT_DATA_DIR if request.data_dir == DEMO_DATA_DIR else request.data_dir).models
    with ModelMaker(request.preset, data_dir, models) as maker, _fleet(request, data_dir.root) as target:
        up_s = time.monotonic() - started_at
        if not maker.is_there:
            request.out.print(maker.sentence)
        model = maker.wait()
        with connect(target, patience_s=PATIENCE_S) as client:
            chosen = placement(request.preset, len(client.leases().devices))
            spec = _load(spec_file, [f"model.path={model}", *chosen, *request.overrides])
            if not request.url:
                cancel_leftovers(client, request.out)
            snapshot = _run(client, spec, request)
            run = snapshot.run
            result = outcome(run, snapshot.steps, time.monotonic() - started_at, up_s)
            certificates = client.certificates(run.id)
    if not request.as_json:
        print_report(request.out, run, result)
    else:
        print_json(result.to_json())
    check_counts(run, certificates)
    if run.state != "SUCCEEDED":
        raise CommandError(f"run {run.id} {run.state}: {run.reason or 'no reason given'}", reason=run.state)


def _load(spec_file: Path, overrides: list[str]) -> dict[str, Any]:
    from headrace.client import HeadraceError, load_spec

    from headrace_cli.errors import refused

    try:
        return load_spec(spec_file, overrides)
    except HeadraceError as error:
        raise refused(error) from error


@contextmanager
def _fleet(request: _Request, data_dir: Path) -> Iterator[Target]:
    """The fleet that `--url` names, or one of its own that ends with the block."""
    if request.url:
        request.out.print(f"on the fleet at {request.url} (--url, HEADRACE_URL)", markup=False)
        yield find_target(request.url, request.data_dir)
        return
    from headrace_servicekit.rpc.addresses import free_port

    from headrace_cli.commands.starting import start_quietly, start_with_spinner
    from headrace_cli.launcher.data_dir import DataDir
    from headrace_cli.launcher.stop import stop_fleet, undisturbed

    # Never the default port: other commands without --url would find the demo's fleet there.
    plan = FleetPlan(str(data_dir), request.port or free_port(), tethered=True, no_token=request.no_token)
    quiet = request.as_json or not sys.stdout.isatty()
    fleet = start_quietly(plan) if quiet else start_with_spinner(plan)
    request.out.print(
        f"fleet ready in {fleet.seconds:.1f} s at {fleet.state.url}, logs in {data_dir / 'logs'}"
    )
    try:
        yield find_target(fleet.state.url, data_dir)
    finally:
        with undisturbed():
            stop_fleet(DataDir.at(data_dir), fleet.launcher.pid)
            fleet.launcher.wait(REAP_S)


def cancel_leftovers(client: Client, out: Console) -> None:
    """Ends runs that a killed demo left in its data directory: a new fleet would go on with them."""
    for run in client.list():
        if not run.ended:
            out.print(f"cancelling run {run.id}, which an earlier demo did not finish", markup=False)
            client.cancel(run.id)


def _run(client: Client, spec: dict[str, Any], request: _Request) -> Snapshot:
    """Submits the run and follows it; when that is interrupted the run is cancelled."""
    from headrace_cli.launcher.stop import undisturbed
    from headrace_cli.show.reporters import make_reporter
    from headrace_cli.watching import follow

    run = client.submit(spec)
    reporter: Reporter = make_reporter(on_error_stream=request.as_json)
    try:
        return follow(client, run.id, reporter)
    except BaseException:  # Ctrl-C too: the run is cancelled whatever ended the watching
        with undisturbed():
            reporter.close()
            request.out.print("stopping: cancelling the run, then the fleet (up to half a minute)")
            _cancel(client, run.id)
        raise
    finally:
        reporter.close()


def _cancel(client: Client, run_id: str) -> None:
    from headrace.client import HeadraceError

    try:
        client.cancel(run_id)
        client.wait(run_id, CANCEL_S)
    except HeadraceError:
        return  # the fleet is about to stop, or was not there to begin with
