"""What users' code may reach: mounts of its own, and another user id where the service may change it.

In the mounts the installation is read-only, what the service keeps to itself is hidden, and what the code was given is
there even where a folder above it is closed to that user. By most specific path; nothing of it is seen outside.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import site
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from headrace_schema.references import keep_closed

from headrace_servicekit.contained.network import enter_network, hand_over
from headrace_servicekit.process.mounts import Mounts, checked

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITIES_V3, _MOST_CAPABILITIES = 0x20080522, 64
_DAEMONS = (
    *("/sys/fs/cgroup", "/run/user", "/run/dbus", "/run/docker.sock", "/run/podman", "/run/containerd"),
    *("/run/systemd/private", "/run/snapd.socket"),
)
"""Ways to have something done outside: cgroups of the user, D-Bus, daemons that start containers."""
_PUBLIC = ("/tmp", "/var/tmp", "/dev/shm")
"""Where every user may write."""
_ENTRIES_READ = 1_000
_FIRST_ID, _ANY_ID, _GROUP = 0x7F000000, 65533, 65533
"""Users of users' code: one for each service's process where ids are plenty, else one for all."""


@dataclass(frozen=True)
class Confinement:
    """What one worker with users' code gets."""

    hidden: list[str] = field(default_factory=list)
    """Files and folders of the service; they are empty there."""
    read: list[str] = field(default_factory=list)
    """What the code was given, closed or not: its own folders, models."""
    base: str = ""
    """Where its relative paths begin; there it has the rights that all have."""
    write: list[str] = field(default_factory=list)
    user: int = 0
    """User and group id; 0: the service's own."""
    link: int = -1
    """Descriptor by which the service gets the sockets of a network of the worker's own; -1: it has the host's."""
    processes: int = 0
    """Most processes of the user, and bytes of memory of each; 0: as many as the service may have."""
    memory_bytes: int = 0
    home: str = ""
    file_bytes: int = 0
    """Most bytes of the files at its home and where every user may write, in memory of its own; 0: on the machine's."""


class NotConfined(RuntimeError):
    """A wall that this machine has could not be put up; the sentence says which."""


def other_user() -> int:
    """The id that users' code of this process's children gets; 0 where this process may not change it."""
    if sys.platform != "linux" or not _may_change_user():
        return 0
    known = Path("/proc/self/uid_map").read_text().split()
    plenty = len(known) == 3 and int(known[2]) > 0x7FFFFFFF
    return _FIRST_ID + os.getpid() if plenty else _ANY_ID


def _may_change_user() -> bool:
    """Whether it has CAP_SETUID and CAP_SETGID."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) >> 6 & 3 == 3
    return False


def confine(given: Confinement) -> None:
    """Puts this process, and all that it starts, behind these walls for good; call it before threads are started.

    Where neither the kernel nor a container allows mounts of its own, another user id is all. Raises NotConfined.
    """
    keep_closed(given.hidden)
    if sys.platform != "linux":
        return
    try:
        if mounts := Mounts.enter(other_user=bool(given.user)):
            _arrange(mounts, given)
        if given.link >= 0:
            if mounts is None or not enter_network():
                raise NotConfined("users' code can have no network of its own")
            hand_over(given.link)
        _limit(resource.RLIMIT_NPROC, given.processes)
        _limit(resource.RLIMIT_DATA, given.memory_bytes)
        _drop(given.user)
        _return_to(given.base)
    except OSError as error:
        raise NotConfined(f"users' code cannot be confined: {error.strerror or error}") from error
    _check(given)
    _confined.append(given)


_confined: list[Confinement] = []


def explained(error: BaseException) -> str:
    """What to add to an error of users' code that these walls may have caused; empty for any other."""
    walls = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
    if not isinstance(error, OSError) or error.errno not in walls or not error.filename:
        return ""
    if not _confined or not _confined[0].user:
        return ""
    path = os.path.abspath(os.fsdecode(error.filename)) if not isinstance(error.filename, int) else ""
    if error.errno == errno.ENOENT and not _emptied(path):
        return ""
    return (
        f"; users' code is another user here. To read {path}, name it or its folder in the spec; to write, use the "
        f"home (~), or name its folder in the spec and let all write there: chmod 777 {os.path.dirname(path)}"
    )


def _emptied(path: str) -> bool:
    """Whether a path leads to an empty folder that stands for one that is closed or hidden."""
    there = next((str(each) for each in Path(path).parents if each.exists()), "/")
    return os.statvfs(there).f_flag & os.ST_RDONLY != 0


def _return_to(base: str) -> None:
    """The current folder is that of before the mounts: enters it again, or the home where it may not be entered."""
    for folder in (base or os.getcwd(), os.environ.get("HOME", ""), "/"):
        try:
            return os.chdir(folder)
        except OSError:
            continue


def installation() -> list[str]:
    """Folders of this Python and of its packages, those of editable installs too."""
    found = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *sys.path}
    if site.ENABLE_USER_SITE:  # another process would read a package that is put there
        own = Path(site.getusersitepackages())
        found.add(str(next(each for each in (own, *own.parents) if each.exists())))
    folders = sorted(os.path.abspath(path) for path in found if path and os.path.isdir(path))
    return [path for path in folders if path != "/" and not any(path.startswith(f"{up}/") for up in folders)]


def _arrange(mounts: Mounts, given: Confinement) -> None:
    own = _own_files(mounts, given) if given.file_bytes else {}
    hidden = {os.path.realpath(path) for path in (*given.hidden, *_DAEMONS) if os.path.lexists(path)}
    kept = dict.fromkeys(map(os.path.realpath, installation()), False)
    # What is open to that user stays as open as it is; what is opened for it is read alone.
    base = [given.base] if os.path.isdir(given.base) and _open_to(given.base, given.user) else []
    is_open = dict.fromkeys(map(os.path.realpath, base), True)
    is_open |= {
        path: _open_within(path, given.user)
        for path in map(os.path.realpath, given.read)
        if os.path.exists(path)
    }
    for path, opened in is_open.items():
        if not opened or _in_the_way(path, {*hidden, *own}, given.user):
            kept[path] = bool(given.user) and opened
    kept |= dict.fromkeys((os.path.realpath(path) for path in given.write if os.path.exists(path)), True)
    kept = {path: writable for path, writable in kept.items() if path not in hidden}
    as_owner = {
        path for path in kept if not is_open.get(path, path in given.write or _open_to(path, given.user))
    }
    closed = {each for path in kept if (each := closed_above(path, given.user)) and each not in kept}
    for path, writable in kept.items():
        mounts.take(path, writable=writable, as_user=given.user if path in as_owner else 0)
    for path, source in own.items():
        mounts.take(source, writable=True, place=path)
    kept |= dict.fromkeys(own, True)
    for path in sorted({*hidden, *closed, *kept}, key=lambda each: (each.count("/"), each)):
        if path in kept:
            mounts.place(path)
        else:
            mounts.hide(path)
    mounts.finish()


def _own_files(mounts: Mounts, given: Confinement) -> dict[str, str]:
    """Bounds the home; where every user may write, and the folder of the home that stands for it."""
    mounts.bound(given.home, given.file_bytes)
    own = {}
    for path in filter(os.path.isdir, _PUBLIC):
        own[path] = tempfile.mkdtemp(prefix=".public-", dir=given.home)
        os.chmod(own[path], 0o1777)
    return own


def _in_the_way(path: str, hidden: set[str], user: int) -> bool:
    """Whether a folder above a path keeps that user from it."""
    return any(path.startswith(f"{each}/") for each in hidden) or bool(closed_above(path, user))


def closed_above(path: str, user: int) -> str:
    """The first folder above a path that this user may not pass; empty where there is none."""
    for folder in reversed(Path(path).parents):
        if user and not _has(os.stat(folder), user, 1):
            return str(folder)
    return ""


def _open_to(path: str, user: int) -> bool:
    found = os.stat(path)
    return not user or _has(found, user, 5 if stat.S_ISDIR(found.st_mode) else 4)


def _open_within(path: str, user: int) -> bool:
    """Whether that user may read a path and all in it, by its first entries: tools write models as 0600.

    A folder in which that user may write is its own affair: as its owner's it could only be read.
    """
    if not _open_to(path, user):
        return False
    if not user or _has(os.stat(path), user, 7):
        return True
    within = (entry for folder in os.walk(path) for entry in _entries(*folder))
    for entry in islice(within, _ENTRIES_READ):
        with suppress(OSError):  # a link to nothing, or an entry that went meanwhile
            if not _open_to(entry, user):
                return False
    return True


def _entries(folder: str, folders: list[str], files: list[str]) -> Iterator[str]:
    return (os.path.join(folder, name) for name in (*folders, *files))


def _has(found: os.stat_result, user: int, wanted: int) -> bool:
    mode = found.st_mode >> 6 if found.st_uid == user else found.st_mode
    return mode & wanted == wanted


def _limit(which: int, most: int) -> None:
    if most:
        hard = resource.getrlimit(which)[1]
        own = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (own, own))


def _drop(user: int) -> None:
    """No capability, none to be had; another user, in the groups of devices that compute alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_MOST_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, *map(ctypes.c_ulong, (capability, 0, 0, 0)))
    if user:
        os.setgroups(sorted({path.stat().st_gid for path in Path("/dev/dri").glob("render*")} - {0}))
        os.setresgid(_GROUP, _GROUP, _GROUP)
        os.umask(0o002)  # a service that comes later, or another one, writes on in the same files
        os.setresuid(user, user, user)
    header, sets = struct.pack("=Ii", _CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    checked(libc.capset(header, sets), "capset")
    libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))


def _check(given: Confinement) -> None:
    """What is there to hide must be hidden where this process is another user, or has mounts of its own."""
    if not given.user:
        return
    for path in given.hidden:
        if os.path.isfile(path) and os.access(path, os.R_OK) and os.path.getsize(path):
            raise NotConfined(f"users' code can read {path}: chmod 600 it, and 700 the folder that it is in")
