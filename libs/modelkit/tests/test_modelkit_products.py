"""Products on a CPU: of bf16 matrices without instructions for them, and with weights that are packed once."""

import copy
import weakref

import pytest
import torch
from headrace_modelkit import products
from headrace_modelkit.products import PackedLayers, PackedWeight, product, use_fp32_products
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
@pytest.mark.parametrize("packs", [True, False])
def test_layers_compute_with_the_weights_of_the_last_version_that_was_adopted(monkeypatch, bias, packs):
    monkeypatch.setattr(products, "FEWEST_PACKED", 100 if packs else 10_000)
    torch.manual_seed(0)
    ours, plain = (nn.Sequential(nn.Linear(24, 40, bias=bias), nn.GELU()).bfloat16() for _ in range(2))
    use_fp32_products(plain, CPU)
    layers = PackedLayers(ours)
    given = torch.linspace(-1, 1, 3 * 24).reshape(1, 3, 24).bfloat16()
    with torch.inference_mode():
        for version in (1.0, 2.0):
            for model in (ours, plain):
                for weight in model.parameters():
                    weight.copy_(torch.linspace(-version, version, weight.numel()).reshape(weight.shape))
            layers.adopt()
            assert layers.missing_bytes == 24 * 40 * 4
            assert torch.allclose(ours(given).float(), plain(given).float(), rtol=1 / 128)
            assert layers.missing_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_packed_weight_gives_torchs_product(monkeypatch, dtype, rows):
    monkeypatch.setattr(products, "FEWEST_PACKED", 1)
    torch.manual_seed(0)
    weight, bias, given = (torch.randn(*shape).to(dtype) for shape in ((40, 24), (40,), (rows, 24)))
    packed = PackedWeight()
    packed.adopt(weight, bias, wide=False)
    with torch.inference_mode():
        found = packed(given)
        exact = nn.functional.linear(given.double(), weight.double(), bias.double())
        assert found.dtype == dtype and packed._ready.is_mkldnn
    assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_a_packed_weight_takes_memory_at_its_first_product_and_gives_it_back(monkeypatch):
    monkeypatch.setattr(products, "FEWEST_PACKED", 1)
    packed = PackedWeight()
    packed.adopt(torch.ones(40, 24), None, wide=False)
    assert packed.missing_bytes == 40 * 24 * 4
    with torch.inference_mode():
        packed(torch.ones(1, 24))
    made = weakref.ref(packed._ready)
    assert packed.missing_bytes == 0
    packed.free()
    assert made() is None and packed.missing_bytes == 0


def test_small_weights_are_used_as_they_are(monkeypatch):
    plain = nn.Linear(4, 4)
    layers = PackedLayers(plain)
    layers.adopt()
    given = torch.randn(2, 4)
    assert torch.equal(plain(given), nn.functional.linear(given, plain.weight, plain.bias))
    assert layers.missing_bytes == 0
    monkeypatch.setattr(products, "has_bf16_products", lambda: True)
    able = nn.Linear(4, 4).bfloat16()
    layers = PackedLayers(able)
    layers.adopt()
    assert layers.missing_bytes == 0 and able(given.bfloat16()).dtype == torch.bfloat16


def test_where_torch_cannot_pack_products_are_plain(monkeypatch):
    monkeypatch.setattr(products, "FEWEST_PACKED", 1)
    monkeypatch.setattr(products, "can_pack", lambda: False)
    packed, weight, given = PackedWeight(), torch.randn(40, 24), torch.randn(3, 24)
    packed.adopt(weight, None, wide=False)
    assert packed.missing_bytes == 0
    assert torch.equal(packed(given), nn.functional.linear(given, weight))
