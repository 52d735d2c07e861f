"""A separate root: a read-only tree in memory that has only Python's files, in its own namespaces.

`enter_tree` once, then `enter_namespaces` for each request. OSError where a kernel or a container allows no part of it.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NOBODY = 65534
"""User and group of foreign code."""
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo")
"""Folders of shared libraries and time zones."""
FILES = (*("/etc/ld.so.cache", "/etc/localtime"), *("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero"))
_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE_TREE, _CLOEXEC, _FROM_EMPTY_PATH = 1, os.O_CLOEXEC, 4
_HERE, _EMPTY_PATH, _RECURSIVE = -100, 0x1000, 0x8000
_READ_ONLY, _NO_SETUID = 1, 2


def scratch_of(readable: Iterable[str]) -> str:
    """The one folder that may be written: in memory, of bounded size, gone at the end. It hides no readable one."""
    return "/scratch" if any(path.startswith("/tmp/") for path in readable) else "/tmp"


def enter_tree(readable: Iterable[str]) -> None:
    """This process's root is a read-only tree of `readable` and what Python needs; its network, IPC and names are new.

    One that is not root is the user nobody of a user namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own = _NEWNS | _NEWNET | _NEWIPC | _NEWUTS
    if libc.unshare(own) != 0:
        uid, gid = os.getuid(), os.getgid()
        _checked(libc.unshare(own | _NEWUSER), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {uid} 1"),
            ("gid_map", f"{NOBODY} {gid} 1"),
        ):
            Path("/proc/self", name).write_text(text)
    _checked(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount /")
    folders = sorted({*SYSTEM, *map(os.path.abspath, readable)})
    outer = [path for path in folders if not any(path.startswith(f"{each}/") for each in folders)]
    taken = {path: _copy_of_mount(libc, path) for path in (*outer, *FILES) if os.path.exists(path)}
    os.umask(0o022)
    root = "/tmp"  # whatever is below it was taken before
    _mount_memory(libc, root, "mode=755", 0)
    os.mkdir(root + scratch_of(folders), 0o755)
    for path, handle in taken.items():
        _place(libc, handle, root + path)
    os.chdir(root)
    _checked(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(libc.umount2(b".", _MNT_DETACH), "umount the former root")
    os.chdir("/")
    _set_read_only(libc, _HERE, b"/", 0)


def enter_namespaces(scratch: str, scratch_bytes: int) -> None:
    """Own processes (of children), and a `scratch` folder of its own to write to; call it in the tree."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.unshare(_NEWNS | _NEWPID), "unshare")
    owner = f"uid={NOBODY},gid={NOBODY}"
    _mount_memory(libc, scratch, f"size={scratch_bytes},nr_inodes=1024,mode=700,{owner}", _MS_NOEXEC)


def _copy_of_mount(libc: ctypes.CDLL, path: str) -> int:
    """A handle of a read-only mount of it, without setuid programs, and of what is mounted below."""
    flags = ctypes.c_uint(_CLONE_TREE | _CLOEXEC | _RECURSIVE)
    handle = int(libc.syscall(_OPEN_TREE, _HERE, os.fsencode(path), flags))
    _checked(handle, f"open_tree {path}")
    _set_read_only(libc, handle, b"", _EMPTY_PATH)
    return handle


def _set_read_only(libc: ctypes.CDLL, at: int, path: bytes, flags: int) -> None:
    attributes = struct.pack("=QQQQ", _READ_ONLY | _NO_SETUID, 0, 0, 0)
    flags = flags | _RECURSIVE if not path else flags
    size = ctypes.c_size_t(len(attributes))
    _checked(libc.syscall(_MOUNT_SETATTR, at, path, ctypes.c_uint(flags), attributes, size), "mount_setattr")


def _place(libc: ctypes.CDLL, handle: int, target: str) -> None:
    folder = stat.S_ISDIR(os.fstat(handle).st_mode)
    os.makedirs(target if folder else os.path.dirname(target), 0o755, exist_ok=True)
    if not folder:
        Path(target).touch()
    moved = libc.syscall(
        _MOVE_MOUNT, handle, b"", _HERE, os.fsencode(target), ctypes.c_uint(_FROM_EMPTY_PATH)
    )
    _checked(moved, f"mount {target}")
    os.close(handle)


def _mount_memory(libc: ctypes.CDLL, path: str, options: str, flags: int) -> None:
    all_flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | flags)
    _checked(libc.mount(b"tmpfs", path.encode(), b"tmpfs", all_flags, options.encode()), f"mount {path}")


def can_become_nobody(readable: Iterable[str]) -> bool:
    """Whether this process may, and Python's files are open to that user."""
    if os.getuid() != 0:
        return False
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            become_nobody()
            os._exit(0 if all(os.access(path, os.R_OK | os.X_OK) for path in readable) else 1)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def become_nobody() -> None:
    """Goes on as another user than root, in no group of root's."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
