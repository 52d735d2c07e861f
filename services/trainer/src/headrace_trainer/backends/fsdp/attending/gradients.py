"""Whether a model's gradient is right in the two ways that no log-prob shows, tried on one short answer.

Layers that are computed again in the backward pass must give the gradient that they give at once; and every adapter
must get one, or its layer is computed past it. Knows no forms of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import torch
from headrace_modelkit.experts import ADAPTER
from headrace_modelkit.lora import B
from transformers import PreTrainedModel

from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch

OFF = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""By how much of its size a gradient may change; sums in another order move it by 1e-6 and 0.01."""


def check_gradient(
    path: str, model: ShardedModel, bodies: Many[PreTrainedModel], ranks: TrainerGroup, batch: MicroBatch
) -> str:
    """A note for the run's user, empty where all is right. All ranks call it with the same tokens.

    Raises Refusal INVALID where layers that are computed again give another gradient.
    """
    again: list[Any] = [body for body in bodies if body.is_gradient_checkpointing]
    adapters = [name for name in model.learned if name.endswith(f".{B}") and ADAPTER not in name]
    if not again and not adapters:
        return ""
    found = _sketch(model, ranks, batch)
    if again:
        try:
            for body in again:
                body.gradient_checkpointing_disable()
            at_once = _sketch(model, ranks, batch)
        finally:
            for body in again:
                body.gradient_checkpointing_enable({"use_reentrant": False})
        off = _apart(found, at_once)
        if off > OFF[again[0].dtype if again[0].dtype in OFF else torch.bfloat16]:
            raise invalid(
                f"model.path: {path!r} gives another gradient where layers are computed again in the backward pass, by "
                f"{off:.1%} of its size; set trainer.gradient_checkpointing: false, with more ranks or a smaller "
                "trainer.micro_batch_tokens, or use a model of another family",
                key="model.path",
            )
    idle = sorted(name.removesuffix(f".{B}") for name in adapters if not found[name][0])
    if not idle:
        return ""
    return (
        f"{len(idle)} of {len(adapters)} adapters get no gradient, first that of {idle[0]}: its layer is not computed, "
        "or from its weight alone; leave it out of trainer.lora.targets"
    )


Sketch = dict[str, tuple[float, float]]
"""Of each parameter's gradient the squared norm, and its elements added up with alternating signs, over all ranks."""


def _sketch(model: ShardedModel, ranks: TrainerGroup, batch: MicroBatch) -> Sketch:
    policy: Any = model.policy
    anchor = torch.zeros((), device=ranks.device)
    found = policy(batch, anchor, values=policy.critic is not None)
    loss = (
        found.log_probs_K.sum() if found.values_K is None else found.log_probs_K.sum() + found.values_K.sum()
    )
    torch.autograd.backward(loss)
    model.finish_backward()
    sums: dict[str, float] = {}
    for name, shard in model.gradients().items():
        flat = shard.detach().float().flatten()
        sums[f"{name} norm"] = float(flat.square().sum())
        sums[f"{name} signed"] = float(flat[::2].sum() - flat[1::2].sum())
    model.drop_gradients()
    model.release()
    total = ranks.sum(sums)
    return {name: (total[f"{name} norm"], total[f"{name} signed"]) for name in model.learned}


def _apart(one: Sketch, other: Sketch) -> float:
    size = math.sqrt(sum(norm for norm, _ in other.values()))
    norms = math.sqrt(sum((math.sqrt(one[name][0]) - math.sqrt(other[name][0])) ** 2 for name in other))
    signed = math.sqrt(sum((one[name][1] - other[name][1]) ** 2 for name in other))
    # Signed sums of elements that differ by chance are as large as their norm.
    return max(norms, signed) / max(size, 1e-12)
