"""Weights read from disk, as the manifest and the body that a trainer would publish of them.

For an evaluation, which has no trainer. Knows no engine and no gRPC call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import grpc
import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.robot.directory import initial_policy, policy_of, policy_type
from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, TornTensor
from headrace_modelkit.weights import below, copy_out, own_name, read_weights, weight_layout
from headrace_schema.openings import RolloutConfig, policy_model
from headrace_servicekit.rpc.digests import digest_bytes, manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.store import entries_of
from safetensors import SafetensorError
from torch import nn
from typing_extensions import override

CHECKPOINT_WEIGHTS = "weights*.safetensors"
"""Files of a checkpoint that hold its weights: one of each rank that wrote it."""
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
    run: RolloutConfig, checkpoint: str, digest: str
) -> tuple[common_pb2.WeightManifest, memoryview]:
    """The weights of a checkpoint's directory, or of the models themselves where `checkpoint` is empty.

    Raises ServiceError MODEL_NOT_READABLE, also where they are not those of `digest` (empty: not compared).
    """
    config, models = run.model, dict[str, tuple[nn.Module, torch.dtype]]()
    try:
        if (policy := policy_of(config)) is not None:
            models[""] = initial_policy(config, run.seed), policy_type(policy, config)
        else:
            sections = {name: policy_model(config, section) for name, section in sorted(run.policies.items())}
            for name, section in {"": config, **sections}.items():
                models[name] = load_model(section, weights=not checkpoint), DTYPES[section.dtype]
        if checkpoint:
            _load_checkpoint({name: model for name, (model, _) in models.items()}, Path(checkpoint))
    except ModelNotReadable as error:
        raise _unreadable(str(error)) from error
    manifest, body = _body(models)
    if digest and manifest.digest != digest:
        raise _unreadable(
            f"checkpoint: the weights in {checkpoint or config.path} have digest {manifest.digest}, not {digest}: "
            "they are damaged, or model.dtype is not the run's; take another checkpoint"
        )
    return manifest, body


def _load_checkpoint(models: Mapping[str, nn.Module], directory: Path) -> None:
    """One tensor at a time: the whole is in memory once, in the models' types."""
    try:
        files = sorted(directory.glob(CHECKPOINT_WEIGHTS))
        if not files:
            raise FileNotFoundError(f"no {CHECKPOINT_WEIGHTS} is there")
        tensors = TensorFiles(files)
        for name, model in models.items():
            read_weights(model, _OfPolicy(tensors, name))
    except (OSError, SafetensorError, TornTensor) as error:
        message = (
            f"checkpoint: {directory} cannot be read: {error}; it may have been pruned: take a newer one"
        )
        raise _unreadable(message) from error
    except ValueError as error:
        raise _unreadable(f"checkpoint: {directory}: {error}; give the model of the run") from error


class _OfPolicy(Tensors):
    """Those of one policy of a run that may have several, by their own names."""

    def __init__(self, tensors: Tensors, policy: str) -> None:
        self._tensors, self._policy = tensors, policy

    @override
    def names(self) -> Iterable[str]:
        found = map(own_name, self._tensors.names())
        return [name for policy, name in found if policy == self._policy]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(below(self._policy, name))

    @override
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return self._tensors.read(below(self._policy, name), box)


def _body(
    models: Mapping[str, tuple[nn.Module, torch.dtype]],
) -> tuple[common_pb2.WeightManifest, memoryview]:
    layout = [
        (below(policy, name), _DATA_TYPES[kind], shape)
        for policy, (model, dtype) in models.items()
        for name, kind, shape in weight_layout(model, dtype)
    ]
    entries = entries_of(layout)
    body = memoryview(bytearray(sum(entry.size_bytes for entry in entries)))
    for entry in entries:
        policy, name = own_name(entry.name)
        with body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes] as part:
            if entry.size_bytes:
                copy_out(models[policy][0], name, part, models[policy][1])
            entry.digest = digest_bytes(part)
    manifest = common_pb2.WeightManifest(
        entries=entries, digest=manifest_digest(entries), size_bytes=len(body)
    )
    return manifest, body


def _unreadable(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "MODEL_NOT_READABLE", message)
