"""LoRA (arXiv 2106.09685): adapters of low rank beside frozen linear layers, without dropout.

A layer computes with W + alpha/R · B A, rounded once to the type of W: the very weight that is published. So engine and
trainer agree in every step, also where the type is bf16 and a change of W is smaller than its rounding. An adapter's
gradient needs products with A and B alone; that of W is never made. Adapters are written as peft writes them, without
peft. Knows no sharding and no optimizer.

Shapes: N positions, O outputs, I inputs of a layer, R rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from headrace_schema.problems import choose
from headrace_schema.sections.learning import LoraSection
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace_modelkit.experts import expert_blocks
from headrace_modelkit.loading import sync_directory

EXPERT_NAMES = frozenset({"experts", "gate", "gate_up_proj", "gate_proj", "up_proj", "down_proj"})
"""What layers of experts and their routers are called."""
A, B = "lora_A", "lora_B"
"""Names of a layer's adapter, beside its `weight`."""
BLOCK_ELEMENTS = 1 << 20
"""Elements of a weight that are merged at a time: what exists of it in fp32."""

Adapter = tuple[Tensor, Tensor] | None
"""(A_RI, B_OR); none: the layer computes with its own weight alone."""


class LoraLinear(nn.Linear):
    """A linear layer that shares the frozen weight and bias of another one, with an adapter in fp32."""

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        scale: float,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        device = device or base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        if device.type != "meta":
            bound = base.in_features**-0.5  # as nn.Linear draws its own, and peft this one
            self.lora_A.data.uniform_(-bound, bound, generator=generator)
        self._stand_ins: list[Adapter] = []

    def forward(self, x: Tensor) -> Tensor:
        """(…, O) of (…, I)."""
        adapter = self._stand_ins[-1] if self._stand_ins else (self.lora_A, self.lora_B)
        if adapter is None:
            return F.linear(x, self.weight, self.bias)
        function: Any = _MergedLinear
        found: Tensor = function.apply(x, self.weight, self.bias, *adapter, self.scale)
        return found


class _MergedLinear(torch.autograd.Function):
    """A linear function with the merged weight, which is computed anew in each forward and not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        return F.linear(x, merged_weight(weight_OI, a_RI, b_OR, scale), bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI, a_RI, b_OR = ctx.saved_tensors
        upstream_NO = upstream.flatten(0, -2)
        wide_NO, x_NI = upstream_NO.float(), x.flatten(0, -2).float()
        through_NR = (wide_NO @ b_OR).mul_(ctx.scale)
        of_a_RI = through_NR.T @ x_NI
        of_b_OR = (wide_NO.T @ (x_NI @ a_RI.T)).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            low_NI = (through_NR @ a_RI).to(x.dtype)
            of_x = torch.addmm(low_NI, upstream_NO, weight_OI).view_as(x)
        return of_x, None, None, of_a_RI, of_b_OR, None


def merged_weight(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W + scale · B A in the type of W: added up in fp32, a block of rows at a time, and rounded once."""
    found_OI = torch.empty_like(weight_OI)
    size = max(1, BLOCK_ELEMENTS // weight_OI.shape[1])
    for first in range(0, len(weight_OI), size):
        rows = slice(first, first + size)
        found_OI[rows] = torch.addmm(weight_OI[rows].float(), b_OR[rows], a_RI, alpha=scale)
    return found_OI


def add_adapters(
    model: PreTrainedModel, lora: LoraSection, seed: int, device: torch.device | None = None
) -> None:
    """Freezes `model` and gives the targeted layers adapters: A is drawn from `seed`, B is 0.

    They are where their layers are, or on `device`: those of a model on meta have values elsewhere only.

    Raises ValueError for a target that the model has not.
    """
    if problem := targets_problem(model, lora):
        raise ValueError(problem)
    model.requires_grad_(False)
    generator = torch.Generator("cpu").manual_seed(seed)
    for name in _targeted(model, lora):
        owner, _, attribute = name.rpartition(".")
        holder = model.get_submodule(owner)
        layer = LoraLinear(getattr(holder, attribute), lora.rank, lora.alpha / lora.rank, generator, device)
        setattr(holder, attribute, layer)


def targets_problem(model: PreTrainedModel, lora: LoraSection) -> str:
    """What is wrong with the targets for this model, with the fix; empty: nothing."""
    names = _linear_layers(model)
    if not names:
        return "the model has no linear layer but its head; remove trainer.lora"
    if isinstance(lora.targets, str):
        return ""
    for target in lora.targets:
        if not any(_is(name, target) for name in names):
            if target.rpartition(".")[2] in EXPERT_NAMES and any(True for _ in expert_blocks(model)):
                return (
                    f"{target!r} is of experts, which get no adapter: they and their routers stay frozen; name layers "
                    f"of the attention, such as q_proj, or write all-linear"
                )
            fix = choose(target, {name.rpartition(".")[2] for name in names})
            return f"no linear layer of the model is called {target!r} (the head gets no adapter); {fix}"
    return ""


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Name and layer of everything that has an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a tensor of the model is part of an adapter, and no weight of the model itself."""
    return name.rpartition(".")[2] in (A, B)


@contextmanager
def standing_in(model: nn.Module, adapters: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model computes with these adapters in place of its own; with none where there are none."""
    layers = list(adapted_layers(model))
    for name, layer in layers:
        layer._stand_ins.append((adapters[f"{name}.{A}"], adapters[f"{name}.{B}"]) if adapters else None)
    try:
        yield
    finally:
        for _, layer in layers:
            layer._stand_ins.pop()


def _targeted(model: PreTrainedModel, lora: LoraSection) -> list[str]:
    names = _linear_layers(model)
    if isinstance(lora.targets, str):
        return names
    return [name for name in names if any(_is(name, target) for target in lora.targets)]


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all but the head, which computes log-probs a tile at a time."""
    untyped: Any = model
    head = untyped.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    ]


def _is(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def save_adapter(directory: Path, lora: LoraSection, adapters: Mapping[str, Tensor], base: str) -> None:
    """Writes the adapters of a model, by the names that its layers give them, into a new directory.

    `base` is where the model below them was read from.
    """
    directory.mkdir()
    save_file(
        {_peft_name(name): tensor.contiguous() for name, tensor in adapters.items()},
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        # Whole names: the last part of one may be that of the head or of a layer without adapter too.
        "target_modules": sorted({name.rpartition(".")[0] for name in adapters}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    sync_directory(directory)


def _peft_name(name: str) -> str:
    layer, _, part = name.rpartition(".")
    assert part in (A, B)
    return f"base_model.model.{layer}.{part}.weight"
