"""LoRA (arXiv 2106.09685): adapters of low rank beside frozen linear layers and layers of experts, without dropout.

A layer gives W x + alpha/R · B (A x): two thin products beside the frozen one, in the type of x. What is published is
W + alpha/R · B A, rounded once to the type of W; with `compute_merged`, and in a model that `make_invariant` was
given, a layer computes with that very weight, made anew in each forward, so that an engine's log-probs are the
trainer's to the last bit.
Either way an adapter's gradient needs products with A and B alone; that of W is never made. Knows no sharding and no
optimizer.

Shapes: N positions, O outputs, I inputs of a layer, R rank; E experts, S rows in the order of their experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from headrace_schema.problems import choose
from headrace_schema.sections.learning import LoraSection
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace_modelkit.experts import ADAPTER, PROJECTIONS, grouped_product
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.invariant import is_invariant
from headrace_modelkit.products import fixed_products, row_products
from headrace_modelkit.quantized import QuantizedWeight, product
from headrace_modelkit.vision import vision_tower

EXPERTS = "experts"
"""What a layer of experts is called: as a target, both of its tensors."""
A, B = "lora_A", "lora_B"
"""Names of a layer's adapter, beside its `weight`; of experts', in a module of its own beside theirs."""
BLOCK_ELEMENTS = 1 << 20
"""Elements of a weight that are merged at a time: what exists of it in fp32."""

_ALIGNED = 8
"""Elements of bfloat16 in 16 bytes."""
Adapter = tuple[Tensor, Tensor] | None
"""(A_RI, B_OR), of experts (A_ERI, B_EOR); none: the layer computes with its own weight alone."""


class Adapted(nn.Module):
    """What has an adapter: a linear layer, or what stands beside a tensor of experts."""

    scale: float
    merged: bool = False
    """Whether it computes with the weight that is published."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    _stand_ins: list[Adapter]

    def _give(self, a: Tensor, b: Tensor, scale: float, generator: torch.Generator) -> None:
        """A is drawn as nn.Linear draws its own weight, and peft this one; B is 0."""
        self.scale, self._stand_ins = scale, []
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        if a.device.type != "meta":
            bound = a.shape[-1] ** -0.5
            self.lora_A.data.uniform_(-bound, bound, generator=generator)

    @property
    def adapter(self) -> Adapter:
        """What it computes with now."""
        return self._stand_ins[-1] if self._stand_ins else (self.lora_A, self.lora_B)


class LoraLinear(nn.Linear, Adapted):
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
        self.quantized: QuantizedWeight | None = None
        """What stands for the weight; that is a buffer without elements then."""
        place: Any = {"dtype": torch.float32, "device": device or base.weight.device}
        a_RI = torch.empty(rank, base.in_features, **place)
        self._give(a_RI, torch.zeros(base.out_features, rank, **place), scale, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(…, O) of (…, I)."""
        adapter = self.adapter
        fixed = is_invariant(self)
        if adapter is None:
            return self._frozen(x) if not fixed else row_products(x, self.weight, self.bias)
        if self.merged or fixed:
            function: Any = _MergedLinear
            found: Tensor = function.apply(x, self.weight, self.bias, *adapter, self.scale, fixed)
            return found
        a_RI, b_OR = (part.to(x.dtype) for part in adapter)
        x_NI = x.reshape(-1, x.shape[-1])
        low_NR = F.linear(x_NI, a_RI)
        # Into the product that is there: nothing of its size is made besides.
        found_NO = self._frozen(x_NI).addmm_(low_NR, b_OR.T, alpha=self.scale)
        return found_NO.view(*x.shape[:-1], -1)

    def _frozen(self, x: Tensor) -> Tensor:
        if self.quantized is not None:
            return product(x, self.quantized, self.bias)
        return F.linear(x, self.weight, self.bias)


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
        fixed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        multiply = fixed_products if fixed else F.linear
        return multiply(x, merged_weight(weight_OI, a_RI, b_OR, scale), bias_O)

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
        return of_x, None, None, of_a_RI, of_b_OR, None, None


class LoraExperts(Adapted):
    """An adapter in fp32 for each expert of a layer, beside one frozen tensor (E, O, I) of all of them."""

    def __init__(
        self,
        weight_EOI: Tensor,
        rank: int,
        scale: float,
        generator: torch.Generator,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        experts, outputs, inputs = weight_EOI.shape
        place: Any = {"dtype": torch.float32, "device": device or weight_EOI.device}
        a_ERI = torch.empty(experts, rank, inputs, **place)
        self._give(a_ERI, torch.zeros(experts, outputs, rank, **place), scale, generator)

    def forward(self, rows_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        """(S, O); `ends_E` as in `grouped_product`."""
        adapter, fixed = self.adapter, is_invariant(self)
        if adapter is None:
            return grouped_product(rows_SI, weight_EOI, ends_E, fixed=fixed)
        if self.merged or fixed:
            function: Any = _MergedExperts
            found: Tensor = function.apply(rows_SI, weight_EOI, ends_E, *adapter, self.scale, fixed)
            return found
        a_ERI, b_EOR = (part.to(rows_SI.dtype) for part in adapter)
        if short := -a_ERI.shape[1] % _ALIGNED:  # the kernel's rows begin at whole 16 bytes
            a_ERI, b_EOR = F.pad(a_ERI, (0, 0, 0, short)), F.pad(b_EOR, (0, short))
        low_SR = grouped_product(rows_SI, a_ERI, ends_E)
        found_SO = grouped_product(rows_SI, weight_EOI, ends_E)
        return found_SO.add(grouped_product(low_SR, b_EOR, ends_E), alpha=self.scale)


class _MergedExperts(torch.autograd.Function):
    """As `_MergedLinear`, of experts: the gradient is that of the product with A and then with B."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_SI: Tensor,
        weight_EOI: Tensor,
        ends_E: Tensor,
        a_ERI: Tensor,
        b_EOR: Tensor,
        scale: float,
        fixed: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows_SI, weight_EOI, ends_E, a_ERI, b_EOR)
        ctx.scale = scale
        merged_EOI = merged_weight(weight_EOI, a_ERI, b_EOR, scale)
        return grouped_product(rows_SI, merged_EOI, ends_E, fixed=fixed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_SO: Tensor) -> tuple[Tensor | None, ...]:
        rows_SI, weight_EOI, ends_E, a_ERI, b_EOR = ctx.saved_tensors
        # On a GPU in bf16, for which it has one kernel: of fp32 it would be one for each expert.
        kind = torch.float32 if rows_SI.device.type == "cpu" else rows_SI.dtype
        own = [each.detach().to(kind).requires_grad_() for each in (rows_SI, a_ERI, b_EOR)]
        with torch.enable_grad():
            low_SO = grouped_product(grouped_product(own[0], own[1], ends_E), own[2], ends_E)
        of_low, of_a, of_b = torch.autograd.grad(low_SO, own, upstream_SO.to(kind))
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_product(upstream_SO, weight_EOI.transpose(-2, -1), ends_E)
            of_rows = of_rows.add_(of_low.to(of_rows.dtype), alpha=ctx.scale)
        return of_rows, None, None, of_a.float().mul_(ctx.scale), of_b.float().mul_(ctx.scale), None, None


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A in the type of W: added up in fp32, a block of rows at a time, and rounded once.

    Of experts: W (E, O, I), B (E, O, R) and A (E, R, I), each expert's with its own.
    """
    found = torch.empty_like(weight)
    if weight.dim() == 2:
        _merge(found, weight, a, b, scale)
        return found
    for expert in range(len(weight)):
        _merge(found[expert], weight[expert], a[expert], b[expert], scale)
    return found


def _merge(found_OI: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
    size = max(1, BLOCK_ELEMENTS // weight_OI.shape[1])
    for first in range(0, len(weight_OI), size):
        rows = slice(first, first + size)
        found_OI[rows] = torch.addmm(weight_OI[rows].float(), b_OR[rows], a_RI, alpha=scale)


def add_adapters(
    model: nn.Module,
    lora: LoraSection,
    seed: int,
    device: torch.device | None = None,
    *,
    vision: bool = False,
) -> None:
    """Freezes `model` and gives the targeted layers adapters: A is drawn from `seed`, B is 0. What is frozen already
    gets none.

    `vision`: layers of a vision tower are among those that a target names. They are where their layers are, or on
    `device`: those of a model on meta have values elsewhere only.

    Raises ValueError for a target that the model has not.
    """
    if problem := targets_problem(model, lora, vision=vision):
        raise ValueError(problem)
    generator = torch.Generator("cpu").manual_seed(seed)
    scale = lora.alpha / lora.rank
    targeted, of_experts = _targeted(model, lora, vision=vision), _targeted_experts(model, lora)
    model.requires_grad_(False)
    for name in targeted:
        owner, _, attribute = name.rpartition(".")
        holder = model.get_submodule(owner)
        layer = LoraLinear(getattr(holder, attribute), lora.rank, scale, generator, device)
        setattr(holder, attribute, layer)
    for name in of_experts:
        owner, _, attribute = name.rpartition(".")
        experts = model.get_submodule(owner)
        beside = LoraExperts(getattr(experts, attribute), lora.rank, scale, generator, device)
        setattr(experts, f"{attribute}{ADAPTER}", beside)


def quantize_frozen(model: nn.Module, form: str) -> None:
    """Linear layers with an adapter keep their frozen weights as codes from now on, which are to be filled."""
    for _, layer in adapted_layers(model):
        if isinstance(layer, LoraLinear):
            layer.quantized = QuantizedWeight(layer.weight, form)
            del layer.weight
            layer.register_buffer("weight", torch.empty(0, dtype=layer.quantized.dtype))


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Those of `quantize_frozen`, by the names of the weights."""
    found = ((name, getattr(layer, "quantized", None)) for name, layer in adapted_layers(model))
    return {f"{name}.weight": own for name, own in found if own is not None}


def targets_problem(model: nn.Module, lora: LoraSection, *, vision: bool = False) -> str:
    """What is wrong with the targets for this model, with the fix; empty: nothing. `vision` as in `add_adapters`."""
    names = _linear_layers(model, vision=vision)
    if not names:
        return "the model has no linear layer that learns but its head; remove trainer.lora"
    if isinstance(lora.targets, str):
        return ""
    tensors = _expert_tensors(model)
    for target in lora.targets:
        if any(_is(name, target) for name in names) or any(_is_of_experts(name, target) for name in tensors):
            continue
        if any(_is_of_experts(name, target) for name in _expert_tensors(model, known=False)):
            return (
                f"{target!r} is of experts, which get an adapter where they have gate_up_proj and down_proj without "
                "bias: this model's have not; name layers of the attention, such as q_proj, or write all-linear"
            )
        there = {name.rpartition(".")[2] for name in [*names, *tensors]} | ({EXPERTS} if tensors else set())
        beside = ", nor do routers of experts; their gate and up are one tensor" if tensors else ""
        fix = choose(target, there)
        return f"no linear layer of the model is called {target!r} (the head gets no adapter{beside}); {fix}"
    return ""


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Name and module of everything that has an adapter: linear layers, and what stands beside tensors of experts."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def compute_merged(model: nn.Module) -> None:
    """Lets everything that has an adapter compute with its merged weight, to the bits that are published."""
    for _, layer in adapted_layers(model):
        layer.merged = True


def adapter_of(weight: str) -> str:
    """The name that `adapted_layers` gives what has the adapter of a weight, if it has one; empty for a bias."""
    layer, _, kind = weight.rpartition(".")
    if kind in PROJECTIONS:
        return f"{weight}{ADAPTER}"
    return layer if kind == "weight" else ""


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


def _targeted(model: nn.Module, lora: LoraSection, *, vision: bool) -> list[str]:
    names = _linear_layers(model, vision=vision)
    if isinstance(lora.targets, str):
        return names
    return [name for name in names if any(_is(name, target) for target in lora.targets)]


def _targeted_experts(model: nn.Module, lora: LoraSection) -> list[str]:
    if isinstance(lora.targets, str):
        return []
    names = _expert_tensors(model)
    return [name for name in names if any(_is_of_experts(name, target) for target in lora.targets)]


def _expert_tensors(model: nn.Module, *, known: bool = True) -> list[str]:
    """Names of what has the weights of a layer's experts; `known`: of models whose experts `experts` computes."""
    if not isinstance(model, PreTrainedModel):
        return []
    shape = expert_shape(model.config)
    if known and (shape is None or not shape.adapts):
        return []
    modules = {module: name for name, module in model.named_modules()}
    of_experts = [module for module in modules if "experts" in type(module).__name__.lower()]
    return [f"{modules[each]}.{name}" for each in of_experts for name in PROJECTIONS if hasattr(each, name)]


def _is_of_experts(name: str, target: str) -> bool:
    return _is(name, target) or _is(name.rpartition(".")[0], target)


def _linear_layers(model: nn.Module, *, vision: bool) -> list[str]:
    """Names of all that learn but the head, which computes log-probs a tile at a time, and, without `vision`, a vision
    tower's.
    """
    left_out = {getattr(model, "get_output_embeddings", lambda: None)()}
    # A subclass with a forward of its own, such as Llama 4's router, is no linear layer.
    if not vision and (tower := vision_tower(model)) is not None:
        left_out |= {*tower.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module not in left_out
        and module.weight.requires_grad
    ]


def _is(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
