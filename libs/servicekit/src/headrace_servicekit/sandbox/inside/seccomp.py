"""The filter of system calls, for good, for this process and its threads: an allow-list, see `calls`.

One process means that a limit on a process's memory is a limit on all of it, and that nothing can be left behind.
The filter is assembled here, and not by libseccomp: images of Python do not have that library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import cache

from headrace_servicekit.sandbox.inside.calls import CHECKED, FREE, Check

X86_64, AARCH64 = "x86_64", "aarch64"
_AUDIT = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}
_LD, _AND, _JEQ, _JGE, _RET = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000
_NEWER = 403
"""From here on machines number calls alike. They are newer than any libc needs: it does without where one is not there,
as without `clone3`, whose flags a filter cannot read."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def supported() -> bool:
    """Whether the filter is written for this machine's system calls."""
    return os.uname().machine in _AUDIT


def forbid_system_calls() -> None:
    """Calls that are not allowed fail from now on, with EPERM or ENOSYS. OSError where the kernel takes no filter."""
    program = filter_of(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


@cache
def filter_of(machine: str) -> bytes:
    """The program of the filter, for the kernel's BPF."""
    column = (X86_64, AARCH64).index(machine)
    refuse, allow = _op(_RET, _ERRNO | errno.EPERM), _op(_RET, _ALLOW)
    program = [
        _op(_LD, _ARCHITECTURE),
        _op(_JEQ, _AUDIT[machine], 1, 0),
        _op(_RET, _KILL),  # the calls of another machine have other numbers
        _op(_LD, _NUMBER),
        *((_op(_JGE, _X32, 0, 1), refuse) if machine == X86_64 else ()),
    ]
    for numbers in FREE.values():
        if (number := numbers[column]) is not None:
            program += [_op(_JEQ, number, 0, 1), allow]
    for numbers, checks in CHECKED.values():
        if (number := numbers[column]) is not None:
            block = [*(each for check in checks for each in _checked(check, refuse)), allow]
            program += [_op(_JEQ, number, 0, len(block)), *block]
    unknown = [_op(_JGE, _NEWER, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS), refuse]
    return b"".join([*program, *unknown])


def _checked(check: Check, refuse: bytes) -> list[bytes]:
    """Goes on behind itself where the argument is one of the values; machines with a filter are little-endian."""
    word = _ARGUMENTS + 8 * check.argument + 4 * check.high
    left = range(len(check.values), 0, -1)
    tests = [_op(_JEQ, value, past) for value, past in zip(check.values, left, strict=True)]
    return [_op(_LD, word), _op(_AND, check.mask), *tests, refuse]


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)
