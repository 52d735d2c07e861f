"""Ends the command quietly, with status 0, when the reader of its output has gone (`headrace run logs RUN | head`).

Not by SIGPIPE, which would also end it when a coordinator closes a connection. Not by catching BrokenPipeError
in `main` either: typer and rich turn that into status 1 on the way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO


class _Pipe:
    """A text stream whose broken pipe is the end of the command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or ends the command."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()

    def flush(self) -> None:
        """Flushes, or ends the command."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> NoReturn:
        discard(self._stream)
        raise SystemExit(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds nowhere, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def quiet_pipes() -> Iterator[None]:
    """Guards standard output and standard error while a command runs; either may be closed from the start."""
    streams = {name: stream for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
    for name, stream in streams.items():
        setattr(sys, name, _Pipe(stream))
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)
            try:
                stream.flush()
            except BrokenPipeError:
                discard(stream)
