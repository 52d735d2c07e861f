"""Recordings, what is in one, and what its replay has led to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace_cli.output import table

if TYPE_CHECKING:
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
