"""Files below a folder, opened without following a link; and folders of this user's own in places that all share."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

_PASS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


def open_below(
    root: Path, path: Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, make: bool = False
) -> int:
    """Descriptor of `path`; no part of it below `root` may be a link, `root` itself may.

    `make`: makes the folders that are missing on the way. What is opened without O_DIRECTORY is a regular file, and
    the open never waits. Raises OSError, whose text says where a link is in the way.
    """
    if not path.is_relative_to(root) or ".." in (parts := path.relative_to(root).parts):
        raise OSError(errno.EXDEV, f"it is not below {root}", str(path))
    if make:
        root.mkdir(parents=True, exist_ok=True)
    found = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC | (_PASS & ~os.O_NOFOLLOW if parts else flags))
    for at, part in enumerate(parts, 1):
        above, way = found, _PASS if at < len(parts) else flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            if make and (at < len(parts) or flags & os.O_DIRECTORY):
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=above)
            found = os.open(part, way, mode, dir_fd=above)
        except OSError as error:
            raise _refused(error, root.joinpath(*parts[:at])) from error
        finally:
            os.close(above)
    if not flags & os.O_DIRECTORY and not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found


def _refused(error: OSError, path: Path) -> OSError:
    """A link counts as such whatever the kernel says of it."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
        return OSError(errno.ELOOP, "it is a symbolic link, which is not followed here", str(path))
    return OSError(error.errno, error.strerror, str(path))


def read_below(root: Path, path: Path) -> BinaryIO:
    """A regular file for reading; as `open_below`."""
    return open(path, "rb", opener=lambda *_: open_below(root, path))


def new_below(root: Path, path: Path) -> BinaryIO:
    """A new file in place of what is there, with the folders above it; as `open_below`."""
    folder = open_below(root, path.parent, os.O_RDONLY | os.O_DIRECTORY, make=True)
    try:
        return _new(folder, path.name)
    finally:
        os.close(folder)


def remove_below(root: Path, path: Path) -> None:
    """Removes a folder with all in it, and not what a link leads to; what cannot be removed stays."""
    with suppress(OSError):
        above = open_below(root, path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            shutil.rmtree(path.name, ignore_errors=True, dir_fd=above)
        finally:
            os.close(above)


@contextmanager
def replace_below(root: Path, path: Path, *, synced: bool = False) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` at the end of the body, whole or not at all; as `open_below`.

    `synced`: it survives a loss of power then.
    """
    folder = open_below(root, path.parent, os.O_RDONLY | os.O_DIRECTORY, make=True)
    aside = f".{path.name}.partial"
    try:
        with _new(folder, aside) as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.rename(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        if synced:
            os.fsync(folder)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)
        os.close(folder)


def _new(folder: int, name: str) -> BinaryIO:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    how = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, how, 0o666, dir_fd=folder), "w+b")


def own_folder(path: Path, fix: str) -> Path:
    """A folder for this user's files, made with mode 0700 where it is missing, with those above it.

    One that is there is taken where nobody else can have put it there, whose mode is its owner's wish; in a place
    that others write to (/tmp, /dev/shm) only a real folder of this user that is closed to all others. `fix` ends the
    error's sentence: what to set to have another folder. Raises PermissionError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        what = "a symbolic link" if path.is_symlink() else f"no folder of yours ({error.strerror})"
        raise _not_own(path, what, fix) from error
    try:
        found, above = os.fstat(handle), os.stat("..", dir_fd=handle)
    finally:
        os.close(handle)
    if above.st_uid in (0, os.geteuid()) and not above.st_mode & stat.S_IWOTH:
        return path
    if found.st_uid != os.geteuid():
        raise _not_own(path, f"a folder of user {found.st_uid}, and this is user {os.geteuid()}", fix)
    if found.st_mode & 0o077:
        raise _not_own(path, f"open to other users (mode {stat.S_IMODE(found.st_mode):04o})", fix)
    return path


def _not_own(path: Path, what: str, fix: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"it is {what}: remove it, or {fix}", str(path))
