"""Finds what is damaged in the store of a local fleet, and goes on from what is good before it. Shows and asks nothing.

Works on a copy, which it cuts where it is damaged until the store's own server takes it and the coordinator can read
all that it holds. The runs' checkpoints and histories know what is lost with the rest: the next start says it.

A folder of the store holds a manifest, a base (the state in the server's own binary form) and after it increments:
commands as clients send them. Those that a script or a transaction made stand between MULTI and EXEC and hold together.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from headrace_cli.errors import CommandError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.store import binary, store_command, store_url, wait_for_store
from headrace_cli.launcher.tether import tether

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


EXAMINED = "examined"
READ_S = 120.0
MOST_CUTS = 100
_RDB_PLACE = re.compile(r"\[offset (\d+)\]")


@dataclass(frozen=True)
class Damage:
    """A place in a file of the store: the first byte of what cannot be read, and how many bytes are lost from there on.

    Where the file only ends too early (`cut_short`), the server starts all the same, without its last command.
    """

    file: Path
    offset: int
    what: str
    lost: int
    cut_short: bool = False


@dataclass
class Examination:
    """What is damaged, and what is good before it. `last` and `snapshot` are numbers of events, 0 for none."""

    damages: list[Damage] = field(default_factory=list)
    snapshot: int = 0
    last: int = 0
    runs: dict[str, str] = field(default_factory=dict)
    """States of the runs that have not been archived, by id."""

    @property
    def starts(self) -> bool:
        """Whether the store starts with its files as they are."""
        return all(damage.cut_short for damage in self.damages)

    def sentence(self, data_dir: DataDir) -> str:
        """Where the store is damaged first, what is good, and what to do."""
        first = self.damages[0]
        snapshot = f"its newest good snapshot is of event {self.snapshot}" if self.snapshot else "no snapshot"
        good = f"{snapshot}, the last good event is {self.last}" if self.last else "nothing before it is good"
        return (
            f"the store is damaged: {first.file}, byte {first.offset}: {first.what}; {good}; "
            f"`headrace repair --data-dir {data_dir.root}` keeps the damaged file aside and goes on from there"
        )


def examine(data_dir: DataDir) -> Examination:
    """What is damaged in the store of a fleet that is down; the repaired copy is ready for `adopt`.

    Raises CommandError: there is no store here, or it cannot be examined.
    """
    if not manifest(data_dir.store).exists():
        raise CommandError(f"{data_dir.root} holds no store; a Redis of yours has tools of its own")
    copy = data_dir.store / EXAMINED
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(data_dir.store / FOLDER, copy / FOLDER)
        return _examine(data_dir, copy)
    except OSError as error:
        raise CommandError(f"the store cannot be copied to {copy}: {error.strerror}") from error


def discard(data_dir: DataDir) -> None:
    """Removes the copy."""
    shutil.rmtree(data_dir.store / EXAMINED, ignore_errors=True)


def adopt(data_dir: DataDir) -> Path:
    """Puts the repaired copy in the place of the store's files; returns where these are kept."""
    kept = data_dir.store / f"{FOLDER}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    (data_dir.store / FOLDER).rename(kept)
    (data_dir.store / EXAMINED / FOLDER).rename(data_dir.store / FOLDER)
    discard(data_dir)
    return kept


def _examine(data_dir: DataDir, copy: Path) -> Examination:
    found = Examination()

    def cut_at(path: Path, offset: int, what: str, cut_short: bool = False) -> None:
        place = data_dir.store / path.relative_to(copy)
        found.damages.append(Damage(place, offset, what, place.stat().st_size - offset, cut_short))
        cut(copy, path, offset)

    for path in files(copy)[1]:
        increment = look(path)
        if increment.problem:
            cut_at(path, increment.sound, increment.problem, increment.cut_short)
            break
    for _ in range(MOST_CUTS):
        with _server(copy) as url:
            contents = _contents(url, data_dir) if url else None
        if contents is None:
            base = files(copy)[0][0]
            offset, what = _check_base(base)
            found.damages.append(_whole(data_dir, copy, base, offset, what))
            _empty(copy)
        elif contents["damaged"]:
            what = f"{contents['damaged']} {contents['number']} cannot be read ({contents['error']})"
            if place := _place_of(copy, contents["damaged"], contents["number"]):
                cut_at(*place, what)
            else:
                base = files(copy)[0][0]
                found.damages.append(_whole(data_dir, copy, base, 0, what))
                _empty(copy)
        else:
            found.snapshot, found.last, found.runs = contents["snapshot"], contents["last"], contents["runs"]
            return found
    raise CommandError(f"the store is damaged in more than {MOST_CUTS} places; give back a copy of its data")


def _place_of(copy: Path, damaged: str, number: int) -> tuple[Path, int] | None:
    """The increment that wrote an event, or the snapshot, and the first byte of what it was written with."""
    words = (b"XADD", b"headrace:log", f"{number}-0".encode()) if damaged == "event" else ()
    for path in reversed(files(copy)[1]):
        if command := find(path, *(words or (b"HSET", b"headrace:snapshot"))):
            return path, command.unit
    return None


def _whole(data_dir: DataDir, copy: Path, base: Path, offset: int, what: str) -> Damage:
    """The damage of a base: it and the increments after it say nothing alone."""
    bases, increments = files(copy)
    lost = sum(path.stat().st_size for path in (*bases, *increments))
    return Damage(data_dir.store / base.relative_to(copy), offset, what, lost)


def _empty(copy: Path) -> None:
    """Leaves the copy without files: the next server makes new ones, for the store's id from the data directory."""
    shutil.rmtree(copy / FOLDER)


def _check_base(base: Path) -> tuple[int, str]:
    """Where the server's own checker stops, and its words."""
    done = subprocess.run(
        ["valkey-check-rdb", str(base)],  # The server's binary is the checker under this name.
        executable=binary(),
        capture_output=True,
        text=True,
        timeout=READ_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if _RDB_PLACE.search(line)]
    places = [(int(_RDB_PLACE.findall(line)[0]), _RDB_PLACE.sub("", line).strip()) for line in lines]
    return places[-1] if places else (0, "the server does not take it")


@contextmanager
def _server(copy: Path) -> Iterator[str]:
    """A server on the copy, by its address; "" where it does not start."""
    with tempfile.TemporaryDirectory(prefix="headrace-repair-") as folder:
        socket_path = Path(folder) / "store.sock"
        process = subprocess.Popen(
            store_command(copy, socket_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=tether(),
        )
        try:
            asyncio.run(wait_for_store(socket_path, READ_S, lambda: process.poll() is not None))
        except TimeoutError:
            yield ""
        else:
            yield store_url(socket_path)
        finally:
            process.terminate()
            process.wait()


def _contents(url: str, data_dir: DataDir) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace_coordinator.store.contents", url]
    done = subprocess.run(
        [*command, "--marker", str(data_dir.root / "store_id")],
        capture_output=True,
        text=True,
        timeout=READ_S,
        check=False,
    )
    if done.returncode:
        raise CommandError(f"the store cannot be examined: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
