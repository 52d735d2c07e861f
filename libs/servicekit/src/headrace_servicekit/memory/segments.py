"""Files on a tmpfs that are mapped once and hold one version after another: fresh pages cost more than the copy.

Whoever reads a segment holds a shared lock on it for as long as anybody references its bytes; its writer takes it
again only under the exclusive lock, and never while its own bytes are referenced. Each store has a
directory of them, locked while its process lives. Knows no versions.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import grpc
import numpy as np

from headrace_servicekit.folders import own_folder
from headrace_servicekit.rpc.errors import ServiceError

MAPPED_FILES = 4
BASE_FILE = "base.weights"
"""In the directory of frozen weights that processes share: locked by whoever has mapped it."""


class Segment:
    """A mapped file. `handle` is taken over; it and the mapping go with the last reference to segment and bytes."""

    def __init__(self, handle: int, size: int, *, writable: bool) -> None:
        self.size = size
        self.handle = handle
        self.own = writable
        weakref.finalize(self, os.close, handle).atexit = False
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._map = mmap.mmap(handle, size, prot=access)
        self._given: list[weakref.ref[np.ndarray]] = []
        # Reentrant: an array's end may be noticed while its own thread is in here.
        self._lock = threading.RLock()

    @property
    def in_use(self) -> bool:
        """Whether bytes that `lend` or `write` gave are referenced in this process."""
        with self._lock:
            self._given = [given for given in self._given if given() is not None]
            return bool(self._given)

    def lend(self) -> memoryview:
        """The bytes, read-only; they stay as they are while this or anything over it is referenced.

        Raises BlockingIOError when the file's writer has it.
        """
        with self._lock:
            array = self._give()
            array.flags.writeable = False
            if not self.own:
                weakref.finalize(array, self._returned).atexit = False
                fcntl.flock(self.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs hide the buffer

    def write(self) -> memoryview:
        """The bytes of a segment that `take` gave, for writing."""
        with self._lock:
            return memoryview(self._give())  # type: ignore[arg-type]

    def take(self) -> bool:
        """Takes the file for a new version; False while any process uses the one before."""
        with self._lock:
            if self.in_use:
                return False
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def written(self) -> None:
        """Lets others read."""
        fcntl.flock(self.handle, fcntl.LOCK_UN)

    def _give(self) -> np.ndarray:
        # Every view over an array references it, so its end is the end of all of them.
        array = np.frombuffer(self._map, dtype=np.uint8)
        self._given.append(weakref.ref(array))
        return array

    def _returned(self) -> None:
        with self._lock:
            if not self.in_use:
                fcntl.flock(self.handle, fcntl.LOCK_UN)


def make_segment(path: Path, size: int) -> Segment:
    """A new file of `size` bytes, taken. The space is taken now: later would be a SIGBUS. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        os.close(handle)
        path.unlink(missing_ok=True)
        raise
    return Segment(handle, size, writable=True)


class MappedSegments:
    """Other processes' files that this one has mapped, by inode, so that their next version costs no page."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], Segment] = {}

    def open(self, path: Path, size: int) -> Segment:
        """Maps a file of exactly `size` bytes. Raises OSError or ValueError."""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(handle)
        key = (status.st_dev, status.st_ino)
        known = self._mapped.pop(key, None)
        if known is None and status.st_size == size:
            known = Segment(handle, size, writable=False)
        else:
            os.close(handle)
        if known is None or status.st_size != size or known.size != size:
            raise ValueError(f"{path} has {status.st_size} bytes, not {size}")
        self._mapped[key] = known
        self._trim()
        return known

    def forget(self) -> None:
        """Drops all mappings; bytes that are still referenced stay valid."""
        self._mapped.clear()

    def _trim(self) -> None:
        """Forgets deleted files, and the oldest beyond MAPPED_FILES; those in use are spared."""
        idle = [key for key, segment in self._mapped.items() if not segment.in_use]
        excess = len(self._mapped) - MAPPED_FILES
        for index, key in enumerate(idle):
            if index < excess or os.fstat(self._mapped[key].handle).st_nlink == 0:
                del self._mapped[key]


def reap_dead_stores(root: Path) -> list[str]:
    """Removes the directories below `root` whose process is dead, and bases that nobody maps; returns their names."""
    return [directory.name for directory in root.iterdir() if _reaped(directory)]


def _reaped(directory: Path) -> bool:
    """Whether nobody had a lock on it, or on the base in it."""
    handles = []
    try:
        handles.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        with suppress(FileNotFoundError):
            handles.append(os.open(directory / BASE_FILE, os.O_RDONLY | os.O_NOFOLLOW))
        for handle in handles:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        return False  # its process lives, or it is no directory
    else:
        return True
    finally:
        for handle in handles:
            os.close(handle)


def make_private(root: Path) -> None:
    """The directory that a host's instances share. Raises ServiceError NO_SPACE, and NOT_OWN_FOLDER."""
    try:
        own_folder(root, "set --shm-dir (HEADRACE_SHM_DIR)")
    except PermissionError as error:
        message = f"{root}: {error.strerror}"
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "NOT_OWN_FOLDER", message) from error
    except OSError as error:
        raise_no_space(error, root)


def filesystem_bytes(directory: Path) -> int:
    """How much the file system that a directory is on, or will be on, holds in all; 0: nobody says."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def lock_new_directory(directory: Path) -> int:
    """Creates and locks a directory; the loop covers a janitor that takes it between the two."""
    while True:
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ServiceError(
                grpc.StatusCode.ALREADY_EXISTS,
                "CONFLICT",
                f"{directory} exists: another process uses the incarnation id {directory.name}",
            ) from error
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if directory.exists() and os.fstat(handle).st_ino == directory.stat().st_ino:
            return handle
        os.close(handle)


def raise_no_space(error: OSError, directory: Path, size: int = 0) -> NoReturn:
    """ServiceError NO_SPACE when that is what the error says, else the error itself."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        raise error
    raise ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "NO_SPACE",
        f"{directory} has no room for {size} bytes; enlarge that tmpfs or set --shm-dir (HEADRACE_SHM_DIR)",
        directory=str(directory),
    ) from error
