"""Keeps freed memory in the process: on the CPU, fresh pages cost more than the arithmetic done on them.

A step frees and takes the same large blocks again. Fresh from the system they are zeroed page by page: the
first micro-batch of a SmolLM2 step took 3.3 s instead of 1.0. glibc only; elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import os

import psutil

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = 2**31 - 1
# The host is short of memory below this share of it.
SHORT_SHARE = 0.25


def keep_freed_memory() -> bool:
    """Makes malloc reuse large blocks, and torch ask for huge pages. Call it before torch is imported."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    libc = _libc()
    if libc is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    taken = [libc.mallopt(name, value) for name, value in settings]
    return all(taken)


def give_back_if_short() -> int:
    """Returns freed memory to the system when the host is short of it; the bytes by which the process shrank.

    Otherwise the next step would pay for fresh pages (2.5 CPU-seconds of 7 with SmolLM2) and no process gain.
    """
    host = psutil.virtual_memory()
    libc = _libc()
    if libc is None or host.available > SHORT_SHARE * host.total:
        return 0
    before = resident_bytes()
    libc.malloc_trim(0)
    return max(0, before - resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process; 0 where it cannot be read."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt, libc.malloc_trim  # noqa: B018 - both must be there
    except (OSError, AttributeError):
        return None
    return libc
