"""Tensors between numpy arrays and the wire, with every check before the first allocation.

Dense, C-contiguous, little-endian. Knows nothing of torch and fetches no blobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import ml_dtypes
import numpy as np
from headrace.common.v1 import common_pb2

from headrace_servicekit.rpc.errors import invalid

MAX_DIMENSIONS = 16
MAX_TENSOR_BYTES = 1 << 48
"""Above any memory. numpy and torch overflow on extents beyond theirs, also where another extent is zero."""

NUMPY_TYPES: dict[int, np.dtype] = {
    common_pb2.DATA_TYPE_BOOL: np.dtype(np.bool_),
    common_pb2.DATA_TYPE_UINT8: np.dtype(np.uint8),
    common_pb2.DATA_TYPE_INT8: np.dtype(np.int8),
    common_pb2.DATA_TYPE_INT16: np.dtype("<i2"),
    common_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    common_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
    common_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    common_pb2.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    common_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    common_pb2.DATA_TYPE_FLOAT64: np.dtype("<f8"),
}
_WIRE_TYPES = {dtype: number for number, dtype in NUMPY_TYPES.items()}


def encode_tensor(array: np.ndarray) -> common_pb2.Tensor:
    """The array as a Tensor with inline data. Raises ServiceError INVALID for a type without wire form."""
    tensor = common_pb2.Tensor()
    write_tensor(tensor, array)
    return tensor


def write_tensor(
    tensor: common_pb2.Tensor,
    array: np.ndarray,
    hold: Callable[[memoryview], common_pb2.BlobRef] | None = None,
) -> None:
    """`encode_tensor` into an empty Tensor, such as the field of a message: this spares a copy.

    With `hold` the body stays with it, and the tensor has the reference that it returns.
    """
    data_type = _WIRE_TYPES.get(array.dtype)
    if data_type is None:
        dtype = array.dtype.newbyteorder("<")
        data_type = _WIRE_TYPES.get(dtype)
        if data_type is None:
            raise invalid(f"arrays of type {array.dtype} cannot travel; use one of {_names()}")
        array = array.astype(dtype)
    tensor.data_type = data_type  # type: ignore[assignment]  # a number of the enumeration
    tensor.shape.extend(array.shape)
    if hold is None:
        tensor.data = array.tobytes()
    else:
        tensor.blob.CopyFrom(hold(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))


def decode_tensor(
    tensor: common_pb2.Tensor, *, max_bytes: int, body: bytes | bytearray | None = None
) -> np.ndarray:
    """A writable array with the tensor's elements; `body` are those of a tensor that refers to them.

    A `body` that can be written becomes the array's memory, which spares a copy.

    Raises ServiceError INVALID when the type is unknown, the shape is no shape, the data is not exactly
    shape times element size, the size is above `max_bytes`, a bool is neither 0 nor 1, or the body is a blob
    and not given.
    """
    shape = tuple(tensor.shape)
    # Every step of an environment asks the same: what a type and a shape come to is worked out once.
    size = _checked_bytes(tensor.data_type, shape)
    data = tensor.data if body is None else body
    if not data and body is None and tensor.WhichOneof("body") == "blob":
        raise invalid("the tensor's body is a blob reference; fetch it from its producer first")
    if size > max_bytes:
        raise invalid(f"a tensor of {size} bytes is above the limit of {max_bytes} bytes")
    if size != len(data):
        raise invalid(f"shape {list(shape)} needs {size} bytes, the tensor holds {len(data)}")
    dtype = NUMPY_TYPES[tensor.data_type]
    if dtype.kind == "b" and data.translate(None, b"\x00\x01"):
        raise invalid("a bool tensor holds bytes other than 0 and 1")
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if array.flags.writeable else array.copy()


def tensor_bytes(data_type: int, shape: Sequence[int]) -> int:
    """Size in bytes of a tensor of this type and shape; raises ServiceError INVALID when there is none.

    Extents beside a zero extent must stay below MAX_TENSOR_BYTES too.
    """
    if data_type not in NUMPY_TYPES:
        raise invalid(f"data_type {data_type} is unknown; use one of {_names()}")
    if len(shape) > MAX_DIMENSIONS:
        raise invalid(f"a tensor of {len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if shape and min(shape) < 0:
        raise invalid(f"shape {list(shape)} has a negative extent")
    item = NUMPY_TYPES[data_type].itemsize
    size = math.prod(shape) * item
    if size > MAX_TENSOR_BYTES or (
        not size and math.prod([max(1, each) for each in shape]) * item > MAX_TENSOR_BYTES
    ):
        raise invalid(f"shape {list(shape)}: its extents are above the limit of {MAX_TENSOR_BYTES} bytes")
    return size


_checked_bytes = lru_cache(maxsize=1024)(tensor_bytes)


def _names() -> str:
    return ", ".join(str(dtype) for dtype in NUMPY_TYPES.values())
