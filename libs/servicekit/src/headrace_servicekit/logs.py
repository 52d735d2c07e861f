"""Structured logs on standard error: one line per record, with instance and run ids from the context."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

_instance: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_instance", default="")
_run: contextvars.ContextVar[str] = contextvars.ContextVar("headrace_run", default="")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(level: str = "info", *, instance: str = "", json_lines: bool | None = None) -> None:
    """Sends all logs to standard error; JSON lines unless it is a terminal. The last call counts."""
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    handler = logging.StreamHandler(sys.stderr)
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
        return json.dumps(line, default=str, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """Time, level, message and `key=value` fields, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{clock} {record.levelname:<7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
