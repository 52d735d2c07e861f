"""Items from a file with one JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from headrace_schema.images import MOST_PROMPT_IMAGE_BYTES
from headrace_schema.problems import Impossible, nearest, problem, show
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.builtin.rows import RowSource
from headrace_coordinator.data.builtin.values import Row, file_of
from headrace_coordinator.data.items import DataItem

READ_BYTES = 1 << 20
"""At a time. Each read frees the GIL for a moment. A thread that does so every few milliseconds keeps it from the
event loop, which wakes, finds it taken again, and begins to wait anew.
"""
LINE_BYTES = 1024 * 1024
IMAGE_LINE_BYTES = 2 * MOST_PROMPT_IMAGE_BYTES
"""Most bytes of a line with images in base64."""
PATH_KEY = "data.options.path"


class Jsonl(RowSource):
    """Questions and answers under chosen keys; every other text or number of a line is a template field."""

    path: str = Field(description="file with one JSON object a line, as the coordinator sees it")

    @override
    def fingerprint(self) -> str:
        """Time and size of the file."""
        try:
            state = Path(os.path.expanduser(self.path)).stat()
        except OSError:
            return "unreadable"
        return f"{state.st_mtime_ns}-{state.st_ctime_ns}-{state.st_size}"

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields an item a line; blank lines are skipped, ill-formed ones named by their number."""
        folder = Path(os.path.expanduser(self.path)).parent
        return self.row_items(self._rows(), self._place, PATH_KEY, folder)

    def _rows(self) -> Iterator[tuple[int, Row]]:
        try:
            with file_of(self.path).open("rb", buffering=READ_BYTES) as file:
                number, most = 0, IMAGE_LINE_BYTES if self.files else LINE_BYTES
                while line := file.readline(most + 1):
                    number += 1
                    if len(line) > most:
                        self._wrong(number, f"is longer than {most} bytes", "shorten or split it")
                    if line.strip():
                        yield number, self._row(number, line)
        except OSError as error:
            reason = f"{self.path} cannot be read: {error.strerror or error}"
            raise Impossible([problem(PATH_KEY, reason, self._fix_path())]) from error

    def _row(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line, parse_constant=_no_constant)
            if b"\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeError:
            if number == 1 and line.startswith(b"\x1f\x8b"):
                self._wrong(number, "begins as a gzip file does", "unpack the file (gunzip)")
            self._wrong(
                number, "is not valid Unicode", "convert the file to UTF-8; no halves of surrogate pairs"
            )
        except (ValueError, RecursionError) as error:
            self._wrong(number, f"is not JSON ({error})", "write one JSON object a line")
        if not isinstance(row, dict):
            self._wrong(number, f"is {show(row)}, not a JSON object", 'write {"question": …, "answer": …}')
        return row

    def _wrong(self, number: int, reason: str, fix: str) -> NoReturn:
        self.wrong(PATH_KEY, self._place(number), reason, fix)

    def _place(self, number: int) -> str:
        return f"line {number} of {self.path}"

    def _fix_path(self) -> str:
        """A file of nearly this name, and no other: whoever asks over the API may not see the folder."""
        folder = Path(os.path.expanduser(self.path)).parent
        try:
            names = [entry.name for entry in folder.iterdir() if entry.is_file()]
        except OSError:
            return f"name a readable file; the folder {folder} cannot be read either"
        close = nearest(Path(self.path).name, names)
        return f"did you mean {close}?" if close else "name a readable file of the coordinator's host"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
