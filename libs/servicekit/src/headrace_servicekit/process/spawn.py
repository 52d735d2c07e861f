"""Child processes that cannot outlive their parent, each in a process group of its own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1


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
