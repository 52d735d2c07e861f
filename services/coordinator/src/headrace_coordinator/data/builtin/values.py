"""What stands under the keys of a row: texts, numbers, what travels to the scorers; and what a row is refused with."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_schema.problems import choose, nearest, show

Row = Mapping[str, Any]
FEW_CHARACTERS = 1 << 20
MOST_NESTED = 100
"""Depth of nested objects and lists; the reward service reads twice that."""
_PLAIN = frozenset({str, int, bool, type(None)})


class BadRow(ValueError):
    """What is wrong with a row, and how to mend it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def file_of(path: str | Path) -> Path:
    """The path, `~` replaced. Raises OSError for a pipe, socket or device, the opening of which may wait for ever."""
    found = Path(os.path.expanduser(path))
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and no file")
    return found


def value_of(row: Row, key: str) -> Any:
    """What stands under a key, or under a path of keys; raises `BadRow` where nothing does."""
    if key in row:
        return row[key]
    found: Any = row
    for step in key.split("."):
        if not isinstance(found, Mapping) or step not in found:
            raise BadRow(f"has no key {key!r}", choose(key, row, extra="or name another key in data.options"))
        found = found[step]
    return found


def key_if_there(row: Row, key: str) -> str:
    """The key, where the row has it; raises `BadRow` where it has one that differs by a slip."""
    try:
        value_of(row, key)
    except BadRow:
        if nearest(key, row):
            raise
        return ""
    return key


def text_of(row: Row, key: str) -> str:
    """The text or number under a key, also as a list of one; raises `BadRow` for anything else."""
    return as_text(value_of(row, key), key)


def row_bytes(row: Row) -> int:
    """About the bytes of a row's texts and of what is nested in it; 0 where a quick look says that they are few.

    Raises `BadRow` where objects and lists are nested too deep to be read again.
    """
    characters = 0
    for value in row.values():
        if isinstance(value, str):
            characters += len(value)
        elif value is not None and not isinstance(value, (int, float)):
            return _bytes_of(row)
    return 0 if characters <= FEW_CHARACTERS else _bytes_of(row)


def _bytes_of(value: Any, depth: int = 0) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    if depth > MOST_NESTED:
        raise BadRow(f"has more than {MOST_NESTED} objects and lists in each other", "write it flatter")
    if isinstance(value, Mapping):
        return sum(_bytes_of(each, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes_of(each, depth + 1) for each in value)
    return len(repr(value)) + 2 if isinstance(value, (int, float)) else 0


def share_of(row: Row, key: str) -> float:
    """The number from 0 to 1 under a key, maybe written as text; raises `BadRow` for anything else."""
    text = text_of(row, key)
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise BadRow(f"has {text!r} as {key!r}", "write a number from 0 to 1")
    return share


def as_text(value: Any, key: str) -> str:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"has {value} as {key!r}", "write a number, or remove the row")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadRow(f"has {show(value)} as {key!r}", "write text or a number")
    return str(value)


def plain_row(row: Row) -> dict[str, Any]:
    """What travels to the scorers: JSON's types; anything else as its text."""
    return {key: value if type(value) in _PLAIN else jsonable(value, key) for key, value in row.items()}


def jsonable(value: Any, key: str) -> Any:
    if isinstance(value, float):
        if math.isinf(value):
            raise BadRow(f"has {value} under {key!r}", "write a finite number, or null")
        # Tables write a missing number as NaN.
        return None if math.isnan(value) else value
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [jsonable(each, f"{key}[{place}]") for place, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(name): jsonable(each, f"{key}.{name}") for name, each in value.items()}
    return str(value)
