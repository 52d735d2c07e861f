"""Adapters beside frozen linear layers: which layers get one, what they compute, their gradient, peft's format."""

from __future__ import annotations

import math

import pytest
import torch
from headrace_modelkit.experts import grouped_product
from headrace_modelkit.lora import (
    BLOCK_ELEMENTS,
    LoraExperts,
    LoraLinear,
    adapted_layers,
    add_adapters,
    compute_merged,
    is_adapter,
    merged_weight,
    standing_in,
    targets_problem,
)
from headrace_modelkit.presets.families import tiny_of
from headrace_modelkit.presets.tiny import tiny_model, tiny_moe
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.learning import LoraSection
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes anew, inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        own = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage()._cdata not in own:
            self.elements = max(self.elements, found.numel())
        return found


def adapted(dtype=torch.float32, **lora):
    """A tiny model whose adapters have left 0."""
    model = tiny_model().to(dtype)
    add_adapters(model, LoraSection(**lora), seed=3)
    for _, layer in adapted_layers(model):
        layer.lora_B.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return model


def test_all_linear_layers_but_the_head_get_an_adapter_and_nothing_else_learns():
    model = adapted()
    names = [name.rpartition(".")[2] for name, _ in adapted_layers(model)]
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(names) == kinds and len(names) == 2 * len(kinds)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learns == {name for name, _ in state_tensors(model) if is_adapter(name)} and len(learns) == 28
    own = {name for name, _ in state_tensors(tiny_model())}
    assert {name for name, _ in state_tensors(model)} - learns == own, "weights keep their names"


def test_a_tied_head_gets_none_and_stays_tied():
    model = tiny_model(tie_word_embeddings=True)
    add_adapters(model, LoraSection(), seed=0)
    assert not isinstance(model.lm_head, LoraLinear)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("targets", "layers"),
    [(["q_proj", "v_proj"], 4), (["layers.1.mlp.up_proj"], 1), (["model.layers.0.self_attn.k_proj"], 1)],
)
def test_targets_are_names_or_their_ends(targets, layers):
    assert len(list(adapted_layers(adapted(targets=targets)))) == layers


@pytest.mark.parametrize(
    ("target", "words"),
    [("q_porj", "did you mean q_proj?"), ("lm_head", "the head gets no adapter"), ("proj", "down_proj")],
)
def test_a_target_that_the_model_has_not_is_told_with_what_there_is(target, words):
    section = LoraSection(targets=["q_proj", target])
    problem = targets_problem(tiny_model(), section)
    assert repr(target) in problem and words in problem
    with pytest.raises(ValueError, match="no linear layer of the model"):
        add_adapters(tiny_model(), section, seed=0)


def test_the_seed_decides_and_the_start_is_the_models_own():
    first, again, other = tiny_model(), tiny_model(), tiny_model()
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        add_adapters(model, LoraSection(rank=4), seed=seed)
    parts = [dict(adapted_layers(model))["model.layers.1.mlp.down_proj"] for model in (first, again, other)]
    assert parts[0].lora_A.equal(parts[1].lora_A) and not parts[0].lora_A.equal(parts[2].lora_A)
    assert parts[0].lora_A.abs().max() <= 192**-0.5 and not parts[0].lora_B.any()
    ids = torch.arange(3, 19)[None]
    assert first(ids).logits.equal(tiny_model()(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_weight_is_rounded_once_whatever_the_blocks(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    a, b = torch.randn(4, 24, generator=generator), torch.randn(40, 4, generator=generator)
    expected = (weight.double() + 0.5 * b.double() @ a.double()).to(dtype)
    found = merged_weight(weight, a, b, 0.5)
    monkeypatch.setattr("headrace_modelkit.lora.BLOCK_ELEMENTS", 100)
    for each in (found, merged_weight(weight, a, b, 0.5)):
        assert each.dtype == dtype
        torch.testing.assert_close(each, expected, rtol=1e-5 if dtype is torch.float32 else 0, atol=1e-6)
    assert BLOCK_ELEMENTS > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_merged_weight_to_the_last_bit_where_it_is_told_to(dtype):
    model = adapted(dtype)
    ids = torch.arange(3, 19)[None]
    beside = model(ids).logits
    compute_merged(model)
    plain = tiny_model().to(dtype)
    for name, layer in adapted_layers(model):
        merged = merged_weight(layer.weight, layer.lora_A, layer.lora_B, layer.scale)
        plain.get_submodule(name).weight.data.copy_(merged)
    assert model(ids).logits.equal(plain(ids).logits)
    close = {"rtol": 2e-2, "atol": 0.15} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(beside, model(ids).logits, **close)


def test_no_weight_of_the_models_size_is_made_beside_the_frozen_one():
    """Counted while a layer computes forward and backward: of a merged weight there is one more."""
    layer = LoraLinear(nn.Linear(256, 512).requires_grad_(False), 4, 0.5, torch.Generator())

    def products() -> int:
        with Largest() as seen:
            layer(torch.randn(2, 8, 256, requires_grad=True)).sum().backward()
        return seen.elements

    assert products() < 512 * 256 // 4
    compute_merged(layer)
    assert products() >= 512 * 256


@pytest.mark.parametrize("merged", [False, True])
def test_the_gradient_is_that_of_the_sum_of_both_products(merged):
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(12, 7)
    layer = LoraLinear(base.requires_grad_(False), 3, 0.7, generator)
    layer.lora_B.data.normal_(generator=generator)
    layer.merged = merged
    x = torch.randn(2, 5, 12, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 5, 7, generator=generator)
    own = x, layer.lora_A, layer.lora_B
    found = torch.autograd.grad(layer(x), own, upstream)
    y = F.linear(x, base.weight, base.bias) + 0.7 * (x @ layer.lora_A.T) @ layer.lora_B.T
    for each, expected in zip(found, torch.autograd.grad(y, own, upstream), strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)
    assert layer.weight.grad is None and layer.bias is base.bias


def test_other_adapters_or_none_stand_in_for_a_while():
    model, other = adapted(rank=4), adapted(rank=4)
    for _, layer in adapted_layers(other):
        layer.lora_A.data.mul_(-2.0)
    ids = torch.arange(3, 19)[None]
    own = model(ids).logits
    given = {name: tensor for name, tensor in state_tensors(other) if is_adapter(name)}
    with standing_in(model, given):
        assert model(ids).logits.equal(other(ids).logits)
        with standing_in(model, {}):
            assert model(ids).logits.equal(tiny_model()(ids).logits)
        assert model(ids).logits.equal(other(ids).logits)
    assert model(ids).logits.equal(own) and not own.equal(other(ids).logits)


def test_a_frozen_weight_of_the_model_costs_no_gradient_memory():
    model = adapted()
    model(torch.arange(3, 19)[None]).logits.sum().backward()
    with_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert with_gradient and all(map(is_adapter, with_gradient))
    assert all(
        math.isfinite(parameter.grad.norm()) for parameter in model.parameters() if parameter.requires_grad
    )


EXPERTS = ["gate_up_proj_adapter", "down_proj_adapter"]


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("all-linear", []),
        (["experts"], EXPERTS * 2),
        (["q_proj", "down_proj"], EXPERTS[1:] * 2),
        (["layers.1.mlp.experts"], EXPERTS),
        (["layers.1.mlp.experts.gate_up_proj"], EXPERTS[:1]),
    ],
)
def test_experts_get_an_adapter_where_they_are_named(targets, adapted):
    model = tiny_moe()
    add_adapters(model, LoraSection(targets=targets), seed=0)
    found = [
        name.rpartition(".")[2] for name, layer in adapted_layers(model) if isinstance(layer, LoraExperts)
    ]
    assert found == adapted
    own = {name for name, _ in state_tensors(tiny_moe())}
    assert {name for name, _ in state_tensors(model) if not is_adapter(name)} == own


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_experts_with_biases_or_computed_by_their_class_get_none(family):
    problem = targets_problem(tiny_of(family), LoraSection(targets=["experts"]))
    assert "'experts' is of experts" in problem and "without bias: this model's have not" in problem


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_learn_as_the_sum_of_both_products(dtype, rank, merged):
    """One of three experts gets no row."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 8, 16, generator=generator).to(dtype)
    layer = LoraExperts(weight, rank, 0.7, generator)
    layer.merged = merged
    layer.lora_B.data.normal_(generator=generator)
    rows = torch.randn(6, 16, generator=generator).to(dtype).requires_grad_()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    upstream = torch.randn(6, 8, generator=generator).to(dtype)
    product = layer(rows, weight, ends)
    whole = grouped_product(rows, merged_weight(weight, layer.lora_A, layer.lora_B, 0.7), ends)
    loose = {"rtol": 2e-2, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(product, whole, **loose)
    assert product.equal(whole) or not merged
    own = rows, layer.lora_A, layer.lora_B
    found = torch.autograd.grad(product, own, upstream)
    parts = [(rows[:2].double(), 0), (rows[2:].double(), 2)]
    exact = torch.cat(
        [
            x @ (weight[e].double() + 0.7 * layer.lora_B[e].double() @ layer.lora_A[e].double()).T
            for x, e in parts
        ]
    )
    wanted = torch.autograd.grad(exact, own, upstream.double())
    torch.testing.assert_close(found[0], wanted[0], **loose)
    for each, expected in zip(found[1:], wanted[1:], strict=True):
        assert each.dtype is torch.float32
        if merged:  # products in fp32 whatever the weights' type, on a CPU
            loose = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(each, expected, **loose)
        assert not each[1].any() and each[0].any()
    with standing_in(layer, {}):
        assert layer(rows, weight, ends).equal(grouped_product(rows, weight, ends))
