"""Files on their way into containers, and out of them: what comes out was made by strangers, so no link is followed."""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from headrace_containers.provider import BadPath, File

MOST_FILES = 100_000
"""Entries of an archive that are read."""


UNPACK = r"""umask 022
for folder; do
  [ -e "$folder" ] || continue
  if [ -L "$folder" ]; then echo "$folder is a link" >&2; exit 1; fi
  case $(ls -ld "$folder") in d????-??-*) ;; *) echo "$folder may be changed by others" >&2; exit 1;; esac
  [ -O "$folder" ] || { echo "$folder belongs to another user" >&2; exit 1; }
done
exec tar -xpof - -C /"""
"""A script that unpacks a tar at the root. The folders that it is given must be that user's own, and no links: others
may put a link there at any moment.
"""


def packed(files: Sequence[File], workdir: str) -> bytes:
    """A tar of files, to be unpacked at the root. Raises BadPath for a path that is none, or has ".."."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for file in files:
            entry = tarfile.TarInfo(absolute(file.path, workdir).lstrip("/"))
            entry.size, entry.mode = len(file.data), file.mode & 0o777
            archive.addfile(entry, io.BytesIO(file.data))
    return out.getvalue()


def folders_above(files: Sequence[File], workdir: str) -> list[str]:
    """All folders above files, the outermost first."""
    found = {str(folder) for file in files for folder in PurePosixPath(absolute(file.path, workdir)).parents}
    return sorted(found, key=len)


def folder_entry(path: str, uid: int, gid: int) -> bytes:
    """A tar of one folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        entry = tarfile.TarInfo(path.strip("/"))
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
        archive.addfile(entry)
    return out.getvalue()


def absolute(path: str, workdir: str) -> str:
    """A path of a container, from its root. Raises BadPath for one that is none, or has ".."."""
    if not path or "\0" in path or ".." in path.split("/") or path.endswith("/"):
        raise BadPath(f"{path!r} is no path of a file; give one without '..'")
    return posixpath.normpath(posixpath.join("/", workdir, path))


def unpacked(data: Iterable[bytes], most_bytes: int, name: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """The entries of a tar as it comes; of regular files with their content. Nothing is written anywhere.

    Raises BadPath where the files have more than `most_bytes`, or it is no tar.
    """
    left, count = most_bytes, 0
    try:
        with tarfile.open(fileobj=Pieces(data), mode="r|") as archive:  # type: ignore[call-overload]
            for entry in archive:
                count += 1
                left -= entry.size if entry.isreg() else 0
                if left < 0 or count > MOST_FILES:
                    raise BadPath(f"{name} is larger than {most_bytes} bytes, or {MOST_FILES} files")
                content = archive.extractfile(entry) if entry.isreg() else None
                yield entry, content.read() if content is not None else b""
    except (tarfile.TarError, EOFError) as error:
        raise BadPath(f"{name} cannot be read: {error}") from error


class Pieces(io.RawIOBase):
    """A file of pieces of bytes that come."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._ahead = iter(pieces), b""

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; less than that at the end alone."""
        while len(self._ahead) < size and (piece := next(self._pieces, b"")):
            self._ahead += piece
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken


def packed_folder(folder: Path) -> bytes:
    """A folder as a tar of the same bytes for the same content, whoever made it and when. Links stay links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if not (path.is_file() or path.is_dir() or path.is_symlink()):
                continue  # a socket, or a device
            entry = archive.gettarinfo(path, str(path.relative_to(folder)))
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
            if entry.isreg():
                with path.open("rb") as file:
                    archive.addfile(entry, file)
            elif entry.isdir() or entry.issym():
                archive.addfile(entry)
    return out.getvalue()


def gather(folder: Path, into: str = "") -> list[File]:
    """The regular files below a folder of this host, by paths below `into`. Raises BadPath for a link in it."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise BadPath(f"{path} is a link; a folder that goes into containers has files alone")
        if path.is_file():
            name = posixpath.join(into, path.relative_to(folder).as_posix())
            found.append(File(name, path.read_bytes(), path.stat().st_mode & 0o777))
    return found


def save(files: Iterable[File], folder: Path) -> None:
    """Writes files that came out of a container below a folder of this host, which has nothing yet.

    Raises BadPath for one that would lie elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BadPath(f"{folder} is not empty")
    for file in files:
        parts = file.path.split("/")
        if file.path.startswith("/") or ".." in parts or "" in parts or "\0" in file.path:
            raise BadPath(f"{file.path!r} is no path below a folder")
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(file.data)
