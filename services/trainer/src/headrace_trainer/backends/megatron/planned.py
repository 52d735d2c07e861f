"""What a rank of the megatron backend needs of memory, by the models' shapes. Loads nothing."""

from __future__ import annotations

import math

from headrace_modelkit.loading import DTYPES
from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.fsdp.planned import FP32, MOMENTS_BYTES
from headrace_trainer.backends.megatron.architecture import Architecture, read_architecture
from headrace_trainer.backends.megatron.layout import Layout
from headrace_trainer.memory import MemoryPlan, kept_bytes


def plan_memory(config: TrainerConfig, algorithm: Algorithm, layout: Layout, *, on_gpu: bool) -> MemoryPlan:
    """The leader's, which alone keeps groups: a share of the model at least. Raises ModelNotReadable."""
    own = _share(read_architecture(config.model), layout)
    slice_ = -(-own // (layout.replicas * layout.context))
    width = DTYPES[config.model.dtype].itemsize
    reference = config.trainer.reference or config.model
    frozen = 0
    if REFERENCE_LOG_PROBS in algorithm.columns:
        frozen = _share(read_architecture(reference, "trainer.reference.path"), layout)
    device = {
        "weights": own * width,
        # A model in fp32 computes with its masters themselves.
        "masters": 0 if width == FP32 else slice_ * FP32,
        "moments": slice_ * MOMENTS_BYTES,
        "gradients": (own + slice_) * FP32,
        "reference": frozen * DTYPES[reference.dtype].itemsize,
    }
    host = {
        "hold": slice_ * (FP32 + MOMENTS_BYTES) if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm),
    }
    if not on_gpu:
        return MemoryPlan(device | host, {})
    # Between the infer rounds that use it, a reference lies in host memory.
    return MemoryPlan(host | {"reference": device["reference"]}, device)


def _share(architecture: Architecture, layout: Layout) -> int:
    """Weights of one rank, were they divided evenly over tensor and pipeline ranks."""
    whole = sum(map(math.prod, architecture.shapes.values()))
    return -(-whole // (layout.tensor * layout.pipeline))
