"""Products of bf16 matrices on a CPU without instructions for them: torch's values, in a fraction of its time."""

import copy

import pytest
import torch
from headrace_modelkit import products
from headrace_modelkit.products import product, use_fp32_products
from torch import nn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch):
    """As on a CPU with AVX2 alone, whatever runs the test."""
    monkeypatch.setattr(products, "has_bf16_products", lambda: False)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_keeps_its_values_and_gradients(bias):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.GELU(), nn.Linear(40, 8, bias=bias)).bfloat16()
    theirs = copy.deepcopy(ours)
    use_fp32_products(ours, CPU)
    found = []
    for model in (ours, theirs):
        given = torch.linspace(-1, 1, 5 * 3 * 24).reshape(5, 3, 24).bfloat16().requires_grad_()
        made = model(given)
        made.float().square().sum().backward()
        found.append([made, given.grad, *(weight.grad for weight in model.parameters())])
    assert any(layer.forward.__func__ is products._forward for layer in ours if isinstance(layer, nn.Linear))
    for mine, other in zip(*found, strict=True):
        assert mine.dtype == other.dtype == torch.bfloat16 and mine.shape == other.shape
        # One rounding to eight bits: a part in 256, of the largest number.
        assert (mine.float() - other.float()).abs().max() <= other.float().abs().max() / 100


def test_other_types_and_devices_are_left_alone():
    plain = nn.Linear(4, 4)
    use_fp32_products(plain, torch.device("cuda"))
    assert "forward" not in vars(plain)
    use_fp32_products(plain, CPU)
    given = torch.randn(2, 4)
    assert torch.equal(plain(given), nn.functional.linear(given, plain.weight, plain.bias))
    assert torch.equal(product(given, plain.weight), given @ plain.weight)
    halves = given.bfloat16(), plain.weight.detach().bfloat16()
    exact = (halves[0].double() @ halves[1].double()).bfloat16()
    assert torch.allclose(product(*halves).float(), exact.float(), rtol=1 / 128)
