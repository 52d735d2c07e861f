"""Mounts of this process's own, by the kernel's calls: copies of parts of the tree, and empty ones in their place."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import struct
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE_TREE, _FROM_EMPTY_PATH = 1, 4
_HERE, _EMPTY_PATH, _RECURSIVE = -100, 0x1000, 0x8000
_READ_ONLY, _NO_SETUID, _MAPPED_IDS = 1, 2, 0x00100000


class Mounts:
    """Bound and take what stays, then place and hide by path, from the top down."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._libc = libc
        self._taken: dict[str, int] = {}
        self._memory: list[str] = []

    @classmethod
    def enter(cls, *, other_user: bool = False) -> Mounts | None:
        """New mounts for this process; None where it may have none.

        They are in a namespace of users where it is not root, unless it becomes an `other_user`, who is none there.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEWNS) != 0 and (other_user or not _enter_user_namespace(libc)):
            return None
        # What the host mounts later is seen here too; what is mounted here is not seen there.
        flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
        checked(libc.mount(None, b"/", None, flags, None), "mount /")
        return cls(libc)

    def bound(self, path: str, most_bytes: int) -> None:
        """What a folder has lies in memory from now on, where all that is written to it has this size at most."""
        found = os.stat(path)
        with tempfile.TemporaryFile() as kept:
            with tarfile.open(fileobj=kept, mode="w") as archive:
                archive.add(path, ".")
            given = f"mode={stat.S_IMODE(found.st_mode):o},uid={found.st_uid},gid={found.st_gid},size={most_bytes}"
            flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
            checked(self._libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, given.encode()), path)
            kept.seek(0)
            with tarfile.open(fileobj=kept) as archive:
                archive.extractall(path, numeric_owner=True, filter="fully_trusted")

    def take(self, path: str, *, writable: bool, as_user: int = 0, place: str = "") -> None:
        """Keeps a path as it is now, for its own place or another one.

        `as_user` has its owner's rights there, where the file system can map ids.
        """
        flags = _CLONE_TREE | os.O_CLOEXEC | _RECURSIVE
        handle = int(self._libc.syscall(_OPEN_TREE, _HERE, os.fsencode(path), ctypes.c_uint(flags)))
        checked(handle, path)
        attributes = _NO_SETUID | (0 if writable else _READ_ONLY)
        if as_user:
            with suppress(OSError):  # as the file's mode has it, then
                owner = os.stat(path)
                users = _namespace_of_ids(self._libc, owner.st_uid, owner.st_gid, as_user)
                self._set(handle, attributes | _MAPPED_IDS, users)
                os.close(users)
                self._taken[place or path] = handle
                return
        self._set(handle, attributes)
        self._taken[place or path] = handle

    def place(self, path: str) -> None:
        """Puts what was taken at its path, whatever lies there now."""
        handle = self._taken.pop(path)
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        if not os.path.lexists(path):
            os.makedirs(path if folder else os.path.dirname(path), 0o755, exist_ok=True)
            if not folder:
                Path(path).touch()
        flags = ctypes.c_uint(_FROM_EMPTY_PATH)
        checked(self._libc.syscall(_MOVE_MOUNT, handle, b"", _HERE, os.fsencode(path), flags), path)
        os.close(handle)

    def hide(self, path: str) -> None:
        """An empty folder, or a file like /dev/null, in its place."""
        if not os.path.lexists(path):
            return
        if os.path.isdir(path):
            flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
            where = os.fsencode(path)
            checked(self._libc.mount(b"tmpfs", where, b"tmpfs", flags, b"mode=755,size=64k"), path)
            self._memory.append(path)
        else:
            bind = ctypes.c_ulong(_MS_BIND)
            checked(self._libc.mount(b"/dev/null", os.fsencode(path), None, bind, None), path)

    def finish(self) -> None:
        """Nothing is written any more to the empty folders."""
        for path in self._memory:
            self._set(_HERE, _READ_ONLY | _NO_SETUID, path=path)

    def _set(self, at: int, attributes: int, users: int = 0, path: str = "") -> None:
        given = struct.pack("=QQQQ", attributes, 0, 0, users)
        flags = ctypes.c_uint(0 if path else _EMPTY_PATH | _RECURSIVE)
        size = ctypes.c_size_t(len(given))
        done = self._libc.syscall(_MOUNT_SETATTR, at, os.fsencode(path), flags, given, size)
        checked(done, f"mount_setattr {path}")


def _namespace_of_ids(libc: ctypes.CDLL, user: int, group: int, other: int) -> int:
    """A handle of a namespace that maps a user and a group to another one, for a mount."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"." if libc.unshare(_NEWUSER) == 0 else b"x")
        signal.pause()
    try:
        if os.read(reader, 1) != b".":
            raise PermissionError("no user namespace")
        Path(f"/proc/{child}/uid_map").write_text(f"{user} {other} 1")
        Path(f"/proc/{child}/gid_map").write_text(f"{group} {other} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def _enter_user_namespace(libc: ctypes.CDLL) -> bool:
    """Enters a user namespace as the same user, with a mount namespace in it; False where the kernel forbids it.

    Some kernels make the namespace and refuse its maps, or give it no rights: this is tried in a child, so that nothing
    has changed then.
    """
    uid, gid = os.getuid(), os.getgid()
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))

    def enter() -> bool:
        if libc.unshare(_NEWUSER | _NEWNS) != 0:
            return False
        try:
            for name, text in maps:
                Path("/proc/self", name).write_text(text)
        except OSError:
            return False
        return True

    def may_mount() -> bool:
        flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
        return bool(libc.mount(None, b"/", None, flags, None) == 0)

    child = os.fork()
    if child == 0:
        os._exit(0 if enter() and may_mount() else 1)
    return os.waitpid(child, 0)[1] == 0 and enter()


def checked(result: int, what: str) -> None:
    """Raises OSError, with what was tried, where a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
