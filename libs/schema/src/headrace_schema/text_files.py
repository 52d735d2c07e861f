"""Text files that users give, read a line at a time. Knows no form of a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    r"""Lines that are not blank, with their numbers from 1. Raises OSError, and UnicodeDecodeError for no UTF-8.

    A line ends with \n or \r\n alone: `str.splitlines` also splits at U+2028 and others, which texts have in them. A
    byte order mark is left out.
    """
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")
