"""safetensors files and small durable files, written so that a crash leaves them whole or absent.

Knows no model and no checkpoint layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
import xxhash
from headrace_servicekit.failpoints import failpoint_sync
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 16 * 1024 * 1024


class HashedFile:
    """A new file that is hashed as it is written, and on disk when closed without an error."""

    def __init__(self, path: Path) -> None:
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
        """Makes it durable; its size and xxh3-128. Raises OSError."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"size": self.size, "digest": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Closes without any promise."""
        self._file.close()


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Writes contiguous CPU tensors in the safetensors format; size and digest. Raises OSError."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = HashedFile(path)
    try:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            failpoint_sync("trainer.checkpoint.write")
            file.write(_bytes(tensor))
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


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
