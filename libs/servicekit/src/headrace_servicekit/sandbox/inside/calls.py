"""The system calls that foreign code may make; every other one is refused.

`FREE` may be called with any arguments: what they reach, Landlock, the tree and the limits decide. `CHECKED` has the
others, each with what their arguments must be. Numbers on x86_64 and on aarch64, from the kernel's headers; None where
that machine has no such call.
"""

from __future__ import annotations

from dataclasses import dataclass

Numbers = tuple[int | None, int | None]

FREE: dict[str, Numbers] = {
    # files: which ones, and what may be done with them, Landlock and the tree decide
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "open": (2, None),
    "openat": (257, 56),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "ftruncate": (77, 46),
    "truncate": (76, 45),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "fallocate": (285, 47),
    "fadvise64": (221, 223),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    "flock": (73, 32),
    "umask": (95, 166),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    # waiting
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "pause": (34, None),
    # a pair of streams, with which asyncio wakes itself
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    # memory, which a limit on addresses counts
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "msync": (26, 227),
    "brk": (12, 214),
    # its own signals
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    # its threads
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "gettid": (186, 178),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # what it is, and where
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "getrandom": (318, 278),
}


@dataclass(frozen=True)
class Check:
    """What one argument may be: one of `values`, of the bits in `mask`. `high`: of its upper half."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    high: bool = False


_THREAD = 0x003D0F00
"""Flags of `clone` with which glibc starts a thread; musl adds one bit. A process and a namespace have others."""
_UNIX, _STREAM, _KIND = 1, 1, 0xF
_PRCTL = (3, 15, 16)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME."""
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Copies, flags and locks of its descriptors. Not F_SETOWN and F_SETSIG, which have others signalled."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

CHECKED: dict[str, tuple[Numbers, tuple[Check, ...]]] = {
    "clone": ((56, 220), (Check(0, (_THREAD, _THREAD | 0x00400000)),)),
    "prctl": ((157, 167), (Check(0, _PRCTL),)),
    "fcntl": ((72, 25), (Check(1, _FCNTL),)),
    "ioctl": ((16, 29), (Check(1, _IOCTL),)),
    # Its own limits, which it cannot raise.
    "prlimit64": ((302, 261), (Check(0, (0,)),)),
    # Streams alone, and to nobody else: a datagram could be sent elsewhere.
    "socketpair": ((53, 199), (Check(0, (_UNIX,)), Check(1, (_STREAM,), _KIND))),
    "sendto": ((44, 206), (Check(4, (0,)), Check(4, (0,), high=True))),
}
