"""Finds what is damaged in the store of a local fleet, and goes on from what is good before it. Shows and asks nothing.

Works on a copy, which it cuts where it is damaged until the store's own server takes it and the coordinator can read
all that it holds. The runs' checkpoints and histories know what is lost with the rest: the next start says it.
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
from typing import Any

from headrace_cli.errors import CommandError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.store import binary, store_command, store_url, wait_for_store
from headrace_cli.launcher.store_files import FOLDER, cut, files, find, look, manifest
from headrace_cli.launcher.tether import tether

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
