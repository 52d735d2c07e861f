"""Tensors into the memory of a version, in its types, with the digests of the bytes written. Knows no version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.digests import StretchDigest, in_threads, joined_digest, stretches
from torch import Tensor

from headrace_trainer.errors import Refusal

DATA_TYPES = {
    "float64": common_pb2.DATA_TYPE_FLOAT64,
    "float32": common_pb2.DATA_TYPE_FLOAT32,
    "float16": common_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": common_pb2.DATA_TYPE_BFLOAT16,
    "int64": common_pb2.DATA_TYPE_INT64,
    "int32": common_pb2.DATA_TYPE_INT32,
    "int16": common_pb2.DATA_TYPE_INT16,
    "int8": common_pb2.DATA_TYPE_INT8,
    "uint8": common_pb2.DATA_TYPE_UINT8,
    "bool": common_pb2.DATA_TYPE_BOOL,
}
CAST_ELEMENTS = 1 << 19
"""Elements that are cast and hashed at a time: they stay in a core's cache."""


def cast_into(
    tensors: Iterable[tuple[str, Tensor, memoryview | None]], types: Mapping[str, torch.dtype]
) -> dict[str, str]:
    """Writes each tensor's elements in its type into its room, in several threads; the digests of the bytes. Where
    there is no room, of those that would be written.

    Raises Refusal NONFINITE_WEIGHTS.
    """
    found: list[tuple[str, list[bytes]]] = []
    acts: list[Callable[[], None]] = []
    for name, tensor, room in tensors:
        flat, dtype = tensor.detach().reshape(-1), types[name]
        target = None if room is None else torch.frombuffer(room, dtype=dtype, count=len(flat))
        parts = [b""] * len(bounds := stretches(len(flat) * dtype.itemsize))
        found.append((name, parts))
        for place, (begin, end) in enumerate(bounds):
            own = slice(begin // dtype.itemsize, end // dtype.itemsize)
            acts.append(partial(_cast_stretch, name, flat, target, dtype, own, parts, place))
    threads = torch.get_num_threads()
    try:
        in_threads(acts)
    finally:
        torch.set_num_threads(threads)
    return {name: joined_digest(parts) for name, parts in found}


def _cast_stretch(
    name: str,
    flat: Tensor,
    target: Tensor | None,
    dtype: torch.dtype,
    own: slice,
    parts: list[bytes],
    place: int,
) -> None:
    """One stretch of a tensor, in this thread alone."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    digest = StretchDigest()
    room = torch.empty(min(CAST_ELEMENTS, own.stop - own.start), dtype=dtype) if target is None else target
    for first in range(own.start, own.stop, CAST_ELEMENTS):
        last = min(first + CAST_ELEMENTS, own.stop)
        part = flat[first:last]
        # One NaN makes the sum one, and so do infinities of both signs.
        if part.is_floating_point() and part.sum().isnan() and (nans := int(part.isnan().sum())):
            raise Refusal(
                "NONFINITE_WEIGHTS",
                f"tensor {name} has {nans} NaN among its elements {first} to {last - 1}: this version is not "
                "published, and the run goes on from its last checkpoint; a lower optimizer.lr may prevent it",
            )
        written = room[: last - first] if target is None else room[first:last]
        digest.update(written.copy_(part).view(torch.uint8).numpy().data)
    parts[place] = digest.digest()
