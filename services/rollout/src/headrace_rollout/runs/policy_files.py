"""Weights read from disk, as the manifest and the body that a trainer would publish of them.

For an evaluation, which has no trainer. Knows no engine and no gRPC call.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import grpc
import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.adapters import names_alone
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.draft_files import add_draft
from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.lora import A, B, adapter_of
from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, TornTensor
from headrace_modelkit.weights import (
    CheckpointNames,
    below,
    copy_out,
    own_name,
    read_weights,
    state_tensors,
    weight_layout,
)
from headrace_schema.openings import RolloutConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import manifest_digest, tensor_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.versions import entries_of
from safetensors import SafetensorError
from torch import nn
from typing_extensions import override

from headrace_rollout.workloads import acting_policy

CHECKPOINT_WEIGHTS = "weights*.safetensors"
"""Files of a checkpoint that hold its weights: one of each rank that wrote it."""
CHECKPOINT_MOMENTS, CHECKPOINT_ADAPTERS, ALPHA = "optimizer*.safetensors", "adapter", "alpha"
"""Files that hold adapters, which are named adapter/NAME there, and the number that scales them."""
_DATA_TYPES = {
    torch.float64: common_pb2.DATA_TYPE_FLOAT64,
    torch.float32: common_pb2.DATA_TYPE_FLOAT32,
    torch.float16: common_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: common_pb2.DATA_TYPE_BFLOAT16,
    torch.int64: common_pb2.DATA_TYPE_INT64,
    torch.int32: common_pb2.DATA_TYPE_INT32,
    torch.int16: common_pb2.DATA_TYPE_INT16,
    torch.int8: common_pb2.DATA_TYPE_INT8,
    torch.uint8: common_pb2.DATA_TYPE_UINT8,
    torch.bool: common_pb2.DATA_TYPE_BOOL,
}


def read_policy(
    run: RolloutConfig, checkpoint: str, digest: str, policy: str = ""
) -> tuple[common_pb2.WeightManifest, memoryview]:
    """The weights of a checkpoint's directory, or of the model itself where `checkpoint` is empty.

    Of the policies that a checkpoint holds it is the one of this name; "" is the run's own one.

    Raises ServiceError MODEL_NOT_READABLE, also where they are not those of `digest` (empty: not compared).
    """
    config = run.model
    model: nn.Module
    try:
        if (acting := acting_policy(config)) is not None:
            model, dtype = acting.initial(run.seed)
        else:
            language = load_model(config, weights=not checkpoint)
            add_draft(language, run.draft, config)
            model, dtype = language, DTYPES[config.dtype]
        if checkpoint:
            _load_checkpoint(model, Path(checkpoint), policy)
    except ModelNotReadable as error:
        raise _unreadable(str(error)) from error
    manifest, body = published_body(model, dtype)
    if digest and manifest.digest != digest:
        if checkpoint and digest == _adapters_digest(config, Path(checkpoint), dtype):
            manifest.digest = digest  # the version is its adapters, which are merged here
            return manifest, body
        raise _unreadable(
            f"checkpoint: the weights in {checkpoint or config.path} have digest {manifest.digest}, not {digest}: "
            "they are damaged, or model.dtype is not the run's; take another checkpoint"
        )
    return manifest, body


def _adapters_digest(config: ModelSection, directory: Path, dtype: torch.dtype) -> str:
    """Of the version of adapters alone, on the model's own weights, that a checkpoint is; empty where it is none.

    Raises ServiceError MODEL_NOT_READABLE.
    """
    kind = f"{CHECKPOINT_ADAPTERS}/"
    try:
        files = TensorFiles(sorted(directory.glob(CHECKPOINT_MOMENTS)))
        own = {name.removeprefix(kind): name for name in files.names() if name.startswith(kind)}
        if (alpha := own.pop(ALPHA, None)) is None:
            return ""
        base = load_model(config)
        weights = {name: tuple(tensor.shape) for name, tensor in state_tensors(base)}
        names = names_alone(
            CheckpointNames.of(base), weights, {name: files.shape(stored) for name, stored in own.items()}
        )
        if names is None:
            return ""
        parts = [f"{adapter_of(weight)}.{part}" for weight in weights for part in (A, B)]
        found = {name: files.read(own[name]) for name in parts if name in own}
        rank = next(iter(found.values())).shape[0]  # of an A, which comes first
        scale = float(files.read(alpha)) / rank
    except (OSError, SafetensorError, TornTensor, ModelNotReadable) as error:
        raise _unreadable(f"checkpoint: {directory} cannot be read: {error}; take a newer one") from error
    entries = []
    for name, tensor in found.items():
        [(published, part)] = names.split(name, tensor)
        data = part.float().contiguous().numpy().tobytes()
        entries.append(
            common_pb2.WeightEntry(
                name=published,
                data_type=common_pb2.DATA_TYPE_FLOAT32,
                shape=part.shape,
                digest=tensor_digest(memoryview(data)),
            )
        )
    base_digest = published_body(base, dtype)[0].digest
    return manifest_digest(entries, common_pb2.AdapterBase(digest=base_digest, scales={"": scale}))


def _load_checkpoint(model: nn.Module, directory: Path, policy: str) -> None:
    """One tensor at a time: the whole is in memory once, in the model's types."""
    try:
        files = sorted(directory.glob(CHECKPOINT_WEIGHTS))
        if not files:
            raise FileNotFoundError(f"no {CHECKPOINT_WEIGHTS} is there")
        read_weights(model, _OnePolicy(TensorFiles(files), policy))
    except (OSError, SafetensorError, TornTensor) as error:
        message = (
            f"checkpoint: {directory} cannot be read: {error}; it may have been pruned: take a newer one"
        )
        raise _unreadable(message) from error
    except ValueError as error:
        raise _unreadable(f"checkpoint: {directory}: {error}; give the model of the run") from error


class _OnePolicy(Tensors):
    """Those of one policy, which a checkpoint may hold beside others'."""

    def __init__(self, tensors: Tensors, policy: str) -> None:
        self._tensors, self._policy = tensors, policy

    @override
    def names(self) -> Iterable[str]:
        found = (own_name(name) for name in self._tensors.names())
        return [name for policy, name in found if policy == self._policy]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(below(self._policy, name))

    @override
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self._tensors.read(below(self._policy, name), box)


def published_body(model: nn.Module, dtype: torch.dtype) -> tuple[common_pb2.WeightManifest, memoryview]:
    """A model's weights as a version."""
    layout = [(name, _DATA_TYPES[kind], shape) for name, kind, shape in weight_layout(model, dtype)]
    entries = entries_of(layout)
    body = memoryview(bytearray(sum(entry.size_bytes for entry in entries)))
    for entry in entries:
        with body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes] as part:
            if entry.size_bytes:
                copy_out(model, entry.name, part, dtype)
            entry.digest = tensor_digest(part)
    manifest = common_pb2.WeightManifest(
        entries=entries, digest=manifest_digest(entries), size_bytes=len(body)
    )
    return manifest, body


def _unreadable(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "MODEL_NOT_READABLE", message)
