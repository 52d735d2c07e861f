"""Bytes of a rank's shards, copies and sums, from the models' shapes alone. Loads no weight."""

from __future__ import annotations

import torch
from headrace_modelkit.critic import critic_section, load_critic
from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.lora import add_adapters
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
    learned, frozen = _weights(config, algorithm)
    shard = -(-learned // ranks)
    width = DTYPES[config.model.dtype].itemsize
    if frozen:  # Adapters are computed with in fp32; one rank computes with the frozen weights themselves.
        gathered = learned * FP32 + (frozen * width if ranks > 1 else 0)
    else:  # A single rank computes with its fp32 masters themselves.
        gathered = 0 if ranks == 1 and width == FP32 else learned * width
    device = {
        "masters": shard * FP32,
        "moments": shard * MOMENTS_BYTES,
        "gradients": (shard if reshard else learned) * FP32,
        "frozen weights": -(-frozen // ranks) * width,
        "gathered weights": 0 if reshard else gathered,
        "reference": _reference_bytes(config, algorithm, ranks, learned if frozen else 0),
    }
    host = {
        "hold": shard * (FP32 + MOMENTS_BYTES) if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm),
    }
    if not on_gpu:
        return MemoryPlan(device | host, {})
    # Between the infer rounds that use it, a reference lies in host memory.
    return MemoryPlan(host | {"reference": device["reference"]}, device)


def _weights(config: TrainerConfig, algorithm: Algorithm) -> tuple[int, int]:
    """How many weights learn, the policy's and its critic's, and how many are frozen."""
    with torch.device("meta"):
        modules: list[nn.Module] = [policy := load_model(config.model, weights=False)]
        if config.trainer.lora is not None:
            add_adapters(policy, config.trainer.lora, config.seed)
        plan = algorithm.critic
        if plan is not None and plan.own_model:
            modules.append(load_critic(critic_section(config.model, plan.path), weights=False))
    weights = [weight for module in modules for weight in module.parameters()]
    learned = sum(weight.numel() for weight in weights if weight.requires_grad)
    return learned, sum(weight.numel() for weight in weights) - learned


def _reference_bytes(config: TrainerConfig, algorithm: Algorithm, ranks: int, adapters: int) -> int:
    """Of one rank's shards of the reference, in its own type; 0 without one. With `adapters`, so many, the policy is
    its own reference: it takes the ones of the warm-up, if there was one.
    """
    if REFERENCE_LOG_PROBS not in algorithm.columns:
        return 0
    if adapters and config.trainer.reference is None:
        return adapters * FP32 if config.trainer.warmup.steps else 0
    section: ModelSection = config.trainer.reference or config.model
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in load_model(section, weights=False).parameters())
    return -(-weights // ranks) * DTYPES[section.dtype].itemsize
