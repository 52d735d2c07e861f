"""Child processes that cannot outlive their parent, each in a process group of its own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_SCOPES_SINCE, _SCOPES = 6, 3
"""Landlock's version that can scope abstract sockets and signals (Linux 6.12), and the bits that do."""
TREE_VARIABLE = "SUPERVISED_TREE"
"""Names the tree that a process belongs to, "OWNER/ID"; its descendants inherit it, whatever session they begin."""


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to SIGKILL this process when its parent ends; ends at once when that has happened.

    The kernel watches the *thread* that started this process: start children from one that lives on.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


async def start_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: int,
    input: int = asyncio.subprocess.DEVNULL,
) -> asyncio.subprocess.Process:
    """Starts a command that dies with this process; its outputs go to the file descriptor `output`.

    `input` is asyncio.subprocess.PIPE where this process writes to the child's standard input.

    A tiny Python program starts the command, and not a function between fork and exec: that one would run
    while gRPC's threads hold locks that nobody in the child releases.
    """
    wrapper = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return await asyncio.create_subprocess_exec(
        *wrapper,
        *command,
        stdin=input,
        stdout=output,
        stderr=output,
        env=dict(environment),
        start_new_session=True,
    )


def adopt_orphans() -> None:
    """Makes the orphans among this process's descendants its children, so that `descendants` finds daemons too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_signals_to_others() -> bool:
    """Keeps this process and all that it starts from signalling any other, and from abstract sockets of others.

    False where the kernel cannot. By Landlock (Linux 6.12), for good. It holds for the calling thread and what that
    starts: call it first. A process under it gains no privileges from a setuid program.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < _SCOPES_SINCE:
        return False
    # Nothing of the file system and of the network is restricted: a rule there would forbid renames between folders.
    rules = struct.pack("=QQQ", 0, 0, _SCOPES)
    handle = libc.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    if handle < 0:
        return False
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    restricted: int = libc.syscall(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(handle), ctypes.c_uint32(0))
    os.close(handle)
    return restricted == 0


def descendants(pids: Iterable[int]) -> list[int]:
    """The processes and all that they started, parents first."""
    found = list(pids)
    for pid in found:  # grows while it is walked
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):  # the thread has ended
                    found += map(int, file.read_text().split())
    return found


def kill_tree(name: str) -> None:
    """SIGKILL to all processes whose tree is `name`, or begins with it where it ends with a slash."""
    wanted = f"\0{TREE_VARIABLE}={name}".encode() + (b"" if name.endswith("/") else b"\0")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if wanted in b"\0" + (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


def signal_group(leader_pid: int, number: signal.Signals) -> None:
    """Signals a child and everything it started; a group that is gone is no error."""
    try:
        os.killpg(leader_pid, number)
    except ProcessLookupError:
        pass


def _main(arguments: list[str]) -> None:
    die_with_parent(int(arguments[0]))
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as error:
        sys.stderr.write(f"cannot start {arguments[1]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


if __name__ == "__main__":
    _main(sys.argv[1:])
