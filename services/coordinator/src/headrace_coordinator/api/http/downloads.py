"""A folder as one tar file that is made while it is sent: its size is known at once, memory has one piece of it."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi.responses import StreamingResponse

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


async def folder_answer(folder: Path, name: str, where: str) -> StreamingResponse:
    """The regular files below a folder as NAME.tar, in a folder NAME, in the order of their paths.

    Links are left out. A file that is shorter than it was, or gone, ends the answer before its announced size, so
    that the reader sees an error and no wrong file.

    Raises:
        Refused: NOT_FOUND when the coordinator does not see the folder; `where` says what it is.
    """
    entries = await asyncio.to_thread(_entries, folder, name)
    if not entries:
        raise Refused("NOT_FOUND", f"{where} is below {folder}, which this coordinator does not see")
    size = sum(len(entry.header) + entry.size + entry.padding for entry in entries) + len(_END)
    headers = {"content-length": str(size), "content-disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(_sent(entries), media_type=MEDIA_TYPE, headers=headers)


def _entries(folder: Path, name: str) -> list[_Entry]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        status = path.stat()
        info = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
        info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), 0o644
        found.append(_Entry(path, info.tobuf(tarfile.PAX_FORMAT), status.st_size))
    return found


async def _sent(entries: list[_Entry]) -> AsyncIterator[bytes]:
    pieces = _pieces(entries)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _pieces(entries: list[_Entry]) -> Iterator[bytes]:
    for entry in entries:
        yield entry.header
        handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb", buffering=0) as file:
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
