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
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_PR_CAPBSET_DROP, _CAPABILITIES_V3 = 24, 0x20080522
_WAYS_BACK = (2, 16, 17, 19, 21, 27, 38)
"""Capabilities of root by which it would reach hidden files: CAP_DAC_READ_SEARCH (by handle), SYS_MODULE, SYS_RAWIO,
SYS_PTRACE (by another process), SYS_ADMIN (by unmounting), MKNOD (by the disk), PERFMON (by another's memory).
"""
_SCOPES_SINCE, _SCOPE_SIGNAL = 6, 1 << 1
"""Landlock's version that can scope signals (Linux 6.12), and the bit that does."""
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
    """Keeps this process and all that it starts from signalling any other; False where the kernel cannot.

    By Landlock (Linux 6.12), for good. It holds for the calling thread and what that starts: call it first. A process
    under it gains no privileges from a setuid program.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < _SCOPES_SINCE:
        return False
    # Nothing of the file system and of the network is restricted: a rule there would forbid renames between folders.
    rules = struct.pack("=QQQ", 0, 0, _SCOPE_SIGNAL)
    handle = libc.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    if handle < 0:
        return False
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    restricted: int = libc.syscall(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(handle), ctypes.c_uint32(0))
    os.close(handle)
    return restricted == 0


def _enter_user_namespace(libc: ctypes.CDLL) -> bool:
    """Enters a user namespace as the same user, with a mount namespace in it; False where the kernel forbids it.

    Some kernels make the namespace and refuse its maps: this is tried in a child, so that nothing has changed then.
    """
    uid, gid = os.getuid(), os.getgid()
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))

    def enter() -> bool:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
            return False
        try:
            for name, text in maps:
                Path("/proc/self", name).write_text(text)
        except OSError:
            return False
        return True

    child = os.fork()
    if child == 0:
        os._exit(0 if enter() else 1)
    return os.waitpid(child, 0)[1] == 0 and enter()


def hide_files(paths: Iterable[Path]) -> bool:
    """Makes files read as empty for this process and all that it starts, for good; False where the kernel forbids it.

    In a mount namespace of its own (of a user namespace, where it is not root), with /dev/null in each file's place;
    then it drops the capabilities by which root would reach them all the same. Call it before threads are started.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0 and not _enter_user_namespace(libc):
        return False
    # What the host mounts later is seen here too; what is mounted here is not seen there.
    hidden: bool = libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) == 0
    for path in paths:
        if hidden and path.exists():
            where = os.fsencode(path)
            hidden = libc.mount(b"/dev/null", where, None, ctypes.c_ulong(_MS_BIND), None) == 0
    for capability in _WAYS_BACK:
        libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header, sets = struct.pack("=Ii", _CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for capability in _WAYS_BACK:
        for kind in range(3):  # effective, permitted and inheritable, 32 capabilities each
            sets[capability // 32 * 3 + kind] &= ~(1 << capability % 32)
    libc.capset(header, sets)
    return hidden


def descendants(pids: Iterable[int]) -> list[int]:
    """The processes and all that they started, parents first."""
    found = list(pids)
    for pid in found:  # grows while it is walked
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
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
