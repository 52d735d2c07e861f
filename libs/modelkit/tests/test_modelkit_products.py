"""Products of bf16 matrices on a CPU without instructions for them: torch's values, in a fraction of its time."""

import copy

import pytest
import torch
from headrace_modelkit import products
from headrace_modelkit.products import WideLayers, product, use_fp32_products
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


@pytest.mark.parametrize("bias", [True, False])
def test_kept_copies_give_the_same_values_until_the_next_version(bias):
    torch.manual_seed(0)
    kept, plain = (nn.Sequential(nn.Linear(24, 40, bias=bias), nn.GELU()).bfloat16() for _ in range(2))
    use_fp32_products(plain, CPU)
    layers = WideLayers(kept)
    given = torch.linspace(-1, 1, 3 * 24).reshape(3, 24).bfloat16()
    with torch.inference_mode():
        for version in (1.0, 2.0):
            for model in (kept, plain):
                for weight in model.parameters():
                    weight.copy_(torch.linspace(-version, version, weight.numel()).reshape(weight.shape))
            layers.adopt()
            assert torch.equal(kept(given), plain(given))
        assert kept[0].wide[0].dtype == torch.float32
        layers.free()
        assert kept[0].wide == [None, None]
        layers.adopt()
        assert torch.equal(kept(given), plain(given))


def test_no_copies_are_kept_of_other_types_or_where_the_cpu_has_the_instructions(monkeypatch):
    plain = nn.Linear(4, 4)
    WideLayers(plain).adopt()
    given = torch.randn(2, 4)
    assert torch.equal(plain(given), nn.functional.linear(given, plain.weight, plain.bias))
    assert plain.wide == [None, None]
    monkeypatch.setattr(products, "has_bf16_products", lambda: True)
    able = nn.Linear(4, 4).bfloat16()
    WideLayers(able).adopt()
    assert not {"wide", "forward"} & vars(able).keys()
