"""A published body as tensors: the base of a helper, and the gradient that it gives. Knows no steps."""

from __future__ import annotations

import warnings

import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection
from torch import Tensor

from headrace_trainer.backends._base import StateReader
from headrace_trainer.errors import Refusal, invalid

TYPES = {
    common_pb2.DATA_TYPE_FLOAT64: torch.float64,
    common_pb2.DATA_TYPE_FLOAT32: torch.float32,
    common_pb2.DATA_TYPE_FLOAT16: torch.float16,
    common_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    common_pb2.DATA_TYPE_INT64: torch.int64,
    common_pb2.DATA_TYPE_INT32: torch.int32,
    common_pb2.DATA_TYPE_INT16: torch.int16,
    common_pb2.DATA_TYPE_INT8: torch.int8,
    common_pb2.DATA_TYPE_UINT8: torch.uint8,
    common_pb2.DATA_TYPE_BOOL: torch.bool,
}


def published_tensors(manifest: common_pb2.WeightManifest, body: memoryview) -> dict[str, Tensor]:
    """Views of a verified body, by name; nobody may write to them, and they keep the body alive.

    Raises Refusal INVALID for an element type that is none of the trainer's.
    """
    found: dict[str, Tensor] = {}
    for entry in manifest.entries:
        if entry.data_type not in TYPES:
            raise invalid(f"{entry.name}: its element type {entry.data_type} is not known")
        shape, dtype = tuple(entry.shape), TYPES[entry.data_type]
        if not entry.size_bytes:
            found[entry.name] = torch.empty(shape, dtype=dtype)
            continue
        part = body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a buffer that is read-only: it is only read
            found[entry.name] = torch.frombuffer(part, dtype=dtype).view(shape)
    return found


class PublishedReader:
    """A published version as a `StateReader` without optimizer state, critic or adapters."""

    optimizer_steps = 0

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def weight(self, name: str) -> Tensor:
        """See `StateReader`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise Refusal("WEIGHTS_MISMATCH", f"the version has no tensor {name!r}: it is of another model")
        return tensor

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateReader`."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def moment(self, kind: str, name: str) -> Tensor:
        """There are none. Raises KeyError."""
        raise KeyError(f"{kind}/{name}")

    def moment_kinds(self) -> set[str]:
        """See `StateReader`."""
        return set()

    def critic_weight(self, name: str) -> Tensor:
        """There is no critic. Raises KeyError."""
        raise KeyError(name)

    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateReader`."""
        return {}

    def adapter(self, name: str) -> Tensor:
        """There is none. Raises KeyError."""
        raise KeyError(name)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateReader`."""
        return {}


def check_shapes(reader: StateReader, model: ModelSection) -> None:
    """Raises Refusal WEIGHTS_MISMATCH when a version is not one of the model's."""
    own = {name: tuple(tensor.shape) for name, tensor in state_tensors(load_model(model, weights=False))}
    given = reader.weight_shapes()
    if own == given:
        return
    name = min(set(own.items()) ^ set(given.items()))[0]
    raise Refusal(
        "WEIGHTS_MISMATCH",
        f"model.path: {name} has shape {given.get(name, 'none')} in the version and {own.get(name, 'none')} in "
        f"{model.path!r}; the helper was opened with another model",
    )
