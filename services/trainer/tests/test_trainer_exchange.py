"""The exchange of divided experts: rows find their experts and come back, with room that is known beforehand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from headrace_modelkit import experts
from headrace_modelkit.experts import compute_experts
from headrace_modelkit.families.routing import Routing
from headrace_modelkit.presets.tiny import tiny_moe
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.shared.exchange import PaddedAllToAll, Room

TOKENS, CHOSEN = 24, 2


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def mesh():
    """Of one rank of a mesh whose other ones have as much."""
    found = ExpertMesh.__new__(ExpertMesh)
    found._room, found._ranks = Room(1), SimpleNamespace(maximum=lambda values: values)
    return found


def layer(group, room):
    """Experts behind the exchange, and what is plain."""
    own = tiny_moe(1).model.layers[0].mlp.experts
    torch.manual_seed(1)
    given = [torch.randn(TOKENS, own.gate_up_proj.shape[-1], requires_grad=True)]
    index_NK = torch.stack([torch.randperm(8)[:CHOSEN] for _ in range(TOKENS)])
    weights_NK = torch.rand(TOKENS, CHOSEN, requires_grad=True)
    plain = compute_experts(own, *given, index_NK, weights_NK)
    learned = [*given, weights_NK, own.gate_up_proj, own.down_proj]
    wanted = [plain.detach(), *torch.autograd.grad(plain.square().sum(), learned)]
    own.exchange = PaddedAllToAll(group, room)

    def compute():
        return (compute_experts(own, *given, index_NK, weights_NK), None, None)

    def gradients(found):
        return [found.detach(), *torch.autograd.grad(found.square().sum(), learned)]

    return compute, gradients, wanted


@pytest.mark.parametrize("share", [1.5, 0.25], ids=["enough", "made again"])
def test_a_forward_is_made_again_until_there_was_room(group, mesh, share):
    mesh._room.share = share
    compute, gradients, wanted = layer(group, mesh._room)
    routing, made = Routing(), []
    routing.recorded = []

    def counted():
        made.append(mesh._room.rows)
        routing.recorded.append(torch.zeros(1))
        return compute()

    found, _, _ = mesh.forward(TOKENS, CHOSEN, routing, counted)
    sent = TOKENS * CHOSEN
    assert made == ([sent] if share > 1 else [sent // 4, sent])
    assert len(routing.recorded) == 1, "what the first forward found is forgotten"
    for own, expected in zip(gradients(found), wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-7)
    assert mesh._room.share >= 1.0, "the next micro-batch has the room"


class Poisoned(torch.autograd.Function):
    """Rows behind the last expert's are what a kernel leaves there, forward and backward: nothing in particular."""

    @staticmethod
    def forward(ctx, rows_SO, ends_E):
        ctx.end = int(ends_E[-1])
        return torch.cat([rows_SO[: ctx.end], torch.full_like(rows_SO[ctx.end :], torch.nan)])

    @staticmethod
    def backward(ctx, upstream_SO):
        return torch.cat([upstream_SO[: ctx.end], torch.zeros_like(upstream_SO[ctx.end :])]), None


class PoisonedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_SI, ends_E):
        ctx.end = int(ends_E[-1])
        return rows_SI.clone()

    @staticmethod
    def backward(ctx, upstream_SI):
        return torch.cat([upstream_SI[: ctx.end], torch.full_like(upstream_SI[ctx.end :], torch.nan)]), None


def test_places_behind_the_rows_reach_nobody(group, monkeypatch):
    """Other ranks have more tokens: every rank sends as many places, of which most are empty here."""
    plain = experts.grouped_product

    def poisoned(rows_SI, weight_EOI, ends_E, **options):
        given_SI = PoisonedGradient.apply(rows_SI, ends_E)
        return Poisoned.apply(plain(given_SI.nan_to_num(), weight_EOI, ends_E, **options), ends_E)

    monkeypatch.setattr(experts, "grouped_product", poisoned)
    room = Room(1, rows=5 * TOKENS * CHOSEN)
    compute, gradients, wanted = layer(group, room)
    for own, expected in zip(gradients(compute()[0]), wanted, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-7)


def test_ranks_that_nobody_has_told_of_a_forward_ask_each_other(group):
    room = Room(1)
    compute, gradients, wanted = layer(group, room)
    torch.testing.assert_close(gradients(compute()[0]), wanted, rtol=1e-5, atol=1e-7)
