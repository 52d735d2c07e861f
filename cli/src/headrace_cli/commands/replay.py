"""`headrace record` and `headrace replay`: a step of a run as a file, and again in one service alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, RunId, Url
from headrace_cli.connection import connect, find_target, saying
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, user_error, writing
from headrace_cli.output import console, error_console, print_json, table

if TYPE_CHECKING:
    from headrace.client import Client
    from headrace.client.models import Recording as Found
    from headrace_servicekit.recording.files import Call, Recording
    from rich.table import Table

    from headrace_cli.replaying.results import Difference

CLOSE = 1e-3
"""Relative differences below this are what other devices, or another order of sums, make of the same step."""
TEXT = 60


def recordings_table(found: Sequence[Found]) -> Table:
    """The recordings of a run."""
    rows = [
        (each.step, f"{each.size_bytes / 1e6:.1f}", _clock(each.kept_at), each.checkpoint or "-", each.reason)
        for each in found
    ]
    return table((">step", ">MB", "kept", "begins with", "why"), rows)


def header_table(recording: Recording) -> Table:
    """What a recording is of."""
    header = recording.header
    base = header.base
    begins = (
        f"checkpoint {base.checkpoint}, version {base.number}"
        if base.checkpoint
        else "a Restore among the calls"
    )
    rows = [
        ("run", header.run),
        ("step", header.step),
        ("why", header.reason),
        ("kept", _clock(header.kept_at)),
        ("by", f"Headrace {header.headrace_version}, format {header.format}"),
        ("begins with", header.incomplete or begins),
        *((each.name, f"{each.kind}, {len(each.devices)} devices") for each in header.instances),
    ]
    return table(("", ""), rows)


def calls_table(recording: Recording) -> Table:
    """Every call, with its bytes each way and its seconds."""
    began = min((call.began_at for call in recording.calls), default=0.0)
    rows = [
        (
            call.step,
            recording.name_of(call.incarnation),
            call.method,
            f"{call.began_at - began:.3f}",
            "" if call.ended_at is None else f"{call.ended_at - call.began_at:.3f}",
            _bytes(call, is_request=True),
            _bytes(call, is_request=False),
            call.reason or ("ok" if call.ended_at is not None else "goes on"),
        )
        for call in recording.calls
    ]
    return table(
        (">step", "instance", "method", ">at s", ">took s", ">bytes sent", ">bytes back", "end"), rows
    )


def recording_document(recording: Recording) -> dict[str, Any]:
    """The same, for programs."""
    header = recording.header
    return {
        "run": header.run,
        "step": header.step,
        "reason": header.reason,
        "kept_at": header.kept_at,
        "headrace_version": header.headrace_version,
        "format": header.format,
        "checkpoint": header.base.checkpoint,
        "version": header.base.number,
        "incomplete": header.incomplete,
        "calls": [
            {
                "step": call.step,
                "kind": call.kind,
                "instance": recording.name_of(call.incarnation),
                "method": call.method,
                "began_at": call.began_at,
                "ended_at": call.ended_at,
                "bytes_sent": _bytes(call, is_request=True),
                "bytes_back": _bytes(call, is_request=False),
                "reason": call.reason,
            }
            for call in recording.calls
        ],
    }


def verdict(document: dict[str, Any], shown: Sequence[Difference]) -> str:
    """What a replay has led to, in words."""
    step, service = document["step"], document["service"]
    lines = [f"recorded {document['recorded_hash']}", f"replayed {document['replayed_hash']}"]
    if document["same"]:
        return "\n".join([*lines, f"the same: {document['values']} values of the {service} in step {step}"])
    count, worst = len(document["differences"]), document["worst_relative_difference"]
    what = f"not the same: {count} of {document['values']} values of the {service} differ"
    if worst < CLOSE:
        what += f", by at most {worst:.1e} of their size: other devices, threads or library versions do that"
    lines.append(what)
    lines += [
        f"  {each.name}: {_short(each.recorded)} recorded, {_short(each.replayed)} here" for each in shown
    ]
    return "\n".join(lines + (["  …; --json has all"] if count > len(shown) else []))


def _bytes(call: Call, *, is_request: bool) -> int:
    return sum(len(each.data) for each in call.messages if each.is_request == is_request)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


POLL_S = 0.5
SHOWN = 12
"""Differences that are shown; --json has all."""


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command()(record)
    app.command()(replay)


def record(
    run: RunId,
    step: Annotated[
        int | None, typer.Option(min=1, help="The step; default: list what is recorded.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="File; default: RUN-step-N.recording here.", show_default=False)
    ] = None,
    with_checkpoint: Annotated[
        bool,
        typer.Option(
            "--with-checkpoint", help="Also download the checkpoint that it begins with, beside it."
        ),
    ] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the step is made.")] = True,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Record a step of a run, before it is made, or fetch the recording that a step has left; see headrace replay."""
    with connect(find_target(url, data_dir), patience_s=30.0) as client:
        found = client.recordings(run)
        if step is None:
            _list(found.recordings, found.wanted, as_json)
            return
        kept = next((each for each in found.recordings if each.step == step), None)
        if kept is None:
            client.record(run, step)
            if not wait:
                _told({"run": run, "step": step, "state": "WANTED"}, f"step {step} will be recorded", as_json)
                return
            with saying(f"step {step} of {run} to be made"):
                kept = _made(client, run, step)
        path = to or Path(f"{run}-{kept.name}")
        with writing(path):
            client.download_recording(run, kept.name, path)
        text = f"step {step} is in {path} ({kept.size_bytes / 1e6:.1f} MB): headrace replay {path} --service trainer"
        document = {"run": run, "step": step, "state": "RECORDED", "file": str(path), **kept.raw}
        if kept.checkpoint and with_checkpoint:
            from headrace_cli.replaying.calls import checkpoint_beside

            with writing(checkpoint_beside(path)):
                client.download_recorded_checkpoint(run, kept.name, checkpoint_beside(path))
            document["checkpoint_file"] = str(checkpoint_beside(path))
        elif kept.checkpoint:
            text += f"\nits trainer begins with checkpoint {kept.checkpoint}: --with-checkpoint downloads that too"
        _told(document, text, as_json)


def _made(client: Client, run: str, step: int) -> Found:
    while True:
        ended = client.get(run).ended
        for each in client.recordings(run).recordings:
            if each.step == step:
                return each
        if ended:
            raise CommandError(f"{run} has ended, and step {step} was not recorded; see its events")
        time.sleep(POLL_S)


def _list(found: list[Found], wanted: list[int], as_json: bool) -> None:
    if as_json:
        print_json({"recordings": [each.raw for each in found], "wanted": wanted})
        return

    console().print(recordings_table(found) if found else "no recordings")
    if wanted:
        console().print(f"asked for, and not made yet: {', '.join(map(str, wanted))}")


def _told(document: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        console().print(text, markup=False)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording, from headrace record.")],
    service: Annotated[
        str, typer.Option(help="The service that it is replayed into: trainer, reward or rollout.")
    ] = "trainer",
    show: Annotated[bool, typer.Option("--show", help="Only show what is in it.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint that the step begins with: a folder, or a downloaded tar file; default: beside FILE.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="In place of the spec's model.path.", show_default=False)] = "",
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Give the service this terminal, so that breakpoint() works in it."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a recorded step again in one service alone, and compare what comes out, bit by bit.

    Exit code 0: the same; 1: not the same, with the values that differ; 2: the recording or this machine lacks
    something.
    """
    from headrace_servicekit.recording.files import BadRecording, read_recording

    from headrace_cli.replaying.calls import SERVICES

    if service not in SERVICES:
        raise user_error(
            "--service", f"{service!r} cannot be replayed alone", f"write one of {', '.join(SERVICES)}"
        )
    if checkpoint is not None and not checkpoint.exists():
        raise user_error("--checkpoint", f"there is no {checkpoint}", "name the folder or the tar file")
    try:
        recording = read_recording(file)
    except BadRecording as error:
        raise CommandError(str(error), reason="BAD_RECORDING", exit_code=EXIT_USER_ERROR) from error
    if show:
        _show(recording, as_json)
    else:
        _replay(recording, service, checkpoint, model, debug, as_json)


def _show(recording: Recording, as_json: bool) -> None:

    if as_json:
        print_json(recording_document(recording))
        return
    console().print(header_table(recording))
    console().print(calls_table(recording))


def _replay(
    recording: Recording, service: str, checkpoint: Path | None, model: str, debug: bool, as_json: bool
) -> None:
    from importlib.util import find_spec

    from headrace_cli.replaying.driver import replay as replay_calls
    from headrace_cli.replaying.results import differences, hash_of, worst

    if find_spec(f"headrace_{service}") is None:
        raise user_error(
            "headrace replay", f"headrace_{service} is not installed", "pip install 'headrace[local]'"
        )
    said = error_console()
    found = replay_calls(
        recording,
        service,
        checkpoint=checkpoint,
        model=model,
        debug=debug,
        say=lambda text: None if as_json else said.print(f"replaying {text}", markup=False),
    )
    unlike = differences(found.recorded, found.replayed)
    document = {
        "run": recording.header.run,
        "step": recording.header.step,
        "service": service,
        "calls": found.calls,
        "values": len(found.recorded),
        "recorded_hash": hash_of(found.recorded),
        "replayed_hash": hash_of(found.replayed),
        "same": not unlike,
        "worst_relative_difference": min(worst(unlike), 1e308),
        "differences": [
            {"name": each.name, "recorded": each.recorded, "replayed": each.replayed} for each in unlike
        ],
    }
    if as_json:
        print_json(document)
    else:
        console().print(verdict(document, unlike[:SHOWN]), markup=False)
    if unlike:
        raise typer.Exit(1)
