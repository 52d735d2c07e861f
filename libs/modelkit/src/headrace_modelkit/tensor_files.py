"""Named tensors in safetensors files, of which one part after another is read. Knows no model.

A *box* is a part of a tensor: its first element and the one behind its last in each dimension. A file may hold a box in
place of the whole tensor, and says so in its header: several files, of one writer each, then hold the tensor.
Only what is asked for is read: a file is mapped for as long as one part is copied out of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from headrace_schema.progress import counter
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

Box = tuple[tuple[int, int], ...]
"""(first, end) in each dimension."""
BOXES = "boxes"
"""Key of a safetensors header's metadata: name → [shape of the whole, first element of the box], as JSON."""
NEXT = "@"
"""Before a number, behind the name of a tensor of which a file has several boxes."""


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


class TornTensor(ValueError):
    """A file is damaged, or files do not hold all of a tensor; the text names it."""


class Tensors(Protocol):
    """Tensors by name, of which parts can be read."""

    def names(self) -> Iterable[str]:
        """Of all of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `names`; reads no tensor."""

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of one of `names`, by default all of it, on the CPU and contiguous; it is only read."""


class TensorsInMemory(Tensors):
    """Tensors in host memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @override
    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    @override
    def read(self, name: str, box: Box | None = None) -> Tensor:
        found = self._tensors[name].detach()
        return (found if box is None else found[slices(box)]).contiguous()


@dataclass(frozen=True)
class _Piece:
    """Where a box of a tensor lies."""

    file: Path
    key: str
    box: Box


class TensorFiles(Tensors):
    """The tensors of several files. Raises OSError for a file that is missing, TornTensor for a damaged one."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for file in files:
            for key, shape, box, kind in read_header(file):
                name = key.partition(NEXT)[0]
                self._kinds[name] = kind
                if self._shapes.setdefault(name, shape) != shape:
                    other = list(self._shapes[name])
                    raise TornTensor(
                        f"{file.name}: {name} has the shape {list(shape)} there and {other} elsewhere"
                    )
                self._pieces.setdefault(name, []).append(_Piece(file, key, box))
        read = {piece.file for pieces in self._pieces.values() for piece in pieces}
        counter().begin(sum(file.stat().st_size for file in read), "bytes")
        for name, pieces in self._pieces.items():
            found = sum(volume(piece.box) for piece in pieces)
            if found != (needed := math.prod(self._shapes[name])):
                raise TornTensor(f"{name}: the files hold {found} of its {needed} elements")

    @override
    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def kind(self, name: str) -> str:
        """Which numbers a tensor has, as safetensors says it: "BF16"."""
        return self._kinds[name]

    @override
    def read(self, name: str, box: Box | None = None) -> Tensor:
        wanted = whole(self._shapes[name]) if box is None else box
        found: Tensor | None = None
        for piece in self._pieces[name]:
            common = intersection(piece.box, wanted)
            if common is None and found is not None:
                continue
            with open_file(piece.file) as file:
                # Where no element is common, the type is still asked for.
                index = slices(common, piece.box) if common is not None else (slice(0, 0),) * len(wanted)
                part = file.get_slice(piece.key)[index]
                if found is None:
                    found = torch.empty([end - first for first, end in wanted], dtype=part.dtype)
                if common is not None:
                    found[slices(common, wanted)] = part
                counter().add(part.nbytes)
                del part  # The mapping ends with the last view of it.
        assert found is not None
        return found


class SourceFiles(Tensors, Protocol):
    """Tensors of files by their names there."""

    def kind(self, name: str) -> str:
        """Which numbers a tensor has, as safetensors says it: "BF16"."""


class Renamed(Tensors):
    """Tensors of files under other names, which `names` gives them."""

    def __init__(self, files: Tensors, names: Mapping[str, str]) -> None:
        self._files, self._names = files, names

    @override
    def names(self) -> Iterable[str]:
        return self._names.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._names[name])

    def kind(self, name: str) -> str:
        """As `SourceFiles.kind`."""
        untyped: Any = self._files
        kind: str = untyped.kind(self._names[name])
        return kind

    @override
    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._files.read(self._names[name], box)


def open_file(file: Path) -> Any:
    """A safetensors file, to be used in a `with`. Raises OSError, and TornTensor where it is damaged."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise TornTensor(f"{file.name}: {error}") from error


def read_header(file: Path) -> Iterator[tuple[str, tuple[int, ...], Box, str]]:
    """(key, shape of the whole, box that is in the file, kind of numbers) of each entry. Raises as `open_file`."""
    with open_file(file) as opened:
        boxes = json.loads((opened.metadata() or {}).get(BOXES, "{}"))
        for name in opened.keys():  # noqa: SIM118
            entry = opened.get_slice(name)
            own = tuple(entry.get_shape())
            shape, first = boxes.get(name, (own, [0] * len(own)))
            box = tuple((at, at + size) for at, size in zip(first, own, strict=True))
            yield name, tuple(shape), box, entry.get_dtype()


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """How many elements it has."""
    return math.prod(end - first for first, end in box)


def intersection(one: Box, other: Box) -> Box | None:
    """What both have; None where that is no element."""
    found = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(one, other, strict=True))
    return found if all(first < end for first, end in found) else None


def slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    """Index of a box in the whole tensor, or in a tensor that is the box `inside`."""
    starts = [0] * len(box) if inside is None else [first for first, _ in inside]
    return tuple(slice(first - start, end - start) for (first, end), start in zip(box, starts, strict=True))


def safetensors_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file of these tensors begins with; their bytes follow, one after another."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
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
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Its elements as they are in a file."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
