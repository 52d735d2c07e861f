"""A filter of system calls, for good, for this process and its threads: no other process, no socket, no way out.

One process means that a limit on a process's memory is a limit on all of it, and that nothing can be left behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

X86_64, AARCH64 = "x86_64", "aarch64"
_AUDIT = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SOCK_STREAM, _SOCK_KIND = 1, 0xF
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CLONE, _CLONE3, _PRCTL, _SOCKETPAIR = (
    {X86_64: 56, AARCH64: 220},
    {X86_64: 435, AARCH64: 435},
    {X86_64: 157, AARCH64: 167},
    {X86_64: 53, AARCH64: 199},
)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes and programs
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "sched_setaffinity": (203, 122),
    # the network, and sockets of this host
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "io_uring_setup": (425, 425),
    # memory that the limits on a process and its files do not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # the walls, and the kernel
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
}
"""Numbers on x86_64 and on aarch64, from the kernel's headers; None where that machine has no such call."""


def supported() -> bool:
    """Whether the filter is written for this machine's system calls."""
    return os.uname().machine in _AUDIT


def forbid_system_calls() -> None:
    """Refused calls fail with EPERM from now on. OSError where the kernel takes no filter."""
    program = _program(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)


def _program(machine: str) -> bytes:
    column = (X86_64, AARCH64).index(machine)
    refuse = _op(_RET, _ERRNO | errno.EPERM)
    program = [
        _op(_LD, _ARCHITECTURE),
        _op(_JEQ, _AUDIT[machine], 1, 0),
        _op(_RET, _KILL),  # the calls of another machine have other numbers
        _op(_LD, _NUMBER),
        *((_op(_JGE, _X32, 0, 1), refuse) if machine == X86_64 else ()),
    ]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_op(_JEQ, number, 0, 1), refuse]
    # glibc falls back to clone, whose flags can be read.
    program += [_op(_JEQ, _CLONE3[machine], 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    threads = [_op(_LD, _ARGUMENTS), _op(_JSET, _CLONE_THREAD, 1, 0), refuse, _op(_RET, _ALLOW)]
    settings = [
        _op(_LD, _ARGUMENTS),
        _op(_JEQ, _PR_SET_PDEATHSIG, 1, 0),
        _op(_JEQ, _PR_SET_DUMPABLE, 0, 1),
        refuse,
        _op(_RET, _ALLOW),
    ]
    # Pairs of streams alone: asyncio has one to wake itself, and a pair of datagrams can be sent elsewhere.
    pairs = [
        _op(_LD, _ARGUMENTS + 8),
        _op(0x54, _SOCK_KIND),  # and
        _op(_JEQ, _SOCK_STREAM, 1, 0),
        refuse,
        _op(_RET, _ALLOW),
    ]
    for number, block in (
        (_CLONE[machine], threads),
        (_PRCTL[machine], settings),
        (_SOCKETPAIR[machine], pairs),
    ):
        program += [_op(_JEQ, number, 0, len(block)), *block]
    return b"".join([*program, _op(_RET, _ALLOW)])
