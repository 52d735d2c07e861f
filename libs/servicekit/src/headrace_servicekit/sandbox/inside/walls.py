"""The walls within a process: another user, Landlock, limits, the filter of calls."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable
from contextlib import suppress

from headrace_servicekit.sandbox.inside.seccomp import forbid_system_calls, supported
from headrace_servicekit.sandbox.inside.tree import FILES, SYSTEM, become_nobody

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITIES_V3, _MOST_CAPABILITIES = 0x20080522, 64
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE, _MAKE_DIR, _MAKE_REG = (1 << 4) | (1 << 5), 1 << 7, 1 << 8
_REFER = 1 << 13
_FILES_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many of Landlock's rights over files each of its versions knows."""


def drop_privileges(*, other_user: bool) -> None:
    """No capability, none to be had, and no look into this process by others of its user; as root, another user."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_MOST_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, *map(ctypes.c_ulong, (capability, 0, 0, 0)))
    if other_user:
        become_nobody()
    header, sets = struct.pack("=Ii", _CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    libc.capset(header, sets)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    libc.prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))


def landlock_version() -> int:
    """Landlock's version in the kernel; 0 where it has none."""
    found = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, int(found))


def confine_files(readable: Iterable[str], scratch: str) -> None:
    """Reads what Python needs and `readable`, writes `scratch` alone, signals nobody else: by Landlock, for good."""
    version = landlock_version()
    files = (1 << _FILES_BY_VERSION.get(version, 16)) - 1
    rules = struct.pack("=Q", files)
    if version >= 4:
        rules += struct.pack("=Q", 3)  # no port is bound and none connected to
    if version >= 6:
        rules += struct.pack("=Q", 3)  # no abstract socket and no process outside is reached
    libc = ctypes.CDLL(None, use_errno=True)
    ruleset = libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    _checked(ruleset, "landlock_create_ruleset")
    write = _WRITE_FILE | _REMOVE | _MAKE_DIR | _MAKE_REG | _TRUNCATE | _REFER
    _allow(libc, ruleset, "/dev/null", (_READ_FILE | _WRITE_FILE | _TRUNCATE) & files)
    for path in (*SYSTEM, *FILES, *readable):
        _allow(libc, ruleset, path, _READ_FILE | _READ_DIR)
    if scratch:
        _allow(libc, ruleset, scratch, (_READ_FILE | _READ_DIR | write) & files)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _checked(
        libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)), "landlock_restrict_self"
    )
    os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= ~_READ_DIR
        rule = struct.pack("=Qi", rights, handle)
        _checked(
            libc.syscall(
                _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)
            ),
            path,
        )
        os.close(handle)


def limit_process(*, memory_bytes: int, file_bytes: int, cpu_s: float, threads: int) -> None:
    """Limits of one case's process; whatever it does, its memory and the files that it writes stay below them."""
    for which, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, int(cpu_s) + 1),
        (resource.RLIMIT_NPROC, threads),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        own = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (own, own))


def shut_in(readable: Iterable[str], scratch: str) -> None:
    """The last walls around a process that is about to run foreign code."""
    if landlock_version():
        confine_files(readable, scratch)
    if supported():
        forbid_system_calls()


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
