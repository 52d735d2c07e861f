"""safetensors files and small durable files, written so that a crash leaves them whole or absent.

Knows no model and no checkpoint layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import xxhash
from headrace_modelkit.tensor_files import BOXES, safetensors_header, tensor_bytes
from headrace_servicekit.failpoints import failpoint_sync
from torch import Tensor

_CHUNK = 16 * 1024 * 1024

Boxes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Name → shape of the whole tensor, first element of the box that there is of it."""


class HashedFile:
    """A new file that is hashed as it is written, and on disk when closed without an error if it is to be `durable`."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._durable = durable
        self._file: IO[bytes] = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes. Raises OSError."""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            self._file.write(view[start : start + _CHUNK])
        self._hash.update(view)
        self.size += len(view)

    def close(self) -> dict[str, object]:
        """Ends the file; its size and xxh3-128. Raises OSError."""
        with self._file:
            self._file.flush()
            if self._durable:
                os.fsync(self._file.fileno())
        return {"size": self.size, "digest": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Closes without any promise."""
        self._file.close()


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    boxes: Boxes | None = None,
    *,
    durable: bool = True,
    abandoned: Callable[[], bool] = lambda: False,
    value: Callable[[str], Tensor] | None = None,
) -> dict[str, object]:
    """Writes contiguous CPU tensors in the safetensors format; size and digest.

    `boxes` names those that are a part of a larger one; `TensorFiles` reads them. `value` gives the tensors one by one
    where `tensors` are on meta. Raises OSError, also when `abandoned`
    says so between two tensors.
    """
    own = {name: box for name, box in (boxes or {}).items() if name in tensors}
    file = HashedFile(path, durable=durable)
    try:
        file.write(safetensors_header(tensors, {BOXES: json.dumps(own)} if own else {}))
        for name, tensor in tensors.items():
            failpoint_sync("trainer.checkpoint.write")
            if abandoned():
                raise OSError("the write was abandoned")
            file.write(tensor_bytes(tensor if value is None else value(name)))
        return file.close()
    finally:
        file.abandon()


def write_bytes(path: Path, data: bytes) -> dict[str, object]:
    """Writes a new small file durably; size and digest. Raises OSError, FileExistsError when it is there."""
    file = HashedFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()


def sync_directory(path: Path) -> None:
    """Makes a directory's entries durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_bytes(data: bytes) -> str:
    """xxh3-128 of a file's content that was read already."""
    return str(xxhash.xxh3_128(data).hexdigest())


def digest_file(path: Path) -> str:
    """xxh3-128 of a file's content. Raises OSError."""
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return str(found.hexdigest())
