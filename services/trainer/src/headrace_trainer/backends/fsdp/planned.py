"""Bytes of a rank's shards, copies and sums, from the models' shapes alone. Loads no weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from headrace_modelkit.critic import critic_section, load_critic
from headrace_modelkit.loading import DTYPES, load_model
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from torch import nn

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.memory import MemoryPlan, kept_bytes

FP32 = 4
MOMENTS_BYTES = 2 * FP32


def plan_memory(
    config: TrainerConfig, algorithm: Algorithm, ranks: int, *, reshard: bool, on_gpu: bool
) -> MemoryPlan:
    """The leader's, which alone keeps groups; the others need what is left. Raises ModelNotReadable."""
    learned = _learned(config, algorithm)
    shard = -(-learned // ranks)
    width = DTYPES[config.model.dtype].itemsize
    device = {
        "masters": shard * FP32,
        "moments": shard * MOMENTS_BYTES,
        "gradients": (shard if reshard else learned) * FP32,
        # A single rank computes with its fp32 masters themselves.
        "gathered weights": 0 if reshard or (ranks == 1 and width == FP32) else learned * width,
        "reference": _reference_bytes(config, algorithm, ranks),
    }
    host = {
        "hold": shard * (FP32 + MOMENTS_BYTES) if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm),
    }
    if not on_gpu:
        return MemoryPlan(device | host, {})
    # Between the infer rounds that use it, a reference lies in host memory.
    return MemoryPlan(host | {"reference": device["reference"]}, device)


def _learned(config: TrainerConfig, algorithm: Algorithm) -> int:
    """Weights that learn: the policy's and its critic's."""
    with torch.device("meta"):
        policy = load_model(config.model, weights=False)
        found = _count([policy])
        plan = algorithm.critic
        if plan is not None and plan.own_model:
            critic = load_critic(critic_section(config.model, plan.path), weights=False)
            found += _count([critic])
    return found


def _reference_bytes(config: TrainerConfig, algorithm: Algorithm, ranks: int) -> int:
    """Of one rank's shards of the reference, in its own type; 0 without one."""
    if REFERENCE_LOG_PROBS not in algorithm.columns:
        return 0
    section: ModelSection = config.trainer.reference or config.model
    with torch.device("meta"):
        weights = _count([load_model(section, weights=False)])
    return -(-weights // ranks) * DTYPES[section.dtype].itemsize


def _count(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
