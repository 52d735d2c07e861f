"""What a step computes is counted from its operations: products, bytes, kernels, and how often the host waits."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.models import MODELS
from headrace_fake_world.step import Case, counted, measure
from headrace_fake_world.work import Roof, Work, seconds_of
from headrace_fake_world.world import fake_world
from headrace_modelkit.experts import compute_experts
from headrace_trainer.backends.fsdp.layouts.layout import Layout

pytestmark = pytest.mark.timeout(300)
DIVIDED = Layout("weights", 8)
SMALL = Case("qwen2.5-0.5b", 8, tokens=2048, row_tokens=2048, layers=2, layout=DIVIDED)
SHAPE = MODELS[SMALL.model]


def micro_batch(case: Case, **own):
    """What is counted of one."""
    watch = partial(Work, Roof(), vocabulary=MODELS[case.model]["vocab_size"], **own)
    return measure(case, watch=watch).phases["micro-batch"].work


def test_a_forward_s_products_are_two_for_each_weight_and_token_and_a_backward_s_twice_as_many():
    work = micro_batch(SMALL)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    keys = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * keys + 3 * inner)
    pairs = SMALL.tokens * (SMALL.tokens + 1) // 2
    trained = SMALL.row_tokens - SMALL.row_tokens // 32
    head, attention = 2 * trained * hidden * SHAPE["vocab_size"], 2 * 4 * hidden * pairs
    expected = 2 * SMALL.tokens * 2 * layer + head + attention
    assert work["flops"] == pytest.approx(expected, rel=0.01)
    # The head's logits are made again, a tile at a time, and flash attention makes its scores again.
    assert work["flops in backward"] == pytest.approx(2 * expected + head + attention / 2, rel=0.01)
    again = micro_batch(replace(SMALL, layout=replace(DIVIDED, checkpointing=True)))
    assert again["flops"] == work["flops"]
    more = again["flops in backward"] - work["flops in backward"]
    last = 2 * SMALL.tokens * 2 * hidden * inner
    assert more == pytest.approx(expected - head - last, rel=0.01), "of a layer all but its last product"


def test_what_is_compiled_has_fewer_kernels_and_moves_fewer_bytes():
    eager, compiled = micro_batch(SMALL), micro_batch(SMALL, fuses=True)
    assert compiled["kernels"] < eager["kernels"] and compiled["bytes"] < eager["bytes"]
    assert compiled["flops"] == eager["flops"]
    assert seconds_of(compiled)["products"] == pytest.approx(seconds_of(eager)["products"], rel=0.01)


@pytest.mark.parametrize(
    ("options", "waits"), [({}, 1), ({"expert_parallel": 8}, 2)], ids=["gathered", "divided"]
)
def test_the_host_waits_as_often_whatever_the_layers_of_experts(options, waits):
    """Whether the loss is finite, and whether there was room for the rows that divided experts got: where tokens go
    stays on the device. Nothing else comes from there, neither by a number nor by a copy.
    """
    found = []
    for layers in (1, 2):
        case = Case(
            *("qwen3-30b-a3b", 8),
            tokens=1024,
            row_tokens=1024,
            layers=layers,
            layout=replace(DIVIDED, checkpointing=True),
            trainer={"backend_options": options},
        )
        watch = partial(Work, Roof(), vocabulary=MODELS[case.model]["vocab_size"])
        found.append(counted(case, watch).phases["micro-batch"])
    assert [each.work["waits"] for each in found] == [waits, waits]
    back = [sum(size for way, size in each.carried.items() if way.endswith("to cpu")) for each in found]
    assert back[0] == back[1]


def test_a_layer_that_is_counted_stands_for_all_of_them():
    """One layer and two, multiplied out, against all four."""
    case = replace(SMALL, layers=4, layout=replace(DIVIDED, checkpointing=True))
    watch = partial(Work, Roof(), True, SHAPE["vocab_size"])
    for phase, own in counted(case, watch).phases.items():
        whole = counted(case, watch, whole=True).phases[phase]
        for kind in ("flops", "flops in backward", "bytes", "kernels", "waits"):
            assert own.work[kind] == pytest.approx(whole.work[kind], rel=0.01), (phase, kind)
        assert sum(own.moved.values()) == pytest.approx(sum(whole.moved.values()), rel=0.01)


def test_what_attention_gave_is_kept_and_not_computed_again():
    again = replace(SMALL, layout=replace(DIVIDED, checkpointing=True))
    kept = replace(again, layout=replace(again.layout, keeps_attention=True))
    one, other = micro_batch(again), micro_batch(kept)
    pairs = SMALL.tokens * (SMALL.tokens + 1) // 2
    attention = 2 * 4 * SHAPE["hidden_size"] * pairs
    assert one["flops"] == other["flops"]
    assert one["flops in backward"] - other["flops in backward"] == pytest.approx(attention, rel=0.01)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor asks for a C++ compiler")
def test_what_inductor_fuses_moves_the_bytes_that_are_counted(monkeypatch):
    """Experts of Qwen3-30B-A3B, forward and backward: the kernels of inductor's own scheduler, and the same operations
    as they are counted here.
    """
    tokens, hidden, inner, experts, chosen = 2048, 2048, 768, 128, 8
    scheduled: list[int] = []

    class Lowered(Exception):
        """Nothing is to be computed."""

    def lower(graph):
        graph._update_scheduler()
        scheduled.append(sum(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes))

        def call(_):
            raise Lowered

        return SimpleNamespace(call=call, __file__="", key="")

    def layer(device):
        half = {"dtype": torch.bfloat16, "device": device}
        own = SimpleNamespace(act_fn=F.silu, num_experts=experts)
        own.gate_up_proj = torch.empty(experts, 2 * inner, hidden, **half, requires_grad=True)
        own.down_proj = torch.empty(experts, hidden, inner, **half, requires_grad=True)
        given = torch.empty(tokens, hidden, **half, requires_grad=True)
        index = torch.zeros(tokens, chosen, dtype=torch.long, device=device)
        return own, given, index, torch.empty(tokens, chosen, **half, requires_grad=True)

    with fake_world(1) as (group, tracker):
        tracker.watch = Work(Roof(), fuses=True)
        own, *given = layer(group.device)
        with tracker.phase("both"):
            found = compute_experts(own, *given)
            found.backward(torch.empty_like(found))

    monkeypatch.setattr(GraphLowering, "compile_to_module", lower)
    monkeypatch.setattr(torch._functorch.config, "force_non_lazy_backward_lowering", True)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    own, *given = layer("cpu")
    torch._dynamo.reset()
    with pytest.raises(Lowered):
        torch.compile(lambda *args: compute_experts(own, *args))(*given)
    assert len(scheduled) == 2, "a graph forward and one backward"

    # Rows are gathered from their places, of which inductor counts each once.
    gathers = 2 * (chosen - 1) * tokens * hidden * 2
    counted_bytes = tracker.phases["both"].work["bytes"] - gathers
    assert counted_bytes == pytest.approx(sum(scheduled), rel=0.05)
