"""Weights in files of this host, as an engine's own processes take them: verified, adapters merged. Knows no engine.

What a loader of an engine's model raises in a worker is an answer: SGLang ends on it, and vLLM's core reads the answers
of several workers only up to the first error, so that the next call would get the last one's.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from headrace_modelkit.adapters import merged
from headrace_servicekit.rpc.digests import digest_bytes
from torch import Tensor

LOADER_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
    TypeError,
    AttributeError,
)


warnings.filterwarnings("ignore", message="The given buffer is not writable")

Row = Sequence[Any]
"""[name, torch dtype's name, shape, offset, size, digest], as it travels."""


def read_tensors(
    path: str,
    rows: Sequence[Row],
    adapter: Mapping[str, Any] | None,
    digests: dict[str, str],
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version; their digests are in `digests` when this returns.

    `adapter` is {"path", "entries", "scale"}: merged on `device` as they are taken. Raises ValueError for a wrong
    digest, before anything is taken.
    """
    body = _verified(path, rows, digests)
    if adapter is None:
        return _tensors(body, rows)
    beside = _verified(adapter["path"], adapter["entries"], digests)
    return merged(_tensors(body, rows), dict(_tensors(beside, adapter["entries"])), adapter["scale"], device)


def _verified(path: str, rows: Sequence[Row], digests: dict[str, str]) -> memoryview:
    with open(path, "rb") as file:
        # Closed with the last tensor over it: a loader keeps some until their layer is whole.
        body = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    for name, _, _, offset, size, digest in rows:
        digests[name] = digest_bytes(body[offset : offset + size])
        if digest and digests[name] != digest:
            raise ValueError(f"tensor {name} arrived with digest {digests[name]}, not {digest}")
    return body


def _tensors(body: memoryview, rows: Sequence[Row]) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape, offset, size, _ in rows:
        kind = getattr(torch, dtype)
        part = body[offset : offset + size]
        tensor = torch.frombuffer(part, dtype=kind) if size else torch.empty(0, dtype=kind)
        yield name, tensor.view(*shape)
