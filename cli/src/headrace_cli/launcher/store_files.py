"""The embedded store's append-only files: the commands in them with their places, and cutting them. Asks no server.

A folder holds a manifest, a base (the state in the server's own binary form) and after it increments: commands as
clients send them. Those that a script or a transaction made stand between MULTI and EXEC and hold together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FOLDER = "appendonlydir"
_ENTRY = re.compile(r"^file (?P<name>\S+) seq \d+ type (?P<type>[bih])")


class Garbage(Exception):
    """What stands at a byte of a file is no command."""


class CutShort(Exception):
    """The file ends within a command, as after a loss of power: the server itself leaves that one out."""


@dataclass(frozen=True)
class Command:
    """A command. `unit` is the first byte of it, or of the transaction that it belongs to; `end` is None within one."""

    unit: int
    end: int | None
    words: tuple[bytes, ...]


@dataclass(frozen=True)
class Increment:
    """How far an increment can be read. `sound` is the first byte that is not; `problem` is "" where all is sound."""

    path: Path
    sound: int
    problem: str = ""
    cut_short: bool = False


def manifest(folder: Path) -> Path:
    """The manifest of a store's directory."""
    return folder / FOLDER / "appendonly.aof.manifest"


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Bases (one or none) and increments of a store's directory, in order."""
    found: dict[str, list[Path]] = {"b": [], "i": [], "h": []}  # base, increment, history (left over)
    for line in manifest(folder).read_text(errors="replace").splitlines():
        if entry := _ENTRY.match(line):
            found[entry["type"]].append(folder / FOLDER / entry["name"])
    return found["b"], found["i"]


def commands(path: Path) -> Iterator[Command]:
    """The commands of an increment. Raises Garbage or CutShort where the readable part ends."""
    unit, grouped = 0, False
    with path.open("rb") as file:
        while head := file.readline():
            if head.startswith(b"#"):
                continue  # A remark: the time.
            unit = unit if grouped else file.tell() - len(head)
            words = tuple(_word(file) for _ in range(_length(head, b"*")))
            name = words[0].upper() if words else b""
            grouped = (grouped or name == b"MULTI") and name != b"EXEC"
            yield Command(unit, None if grouped else file.tell(), words)
    if grouped:
        raise CutShort("the file ends within a transaction")


def _word(file: BinaryIO) -> bytes:
    size = _length(file.readline(), b"$")
    data = file.read(size + 2)
    if len(data) < size + 2:
        raise CutShort("the file ends within a command")
    if data[-2:] != b"\r\n":
        raise Garbage("a value does not end where its length says")
    return data[:-2]


def _length(line: bytes, mark: bytes) -> int:
    """The number in a line such as b"*3"; at most 11 digits, more than a value may have."""
    digits = line[1:-2]
    if line[:1] == mark and line.endswith(b"\r\n") and digits.isdigit() and len(digits) < 12:
        return int(digits)
    if not line.endswith(b"\n") and len(line) < 14 and line[:1] in (b"", mark):
        raise CutShort("the file ends within a command")
    raise Garbage(f"{line[:16]!r} where the length of a command is due")


def look(path: Path) -> Increment:
    """Reads an increment through."""
    sound = 0
    try:
        for command in commands(path):
            sound = sound if command.end is None else command.end
    except Garbage as error:
        return Increment(path, sound, str(error))
    except CutShort as error:
        return Increment(path, sound, str(error), cut_short=True)
    return Increment(path, sound)


def find(path: Path, *words: bytes) -> Command | None:
    """The last command of an increment that begins with these words, the first of which is in upper case."""
    last = None
    for command in commands(path):
        if (command.words[0].upper(), *command.words[1 : len(words)]) == words:
            last = command
    return last


def cut(folder: Path, path: Path, size: int) -> None:
    """Leaves out what stands in an increment from byte `size` on, and later increments."""
    with path.open("r+b") as file:
        file.truncate(size)
    kept = []
    for line in manifest(folder).read_text(errors="replace").splitlines():
        kept.append(line)
        if (entry := _ENTRY.match(line)) and entry["name"] == path.name:
            break
    manifest(folder).write_text("".join(f"{line}\n" for line in kept))
