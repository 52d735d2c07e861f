"""Structured logs on standard error: one line per record, with instance and run ids from the context."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""All control characters but tab and line feed, and those of bidirectional text."""
_instance: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_instance", default="")
_run: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_run", default="")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(level: str = "info", *, instance: str = "", json_lines: bool | None = None) -> None:
    """Sends all logs to standard error; JSON lines unless it is a terminal. The last call counts."""
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    handler = CountingHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if instance:
        _instance.set(instance)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. Further fields of a record go into `extra={...}`."""
    return logging.getLogger(name)


@contextmanager
def log_context(*, instance: str | None = None, run: str | None = None) -> Iterator[None]:
    """Adds ids to every record logged inside, also by tasks that are started inside."""
    tokens = [
        (var, var.set(value)) for var, value in ((_instance, instance), (_run, run)) if value is not None
    ]
    try:
        yield
    finally:
        for var, token in reversed(tokens):
            var.reset(token)


def set_log_context(*, instance: str = "", run: str = "") -> None:
    """Sets the ids for the rest of the current task."""
    if instance:
        _instance.set(instance)
    if run:
        _run.set(run)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = {"instance": _instance.get(), "run": _run.get()}
    fields.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
    return {key: value for key, value in fields.items() if value != ""}


WINDOW_S, LINES, TRACEBACKS = 10.0, 200, 10
"""Limits of what one place in the code may write in a period, and the period in seconds; the rest is counted."""


def printable(text: str) -> str:
    """The text with visible escapes for what would steer a terminal (ESC, BEL, C1 …) or turn a line's direction."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text) if _STEERING.search(text) else text


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes records, those of one place in the code up to a bound; the next one says how many it stands for."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._places: dict[tuple[str, int], _Place] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Writes or counts it; the handler's lock is held."""
        now = time.monotonic()
        for key, each in list(self._places.items()) if self._due(now) else ():
            if now - each.since >= WINDOW_S:
                del self._places[key]
                self._tell(each)
        place = self._places.setdefault((record.pathname, record.lineno), _Place(now))
        place.written += 1
        if place.written <= (TRACEBACKS if record.exc_info else LINES):
            super().emit(record)
        else:
            place.left_out, place.last = place.left_out + 1, record

    def close(self) -> None:
        """Tells of what was only counted."""
        self.acquire()
        try:
            for each in self._places.values():
                self._tell(each)
            self._places.clear()
        finally:
            self.release()
        super().close()

    def _due(self, now: float) -> bool:
        oldest = next(iter(self._places.values()), None)
        return oldest is not None and now - oldest.since >= WINDOW_S

    def _tell(self, place: _Place) -> None:
        if place.last is not None:
            place.last.exc_info = None
            place.last.not_written = place.left_out
            super().emit(place.last)


@dataclass
class _Place:
    since: float
    written: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, instance, run and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return printable(json.dumps(line, default=str, ensure_ascii=False))


class HumanFormatter(logging.Formatter):
    """Time, level, message and `key=value` fields, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{clock} {record.levelname:<7} {record.getMessage()}{fields}"
        whole = f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
        return printable(whole)
