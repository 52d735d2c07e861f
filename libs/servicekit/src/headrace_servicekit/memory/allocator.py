"""What a process keeps of freed memory: fresh pages cost more than copying onto them, or computing with them.

glibc only; elsewhere nothing is kept and nothing given back.
"""

from __future__ import annotations

import ctypes
import os

import psutil

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_NEVER = 2**31 - 1
MMAP_BYTES = 32 * 1024 * 1024
KEPT_BYTES = 128 * 1024 * 1024
# The host is short of memory below this share of it.
SHORT_SHARE = 0.25


def reuse_freed_memory() -> bool:
    """Makes malloc reuse blocks of up to 32 MiB and keep up to 128 MiB at its top; False without glibc.

    By default a message of a MiB is mapped or trimmed anew each time: copying it once took 0.23 ms, then 0.03.
    """
    return _set((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES))


def keep_freed_memory() -> bool:
    """Makes malloc reuse all blocks, and torch ask for huge pages; False without glibc. For before torch is imported.

    A step frees and takes the same large blocks again. Fresh from the system they are zeroed page by page: on a CPU the
    first micro-batch of a SmolLM2 step took 3.3 s instead of 1.0.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))


def give_freed_memory_back() -> bool:
    """Returns the pages of freed blocks, between used ones too, to the system; False without glibc."""
    libc = _libc()
    return libc is not None and bool(libc.malloc_trim(0))


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


def available_bytes() -> int:
    """Memory of this host that is free for use."""
    return int(psutil.virtual_memory().available)


def _set(*settings: tuple[int, int]) -> bool:
    libc = _libc()
    taken = [libc is not None and libc.mallopt(name, value) for name, value in settings]
    return all(taken)


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt, libc.malloc_trim  # noqa: B018 - both must be there
    except (OSError, AttributeError):
        return None
    return libc
