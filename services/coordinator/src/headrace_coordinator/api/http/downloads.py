"""A folder as one tar file that is made while it is sent: its size is known at once, memory has one piece of it."""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi.responses import FileResponse, StreamingResponse
from headrace_servicekit.folders import open_below, read_below
from starlette.types import Receive, Scope, Send

from headrace_coordinator.api.refusal import Refused

MEDIA_TYPE = "application/x-tar"
TAR_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {}}, "description": "The tar file."}
}
PIECE = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class _Entry:
    """A file and what stands before it."""

    path: Path
    header: bytes
    size: int

    @property
    def padding(self) -> int:
        return -self.size % tarfile.BLOCKSIZE


async def folder_answer(root: Path, folder: Path, name: str, where: str) -> StreamingResponse:
    """The regular files of a folder below `root` as NAME.tar, in a folder NAME, in the order of their paths.

    Links are left out, on the way to the folder too. A file that is shorter than it was, or gone, ends the answer
    before its announced size, so that the reader sees an error and no wrong file.

    Raises:
        Refused: NOT_FOUND when the coordinator does not see the folder; `where` says what it is.
    """
    entries = await asyncio.to_thread(_entries, root, folder, name)
    if not entries:
        raise Refused("NOT_FOUND", f"{where} is below {folder}, which this coordinator does not see")
    size = sum(len(entry.header) + entry.size + entry.padding for entry in entries) + len(_END)
    headers = {"content-length": str(size), "content-disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(_sent(root, entries), media_type=MEDIA_TYPE, headers=headers)


class FileAnswer(FileResponse):
    """A regular file below `root`, to which no link leads.

    Raises:
        Refused: NOT_FOUND when there is none, or a link is on the way.
    """

    def __init__(self, root: Path, path: Path, media_type: str, filename: str | None = None) -> None:
        try:
            self._file = read_below(root, path)
        except OSError as error:
            raise Refused("NOT_FOUND", f"{path} cannot be read: {error.strerror}") from error
        opened = self._file.fileno()
        super().__init__(
            f"/dev/fd/{opened}", media_type=media_type, filename=filename, stat_result=os.fstat(opened)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, and closes it however that ends."""
        with self._file:
            await super().__call__(scope, receive, send)


def _entries(root: Path, folder: Path, name: str) -> list[_Entry]:
    try:
        opened = open_below(root, folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    found = []
    try:
        for below, _, files, within in os.fwalk(".", dir_fd=opened):
            for file in files:
                status = os.stat(file, dir_fd=within, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                path = Path(below, file)
                info = tarfile.TarInfo(f"{name}/{path.as_posix()}")
                info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), 0o644
                found.append(_Entry(folder / path, info.tobuf(tarfile.PAX_FORMAT), status.st_size))
    finally:
        os.close(opened)
    return sorted(found, key=lambda entry: entry.path)


async def _sent(root: Path, entries: list[_Entry]) -> AsyncIterator[bytes]:
    pieces = _pieces(root, entries)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _pieces(root: Path, entries: list[_Entry]) -> Iterator[bytes]:
    for entry in entries:
        yield entry.header
        with read_below(root, entry.path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            left = entry.size
            while left:
                piece = file.read(min(left, PIECE))
                if not piece:
                    raise OSError(f"{entry.path} has become shorter while it was sent")
                left -= len(piece)
                yield piece
        yield bytes(entry.padding)
    yield _END
