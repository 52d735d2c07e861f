"""What commands print: tables for people, JSON for programs, and one form of error. Knows no command."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TextIO

from headrace_servicekit.logs import printable

from headrace_cli.errors import EXIT_FAILED, CommandError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

NEVER_WRAPPED = ("run", "instance", "state", "device", "epoch", "mismatch", "its KL", "set digest")
"""Columns that a reader copies from, or compares down the page."""


@cache
def console() -> Console:
    """Standard output for people."""
    return _console(soft_wrap=not sys.stdout.isatty())


@cache
def error_console() -> Console:
    """Standard error for people."""
    return _console(stderr=True, soft_wrap=True)


def _console(**options: Any) -> Console:
    """A console that shows texts of users as they are: no markup, no names of emoji, no characters that steer a
    terminal or turn a line's direction.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Safe(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return Safe(highlight=False, markup=False, emoji=False, color_system=_color_system(), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A text of plain parts and of (part, style)."""
    from rich.text import Text

    return Text.assemble(*parts)


def _color_system() -> Literal["auto"] | None:
    """None where NO_COLOR is set: rich's own reading of it keeps bold and dim."""
    return None if os.environ.get("NO_COLOR") else "auto"


def print_json(document: Any) -> None:
    """One JSON document on one line of standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, separators=(", ", ": ")) + "\n")
    sys.stdout.flush()


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, narrow: bool = False
) -> Table:
    """A plain table; headers that start with '>' are right-aligned; without headers when all are empty."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 0 if narrow else 1),
        show_header=any(headers),
    )
    for header in headers:
        right = header.startswith(">")
        name = header.removeprefix(">")
        made.add_column(
            name,
            justify="right" if right else "left",
            overflow="fold",
            min_width=len(name),
            no_wrap=name in NEVER_WRAPPED,
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def print_error(error: CommandError, as_json: bool) -> None:
    """A sentence and its keys on standard error; when asked, the same as JSON on standard output."""
    from rich.text import Text

    out = error_console()
    out.print(Text.assemble(("error: ", "bold red"), error.message))
    if len(error.problems) > 1 or (error.problems and error.problems[0].problem not in error.message):
        for item in error.problems:
            fix = ("; ", item.fix) if item.fix else ("", "")
            out.print(Text.assemble("  ", (item.key, "bold"), ": ", item.problem, fix[0], (fix[1], "green")))
    if as_json:
        problems = [{"key": item.key, "problem": item.problem, "fix": item.fix} for item in error.problems]
        print_json({"error": {"reason": error.reason, "message": error.message, "problems": problems}})


STATE_STYLES = {
    "SUCCEEDED": "green",
    "READY": "green",
    "SILENT": "yellow",
    "RUNNING": "cyan",
    "HELD": "cyan",
    "LEASED": "cyan",
    "PAUSED": "yellow",
    "PAUSING": "yellow",
    "RECOVERING": "yellow",
    "DRAINING": "yellow",
    "REVOKING": "yellow",
    "CANCELLED": "magenta",
    "QUARANTINED": "red",
    "LOST": "red",
    "FAILED": "red",
}


def state_text(text: str, state: str = "") -> Any:
    """`text` in the colour of `state`, which is the text itself unless given."""
    from rich.text import Text

    return Text(text, style=STATE_STYLES.get(state or text, ""))


class _Stream:
    """A text stream of the command, which ends the command where nobody can read what is written to it."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream = name, stream

    def write(self, text: str) -> int:
        """Writes, or ends the command."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.lost(error)
            return len(text)

    def flush(self) -> None:
        """Flushes, or ends the command."""
        try:
            self._stream.flush()
        except OSError as error:
            self.lost(error)

    def lost(self, error: OSError) -> None:
        """Ends the command: quietly where its reader has gone, else with one line on standard error.

        What cannot be written to standard error is left out.
        """
        discard(self._stream)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0) from error
        if self._name == "stdout":
            reason = "it is closed" if error.errno == errno.EBADF else error.strerror
            print(f"error: standard output cannot be written: {reason}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_FAILED) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds nowhere, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _open_streams() -> dict[str, TextIO]:
    """The standard streams. What is closed from the start reads as empty and cannot be written; its number is
    taken, so that no file or connection of the command gets it.
    """
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    return {"stdout": sys.stdout, "stderr": sys.stderr}


@contextmanager
def standard_streams() -> Iterator[None]:
    """Ends the command with status 0 when the reader of its output has gone (`headrace run logs RUN | head`), and with
    one line and status 1 when its output cannot be written (a full disk, `>&-`).

    SIGPIPE would also end a command whose coordinator closes a connection, and typer and rich turn a BrokenPipeError
    that reaches `main` into status 1.
    """
    streams = _open_streams()
    for name, stream in streams.items():
        setattr(sys, name, _Stream(name, stream))
    try:
        yield
    except SystemExit as ended:
        _flush(failed=ended.code not in (None, 0))
        raise
    else:
        _flush(failed=False)
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)


def _flush(failed: bool) -> None:
    """Writes what is left; the command keeps the status of what failed before."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except SystemExit:
            if not failed:
                raise
