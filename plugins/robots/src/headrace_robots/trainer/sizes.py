"""What a memory plan needs to know of a large robot policy. Loads no weight, knows no layout.

A whole pass computes on torch's fake tensors, and what autograd keeps of it is counted, layer by layer.
Shapes as in `modelkit`'s robot policies.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from headrace_modelkit.lora import compute_merged
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends.fsdp.layouts.sizes import (
    Sizes,
    attend_by_flash,
    largest_two,
    root_of,
    unit_of,
    widest_adapted,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from headrace_robots.policies.directory import adapt, empty_policy, freeze, layers_of_policy, policy_type

if TYPE_CHECKING:
    from headrace_robots.policies.policy import RobotPolicy

WORDS = 32
"""Ids of an instruction: how many there are, a run only knows by its tasks."""
_ATTENTION = "headrace_planned_robot"


def robot_sizes(config: TrainerConfig, algorithm: Algorithm) -> Sizes:
    """Those of a run's policy, whatever the algorithm. Raises ModelNotReadable."""
    policy = empty_policy(config.model)
    freeze(policy, config.trainer.freeze or [])
    if config.trainer.lora is not None:
        adapt(policy, config.trainer.lora, config.seed)
        if config.deterministic:
            compute_merged(policy)
    with FakeTensorMode() as mode:
        _fake(policy, mode)
        layers, chunks = layers_of_policy(policy), chunks_of(policy, config.trainer.micro_batch_tokens)
        kept, inputs, calls = _activations(policy, layers, chunks)
        units = [
            replace(unit_of(layer), kept=kept[layer], inputs=inputs[layer], calls=max(1, calls[layer]))
            for layer in layers
        ]
        width = policy_type(policy.config, config.model).itemsize
        return Sizes(
            units=(*units, root_of([policy], units, kept=kept[policy])),
            head=0,
            tile=0,
            reference=0,
            tensors=largest_two(policy),
            merged=0,
            widened=chunks * (policy.chunk_tokens + WORDS) * widest_adapted(policy)
            if config.deterministic
            else 0,
            root_bytes=4 if config.trainer.lora else width,
            answers=False,
        )


def chunks_of(policy: RobotPolicy, tokens: int) -> int:
    """Number of chunks in a micro-batch of this number of tokens."""
    return max(1, tokens // (policy.chunk_tokens + WORDS))


def _fake(policy: nn.Module, mode: FakeTensorMode) -> None:
    """Gives it fake weights, as ranks compute with between a gather and the next: all whole."""
    for module in policy.modules():
        for name, own in module.named_parameters(recurse=False):
            made = torch.empty(own.shape, dtype=own.dtype, device="cpu")
            setattr(module, name, nn.Parameter(made, own.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = mode.from_tensor(buffer)


def _activations(
    policy: RobotPolicy, layers: list[nn.Module], chunks: int
) -> tuple[Counter[nn.Module], Counter[nn.Module], Counter[nn.Module]]:
    """Of each layer, and of the policy for what is in none: bytes that autograd keeps, bytes of inputs, and passes."""
    own = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    held: dict[int, Tensor] = {}
    kept: Counter[nn.Module] = Counter()
    inputs: Counter[nn.Module] = Counter()
    calls: Counter[nn.Module] = Counter()
    inside: list[nn.Module] = [policy]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in held:
            held[storage._cdata] = tensor  # it must live, so that no other storage gets its address
            kept[inside[-1]] += storage.nbytes()
        return tensor

    def enter(layer: nn.Module, given: tuple[Any, ...]) -> None:
        inside.append(layer)
        calls[layer] += 1
        inputs[layer] += given[0].nbytes

    def leave(layer: nn.Module, given: tuple[Any, ...], found: Any) -> None:
        inside.pop()

    _attend_as_on_a_gpu(policy)
    observation, sampled = policy.example(chunks, WORDS)
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(enter).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        policy.evaluate(observation, sampled)
    for layer in layers:
        if not kept[layer]:  # nothing before it or in it learns
            inputs[layer] = 0
    return kept, inputs, calls


def _attend_as_on_a_gpu(policy: nn.Module) -> None:
    """Its kernels keep queries, keys and values; where there is a mask, as here, of as many heads as queries have."""
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    for module in policy.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = _ATTENTION


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    times = query.shape[1] // key.shape[1]
    return attend_by_flash(
        module, query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), mask, **options
    )
