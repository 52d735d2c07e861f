"""File descriptors of a process: how many it may have, and how many of them callers may take. Knows no server."""

from __future__ import annotations

import errno
import resource

MOST = 65_536
RESERVE = 256
"""Kept from callers, for the store's connection, files and child processes."""
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT})
"""What a system lacks for a while: descriptors, room on a disk."""


def lack_behind(error: BaseException | None) -> OSError | None:
    """The error that says what is lacking, where an error comes from that; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SCARCE:
            return error
        error = error.__cause__ or error.__context__
    return None


def raise_limit() -> None:
    """Raises the soft limit of this process to the hard one, at most to MOST: 1,024 are few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def for_callers() -> int:
    """How many connections one listening port may hold: half of what is left beside the reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if soft == resource.RLIM_INFINITY else soft
    return max(16, min((limit - RESERVE) // 2, 4096))
