"""What a run has made: weights as a directory that engines load, events, trajectories, certificates, an endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, RunId, Url
from headrace_cli.connection import Answer, asking, connect, find_target, saying, show
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.output import console, print_json
from headrace_cli.show.runs import certificates_table
from headrace_cli.show.trajectories import trajectories_list

if TYPE_CHECKING:
    from headrace.client import Client

PATIENCE_S = 60.0  # how long a watched run's coordinator may be away, such as while it is restarted


def export(
    run: RunId,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="Step of the checkpoint; default: the newest one.", show_default=False),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="New directory, hf://ORG/NAME, or a store's s3://BUCKET/FOLDER; default: RUN-step-STEP here.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face directory, here, on a hub (with a card) or in a store.

    Reads the run's files alone: needs no fleet or GPU.
    """
    if find_spec("headrace_trainer") is None:
        raise user_error(
            "headrace run export", "headrace_trainer is not installed", "pip install 'headrace[local]'"
        )
    from headrace_cli.commands.publishing import is_elsewhere

    directory = _files_of(run, url, data_dir)
    if to and is_elsewhere(to):
        _publish(run, directory, to, at, as_json)
        return
    told = _exported(directory, to, at)
    weights = f" ({told['weights']})" if told["weights"] else ""
    text = f"step {told['step']} of {run} is in {told['directory']}{weights}"
    show(({"run": run, **told}, lambda: text), as_json)


def _publish(run: str, directory: Path, to: str, at: int | None, as_json: bool) -> None:
    from headrace_cli.commands.publishing import check, publish, write_card

    check(to)
    with tempfile.TemporaryDirectory(prefix="headrace-export-") as folder:
        told = _exported(directory, str(Path(folder) / "model"), at)
        model = Path(told.pop("directory"))
        write_card(model, run, directory, told)
        with saying(f"uploading to {to}"):
            where = publish(model, to, f"{run}, step {told['step']}")
    text = f"step {told['step']} of {run} is at {where}"
    show(({"run": run, **told, "address": where}, lambda: text), as_json)


def _exported(directory: Path, to: str | None, at: int | None) -> dict[str, Any]:
    """What the exporting process says of the model that it wrote. Raises CommandError."""
    command = [sys.executable, "-m", "headrace_trainer.export", str(directory), "--json"]
    command += ["--to", to] if to else []
    command += ["--at", str(at)] if at is not None else []
    with saying("reading the checkpoint"):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise CommandError(f"headrace_trainer.export ended with status {done.returncode}") from error
    if done.returncode:
        raise CommandError(told["message"], reason=told["reason"], exit_code=EXIT_USER_ERROR)
    return told


def _files_of(run: str, url: str | None, data_dir: Path) -> Path:
    """A run's directory on this host. Raises CommandError where it is on another."""
    directory = DataDir.at(data_dir).root / "runs" / run
    if url is None and directory.is_dir():
        return directory
    with connect(find_target(url, data_dir)) as client:
        directory = Path(client.get(run).raw["run_directory"])
    if not directory.is_dir():
        fix = f"where they are, say: python -m headrace_trainer.export {directory} --to DIRECTORY"
        raise user_error("RUN", f"the files of {run} are not on this host", fix)
    return directory


def logs(
    run: RunId,
    after: Annotated[int, typer.Option(help="Only events with a higher id.")] = 0,
    instance: Annotated[
        str, typer.Option(help="Only events that name this instance, such as rollout-0.")
    ] = "",
    follow: Annotated[
        bool, typer.Option(help="Go on until the run ends; --no-follow: print what there is and return.")
    ] = True,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Print a run's events as they happen, until it ends."""
    from headrace_cli.show.reporters import event_line

    with connect(find_target(url, data_dir)) as client:
        client.get(run)
        names = _names_of(client, instance) if instance else []
    with connect(find_target(url, data_dir), patience_s=PATIENCE_S) as client:
        for event in client.events(run, after, follow=follow):
            if names and not any(name in json.dumps(event.data) for name in names):
                continue
            if as_json:
                print_json(event.raw)
            else:
                console().print(event_line(event), markup=False, soft_wrap=True)


def _names_of(client: Client, instance: str) -> list[str]:
    """How events name an instance: by its name, and by the id of its process. CommandError where none has the name."""
    known = [(item.name.rpartition("/")[2], item.incarnation) for item in client.instances()]
    names = sorted({name for name, _ in known})
    if instance not in names:
        fix = f"the fleet has {', '.join(names) or 'none'}"
        raise user_error("--instance", f"there is no instance {instance!r}", fix)
    return [instance, *(incarnation for name, incarnation in known if name == instance and incarnation)]


@asking
def trajectories(
    client: Client,
    run: RunId,
    step: Annotated[int | None, typer.Option(help="Only of this step.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    whole: Annotated[
        bool, typer.Option("--whole", help="All of each, uncut: what the model read, and every message.")
    ] = False,
) -> Answer:
    """Show what the policy read and answered, and what it was worth."""
    found = client.trajectories(run, step, limit)
    document = {"trajectories": [item.raw for item in found]}
    if not found:
        return document, lambda: "no settled trajectories"
    return document, lambda: trajectories_list(found, console().width, whole=whole)


@asking
def endpoint(
    client: Client,
    run: RunId,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until the run is served.")] = 120.0,
) -> Answer:
    """Print where clients speak with the policy of an online run: eval "$(headrace run endpoint RUN)"."""
    import time

    late = time.monotonic() + wait
    base_url, key = client.endpoint(run)
    while not base_url and time.monotonic() < late and not client.get(run).ended:
        time.sleep(0.5)
        base_url, key = client.endpoint(run)
    if not base_url:
        fix = f"look at it: headrace run get {run}"
        raise user_error("RUN", "no rollout has the run open now, so nobody would answer", fix)
    text = f"export OPENAI_BASE_URL={base_url}\nexport OPENAI_API_KEY={key}"
    return {"base_url": base_url, "api_key": key}, lambda: text


@asking
def certificates(client: Client, run: RunId) -> Answer:
    """Show what each update was made from."""
    found = client.certificates(run)
    document = {"certificates": [item.raw for item in found]}
    return document, lambda: certificates_table(found, console().width) if found else "no updates yet"
