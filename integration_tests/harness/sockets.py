"""Listening sockets of a fleet's processes, as the kernel lists them, and the table of them in SECURITY.md."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.fleet import Fleet
from harness.processes import ROOT, words_of

LISTENING = "0A"
PROCESS = re.compile("`([a-z]+)`")


@dataclass(frozen=True)
class Listening:
    """One socket: the kind of the process that has it, and where it listens; `unix` for those of files."""

    process: str
    host: str
    port: int


@dataclass(frozen=True)
class Row:
    """One line of the table: which process, what for, where, and who may connect."""

    process: str
    purpose: str
    place: str
    who: str


def rows() -> list[Row]:
    """The table of section *Sockets*."""
    text = (ROOT / "SECURITY.md").read_text().partition("\n## Sockets\n")[2].partition("\n## ")[0]
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found += [Row(process, *cells[1:4]) for process in PROCESS.findall(cells[0])]
    assert found, "SECURITY.md has no table of sockets"
    return found


def listening(fleet: Fleet) -> set[Listening]:
    """What the fleet's processes listen on now."""
    owners = {}
    for process in fleet.look():
        for inode in _inodes(process.pid):
            owners.setdefault(inode, _kind(process))
    found = {Listening(owners[inode], host, port) for inode, host, port in _tcp() if inode in owners}
    return found | {Listening(owners[inode], "unix", 0) for inode in _unix() if inode in owners}


@contextmanager
def watched(fleet: Fleet) -> Iterator[set[Listening]]:
    """Everything that is listened on meanwhile, however short."""
    seen: set[Listening] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.update(listening(fleet))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _kind(process: psutil.Process) -> str:
    words = words_of(process)
    if words and "valkey-server" in words[0]:
        return "store"
    for word in words:
        if word.startswith("headrace_cli.launcher"):
            return "launcher"
        if word.startswith("headrace_") and word != "headrace_cli":
            return word.removeprefix("headrace_").partition(".")[0]
    return "unknown"


def _inodes(pid: int) -> Iterator[int]:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                yield int(target[8:-1])
    except OSError:  # It has ended, or has closed one meanwhile.
        return


def _tcp() -> Iterator[tuple[int, str, int]]:
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                address, _, port = fields[1].partition(":")
                words = struct.unpack(f"<{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f">{len(words)}I", *words)
                host = ipaddress.ip_address(packed)
                yield int(fields[9]), str(getattr(host, "ipv4_mapped", None) or host), int(port, 16)


def _unix() -> Iterator[int]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000":  # SO_ACCEPTCON: it listens.
            yield int(fields[6])
