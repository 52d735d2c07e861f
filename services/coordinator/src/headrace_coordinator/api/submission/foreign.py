"""Paths of a spec that lead into what is not the caller's: another's run, or the fleet's own files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView

OPEN_FOLDERS = ("models",)
"""Of the data directory, what specs may name beside runs: models that commands make."""
SCHEMES = ("file:",)
"""What may stand before a path."""
_FOLDERS = re.compile(r"(?:.*\.)?(?:\w*_)?(?:path|dataset|folder|dir|directory)s?(?:\[\d+\])?")
"""Keys whose folder is read with all that lies below it."""
FIX = "name a file or folder that is yours"


def foreign_paths(
    value: Any, data_dir: Path, sees: Callable[[str], bool], key: str = ""
) -> Iterator[KeyProblemView]:
    """A problem for each text of a spec that, read as a path, leads there; links are followed first."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from foreign_paths(inner, data_dir, sees, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from foreign_paths(inner, data_dir, sees, f"{key}[{index}]")
    elif isinstance(value, str) and "/" in value and len(value) < 4096 and "\0" not in value:
        place = _place(value, data_dir)
        if place is None or place[:1] in [(each,) for each in OPEN_FOLDERS]:
            return
        if place[:1] == ("runs",) and len(place) > 1:
            if not sees(place[1]):
                yield problem(key, f"there is no {value[:200]}", FIX)
            return
        yield problem(key, f"{value[:200]} is the fleet's own", FIX)


def holding_paths(value: Any, data_dir: Path, key: str = "") -> Iterator[KeyProblemView]:
    """A problem for each folder of a spec in which the data directory lies: what reads it would find all runs there."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from holding_paths(inner, data_dir, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from holding_paths(inner, data_dir, f"{key}[{index}]")
    elif isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value and _FOLDERS.fullmatch(key):
        found = os.path.realpath(os.path.expanduser(value)).rstrip("/") + "/"
        if os.path.realpath(data_dir).startswith(found):
            yield problem(key, f"the fleet's own files are below {value[:200]}", FIX)


def _place(text: str, data_dir: Path) -> tuple[str, ...] | None:
    """The parts of a path behind the data directory; None for one that leads elsewhere."""
    for scheme in SCHEMES:
        text = text.removeprefix(scheme)
    path, _, _ = text.partition(".py:")
    base = os.path.realpath(data_dir)
    found = os.path.realpath(os.path.expanduser(path if os.path.isabs(path) else os.path.abspath(path)))
    if found != base and not found.startswith(base + os.sep):
        return None
    return Path(found).relative_to(base).parts
