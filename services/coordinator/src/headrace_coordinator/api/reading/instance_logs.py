"""The newest lines of an instance's log, where its launcher writes it beside the coordinator's data.

Reads the end of a file, bounded; knows no fleet. Containers write to their own standard error: there is no file then.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import msgspec
from headrace_schema.resources.overviews import LogLineView

READ_BYTES = 1 << 20
MOST_CHARACTERS = 4000
LEVELS = ("debug", "info", "warning", "error", "critical")
NAME = re.compile(r"[a-z]+(-[0-9]{1,6})?")


class _Record(msgspec.Struct):
    """What a line of `headrace_servicekit.logs` has; its other fields are not shown."""

    level: str
    message: str
    time: str = ""
    exception: str = ""


_decode = msgspec.json.Decoder(_Record).decode


def read_log(folder: Path, name: str, level: str, lines: int) -> list[LogLineView] | None:
    """At most `lines` records of at least a level in the file's last READ_BYTES, oldest first; None without a file.

    A line that is no record (a traceback, a library's print) has the level of the record before it.
    """
    path = folder / f"{name}.log"
    if not NAME.fullmatch(name) or path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - READ_BYTES)
        file.seek(start)
        whole = file.read(READ_BYTES).decode(errors="replace").splitlines()[1 if start else 0 :]
    found: list[LogLineView] = []
    for line in whole:
        found.append(_view(line, found[-1] if found else None))
    least = LEVELS.index(level)
    return [each for each in found if LEVELS.index(each.level) >= least][-lines:]


def _view(line: str, before: LogLineView | None) -> LogLineView:
    try:
        record = _decode(line)
        time = datetime.fromisoformat(record.time).timestamp() if record.time else None
    except (msgspec.DecodeError, ValueError):
        level, time = (before.level, before.time) if before else ("info", None)
        return LogLineView(level=level, time=time, text=line[:MOST_CHARACTERS])
    text = f"{record.message}\n{record.exception}" if record.exception else record.message
    level = record.level if record.level in LEVELS else "info"
    return LogLineView(level=level, time=time, text=text[:MOST_CHARACTERS])
