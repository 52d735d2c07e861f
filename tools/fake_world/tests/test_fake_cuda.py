"""A step on a GPU of CUDA that is not there: what runs for `device.type == "cuda"` alone, forward and backward.

An operation that mixes devices raises, and so does a gradient that comes to a tensor of another one. A scalar of the
host may mix with tensors of a GPU: that nothing in a step does so is looked at here.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.cuda import CUDA, fake_cuda
from headrace_fake_world.engine import PythonEngine, WrongDevice
from headrace_fake_world.step import Case, measure
from headrace_fake_world.world import fake_world
from headrace_trainer.backends.fsdp.layouts.layout import Layout

pytestmark = pytest.mark.timeout(900)
DIVIDED = Layout("weights", 8, checkpointing=True)
DENSE = Case("qwen2.5-0.5b", 8, tokens=1024, row_tokens=512, layers=1, layout=DIVIDED)
EXPERTS = replace(DENSE, model="qwen3-30b-a3b")
COMPUTING = ("infer", "first micro-batch", "micro-batch", "first commit", "commit")
CASES = {
    "dense": DENSE,
    "whole weights": replace(DENSE, layout=Layout("state", 8)),
    "two hosts": replace(DENSE, ranks=16, layout=Layout("gradients", 8)),
    "moments on the host": replace(DENSE, layout=replace(DIVIDED, offload="optimizer")),
    "reference": replace(DENSE, algorithm={"options": {"kl_loss_coef": 0.1}}),
    "adapters": replace(DENSE, trainer={"lora": {"rank": 16}}),
    "adapters of one rank": replace(
        DENSE, ranks=1, layout=Layout("state", 1), trainer={"lora": {"rank": 16}}
    ),
    "experts": EXPERTS,
    "divided experts": replace(EXPERTS, trainer={"backend_options": {"expert_parallel": 8}}),
    "adapters of experts": replace(EXPERTS, trainer={"lora": {"rank": 16, "targets": ["q_proj", "experts"]}}),
}
QUICK = "dense"


class _Doubled(torch.autograd.Function):
    """An operation whose backward pass is in Python, of a tensor between two that are none or learn nothing."""

    @staticmethod
    def forward(ctx: Any, factor: float, value: Tensor, unused: Tensor, device: Any) -> tuple[Tensor, Tensor]:
        ctx.factor, ctx.device = factor, device
        return value * factor, value.sum()

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            leaf = torch.ones_like(of_product, requires_grad=True)
            product = leaf * ctx.factor
        [of_leaf] = torch.autograd.grad(product, [leaf], of_product)
        found = of_leaf + of_sum
        return None, found if ctx.device is None else torch.empty_like(found, device=ctx.device), None, None


def doubled(value: Tensor, device: Any = None) -> Tensor:
    product, total = _Doubled.apply(2.0, value, torch.ones(1, device=value.device), device)
    return product + 0.5 * total if value.shape[-1] > 2 else product


def gradients(parameters: list[Tensor], loss: Any) -> list[Tensor]:
    for each in parameters:
        each.grad = None
    loss().backward()
    return [each.grad for each in parameters if each.grad is not None]


def test_a_backward_pass_in_python_gives_torchs_gradients():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    )
    bias, given = torch.randn(3, requires_grad=True), torch.randn(5, 4)
    seen: list[Tensor] = []

    def loss() -> Tensor:
        hidden: Any = checkpoint(net, given, use_reentrant=False)
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()) or 3 * gradient)
        one, other = doubled(hidden * bias).split([1, 2], -1)
        unused_sum = doubled(other)
        return one.exp().sum() + unused_sum.norm() + hidden.softmax(-1)[:, 0].bfloat16().float().sum()

    learned = [*net.parameters(), bias]
    expected = gradients(learned, loss)
    with PythonEngine().running():
        found = gradients(learned, loss)
    assert len(found) == len(learned) and len(seen) == 2
    assert all(one.equal(other) for one, other in zip([*found, seen[1]], [*expected, seen[0]], strict=True))


def test_a_gradient_that_comes_to_a_tensor_of_another_device_raises():
    with fake_cuda(), fake_world(1, CUDA):
        learned = torch.ones(4, device=CUDA, requires_grad=True)
        with pytest.raises(WrongDevice, match="has tensors on cuda:0 and a gradient on cpu"):
            (doubled(learned * 2, "cpu") * 2).sum().backward()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else (pytest.mark.nightly,)) for name in CASES]
)
def test_a_step_computes_on_the_gpu_alone(name):
    with fake_cuda():
        found = measure(CASES[name], device=CUDA)
    # A reference goes to the host before the first micro-batch.
    moved = {"detach", "view"} if name == "reference" else set()
    computed = {phase: found.phases[phase].on_host.keys() for phase in COMPUTING if phase in found.phases}
    assert "micro-batch" in computed and not any(names - moved for names in computed.values())
    assert found.kept["cuda"]["masters"] and found.phases["micro-batch"].carried["cpu to cuda"]


@pytest.mark.nightly
def test_a_step_of_weights_on_the_host_steps_there_and_computes_on_the_gpu():
    with fake_cuda():
        found = measure(replace(DENSE, layout=replace(DIVIDED, offload="parameters")), device=CUDA)
    assert "_fused_adamw_" in found.phases["commit"].on_host
    assert not {"mm", "addmm", "bmm"} & found.phases["micro-batch"].on_host.keys()
    assert found.kept["cpu"]["masters"] and "masters" not in found.kept["cuda"]
