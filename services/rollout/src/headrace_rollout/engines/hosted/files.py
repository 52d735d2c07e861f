"""Weights in files of this host, as an engine's own processes take them: adapters merged, on a GPU uploaded through
pinned memory, each byte once a host. The instance has verified them. Knows no engine.

What a loader of an engine's model raises in a worker is an answer: SGLang ends on it, and vLLM's core reads the answers
of several workers only up to the first error, so that the next call would get the last one's.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from headrace_modelkit.adapters import merged
from headrace_modelkit.device_memory import tensor_at
from headrace_modelkit.pinned import Rooms, flat_bytes
from torch import Tensor

LOADER_ERRORS = (OSError, ValueError, RuntimeError, LookupError, AssertionError, TypeError, AttributeError)
WINDOW_BYTES = 256 << 20
"""Of tensors that are uploaded together; a larger tensor is alone."""
ALIGNED_BYTES = 16
Row = Sequence[Any]
"""[name, torch dtype's name, shape, offset, size, digest], as it travels."""
_Result = TypeVar("_Result")


class Ranks(Protocol):
    """Workers of one engine that all take the same tensors in the same order: vLLM's and SGLang's GroupCoordinator,
    whose communicator is there already.
    """

    world_size: int
    rank_in_group: int
    cpu_group: Any

    def all_gather(self, input_: Tensor, dim: int) -> Tensor: ...


def read_tensors(
    path: str,
    rows: Sequence[Row],
    adapter: Mapping[str, Any] | None,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version: views of the file, and of a GPU `device` copies there, of which each of `ranks` uploads
    a part; all of these exhaust them.

    `adapter` is {"path", "entries", "scale"}: merged on `device` as they are taken. Raises ValueError and OSError on
    all ranks before anything is taken, where one of them cannot have the bytes.
    """

    def opened() -> tuple[memoryview, memoryview | None]:
        return _opened(path, rows), _opened(adapter["path"], adapter["entries"]) if adapter else None

    body, beside = agreed(opened, ranks)
    uploads = device is not None and device.type == "cuda"
    tensors = uploaded(body, rows, device, ranks) if uploads and device is not None else _tensors(body, rows)
    if adapter is None or beside is None:
        return tensors
    return merged(tensors, dict(_tensors(beside, adapter["entries"])), adapter["scale"], device)


def agreed(act: Callable[[], _Result], ranks: Ranks | None) -> _Result:
    """What `act` returns, if it does on all ranks; else all raise."""
    problem: OSError | ValueError | None = None
    try:
        found = act()
    except (OSError, ValueError) as error:
        problem = error
    if ranks is not None and ranks.world_size > 1:
        failed = torch.tensor([int(problem is not None)], device="cpu")
        dist.all_reduce(failed, group=ranks.cpu_group)
        if problem is None and int(failed):
            raise ValueError(f"{int(failed)} other workers of this engine could not open the version")
    if problem is not None:
        raise problem
    return found


def uploaded(
    body: memoryview, rows: Sequence[Row], device: torch.device, ranks: Ranks | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors on the device, window by window; the ranks exchange what each has uploaded over their own links."""
    source, rooms = flat_bytes(body), Rooms(device)
    count, rank = (ranks.world_size, ranks.rank_in_group) if ranks is not None else (1, 0)
    for window in windows_of(rows):
        begin, end = window[0][3], window[-1][3] + window[-1][4]
        part = -(-(end - begin) // (count * ALIGNED_BYTES)) * ALIGNED_BYTES
        first = min(end, begin + rank * part)
        own = torch.empty(part, dtype=torch.uint8, device=device)
        rooms.upload(source[first : min(end, first + part)], own)
        whole = ranks.all_gather(own, 0) if ranks is not None and count > 1 else own
        for name, dtype, shape, offset, size, _ in window:
            yield name, tensor_at(whole, dtype, shape, offset - begin, size)


def windows_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that follow each other, of up to WINDOW_BYTES together."""
    window: list[Row] = []
    for row in rows:
        follows = window and row[3] == window[-1][3] + window[-1][4]
        if window and (not follows or row[3] + row[4] - window[0][3] > WINDOW_BYTES):
            yield window
            window = []
        window.append(row)
    if window:
        yield window


def taken(
    load: Callable[[Iterable[tuple[str, Tensor]]], _Result], tensors: Iterator[tuple[str, Tensor]]
) -> _Result:
    """What `load` makes of the tensors, which are exhausted in any case: other ranks wait for this one's part."""
    try:
        return load(tensors)
    finally:
        for _ in tensors:
            pass


def _opened(path: str, rows: Sequence[Row]) -> memoryview:
    with open(path, "rb") as file:
        # Closed with the last tensor over it: a loader keeps some until their layer is whole.
        body = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    for name, _, _, offset, size, _ in rows:
        if offset + size > len(body):
            raise ValueError(f"tensor {name} lies behind the {len(body)} bytes of its file")
    return body


def _tensors(body: memoryview, rows: Sequence[Row]) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape, offset, size, _ in rows:
        kind = getattr(torch, dtype)
        part = body[offset : offset + size]
        tensor = torch.frombuffer(part, dtype=kind) if size else torch.empty(0, dtype=kind)
        yield name, tensor.view(*shape)
