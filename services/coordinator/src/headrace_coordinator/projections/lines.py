"""Append-only files of JSON lines that survive a torn write. Knows nothing of what a line says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Literal

from headrace_servicekit.folders import open_below, replace_below


class LineFile:
    """Appends whole lines. A line that a crash or a full disk has cut gets a line end before the next line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = _ends_torn(path)

    def append(self, lines: Sequence[bytes]) -> None:
        """Writes the lines with one system call where the disk allows it; OSError when it does not."""
        data = (b"\n" if self._torn else b"") + b"".join(line + b"\n" for line in lines)
        self._torn = True
        with _opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as file:
            while data:
                data = data[file.write(data) :]
        self._torn = False

    def size(self) -> int:
        """Bytes in the file; 0 when there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset behind the line, line) from an offset on, without a last line that has no end yet."""
    try:
        with _opened(path) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield offset, line
    except FileNotFoundError:
        return


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file at once: readers see the old content or the new."""
    with replace_below(path.parents[1], path) as file:
        file.write(data)


def _opened(path: Path, flags: int = os.O_RDONLY, mode: Literal["rb", "ab"] = "rb") -> BinaryIO | FileIO:
    """A file in a run's directory, to which no link leads. Raises OSError."""
    handle = open_below(path.parents[1], path, flags)
    return os.fdopen(handle, mode, buffering=0) if mode == "ab" else os.fdopen(handle, mode)
