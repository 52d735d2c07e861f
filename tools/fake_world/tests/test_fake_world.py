"""A step on imaginary GPUs: what is alive where, what is moved, and whether the trainer's plan says so before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.device import NAME
from headrace_fake_world.models import MODELS
from headrace_fake_world.step import Case, measure, planned
from headrace_fake_world.world import fake_world
from headrace_trainer.backends.fsdp.layouts.layout import Layout
from headrace_trainer.backends.fsdp.layouts.planned import ATTENTION, INPUTS, MARGIN, with_attention
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes, Unit
from headrace_trainer.memory import LEADERS, MemoryPlan, Room, Rooms

pytestmark = pytest.mark.timeout(600)
LAYERS = 2
SMALL = Case("qwen2.5-0.5b", 8, tokens=2048, row_tokens=2048, layers=LAYERS)
EXPERTS = Case("qwen3-30b-a3b", 8, tokens=2048, row_tokens=2048, layers=LAYERS)
DIVIDED = Layout("weights", 8, checkpointing=True)
GIB = 2**30


def plan_error(case: Case) -> float:
    """How far the plan is from what was measured, as a part of that."""
    _, plan = planned(case)
    return abs(sum(plan.device.values()) / measure(case).peak() - 1)


def test_a_tensor_on_the_wrong_device_raises():
    with fake_world(2) as (group, tracker):
        on_gpu = torch.ones(1024, device=group.device)
        assert tracker.alive(NAME) == {"work": 4096} and not tracker.alive("cpu")
        with pytest.raises(FakeTensorDeviceMismatchError):
            on_gpu + torch.ones(1024)
        del on_gpu
        assert not tracker.alive(NAME)
    assert torch.ones(1).item() == 1.0, "tensors are real again"


def test_a_divided_model_is_gathered_twice_and_reduced_once_in_a_micro_batch():
    case = replace(SMALL, layout=DIVIDED)
    found = measure(case)
    units = LAYERS + 1
    micro = found.phases["micro-batch"]
    assert micro.calls == {"all_gather": 2 * units, "reduce_scatter": units}
    assert micro.moved["reduce_scatter"] == pytest.approx(micro.moved["all_gather"], rel=0.01), "fp32, once"
    weights = found.kept[NAME]["masters"] * 8
    assert micro.moved["all_gather"] == pytest.approx(weights, rel=0.01), "bf16, twice"
    assert found.kept[NAME]["moments"] == pytest.approx(2 * found.kept[NAME]["masters"], rel=0.01)
    published = {name: found.phases[name] for name in ("publish", "publish beside the leader")}
    whole = found.kept[NAME]["masters"] * 8
    assert [sum(each.carried.values()) for each in published.values()] == [pytest.approx(whole, rel=0.01), 0]
    assert [dict(each.calls) for each in published.values()] == [{"all_gather": 12 * LAYERS + 2}] * 2
    asleep = found.phases["asleep"]
    assert asleep.peak(NAME) < 1024, "of a step within which it sleeps its figures alone are on the GPU"
    _, plan = planned(case)
    assert abs(sum(plan.device.values()) / found.peak() - 1) < 0.1


def test_parameters_that_are_away_lie_on_the_host():
    found = measure(replace(SMALL, layout=replace(DIVIDED, offload="parameters")))
    assert not {"masters", "moments", "gradients"} & found.kept[NAME].keys()
    assert found.kept["cpu"]["moments"] == pytest.approx(2 * found.kept["cpu"]["masters"], rel=0.01)
    assert found.phases["wake"].peak(NAME) < 2**20, "they stay there when the trainer wakes"


@pytest.mark.parametrize(
    ("ranks", "trainer", "most"),
    [
        pytest.param(2, {}, "asleep", id="all weights", marks=pytest.mark.nightly),
        pytest.param(8, {"lora": {"rank": 16}}, "weights in transit", id="adapters"),
        pytest.param(
            1, {"lora": {"rank": 16}}, "asleep", id="adapters of one rank", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rank_has_of_the_host_what_is_planned(ranks, trainer, most):
    layout = Layout("weights", ranks)
    case = replace(SMALL, ranks=ranks, trainer=trainer, layout=layout)
    plan = {part: size for part, size in planned(case)[1].host.items() if part not in LEADERS}
    assert plan[most] > 0 and {"asleep", "weights in transit"} - {part for part in plan if plan[part]}
    assert sum(plan.values()) == pytest.approx(measure(case).peak("cpu"), rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", [{}, {"lora": {"rank": 16}}], ids=["all weights", "adapters"])
def test_a_layer_of_experts_is_gathered_whole(trainer):
    case = replace(EXPERTS, trainer=trainer, layout=DIVIDED)
    found = measure(case)
    micro = found.phases["micro-batch"]
    assert micro.calls["all_gather"] == 2 * (LAYERS + 1) and "all_to_all" not in micro.calls
    assert plan_error(case) < 0.1


def test_experts_that_are_divided_get_their_tokens_by_an_exchange():
    case = replace(EXPERTS, trainer={"backend_options": {"expert_parallel": 8}}, layout=DIVIDED)
    found = measure(case)
    micro, shape = found.phases["micro-batch"], MODELS[EXPERTS.model]
    # How many rows go where, the rows with their weights, and back; recomputation makes all again, and a backward sends
    # what has a gradient.
    assert micro.calls["all_to_all"] == LAYERS * (2 * 4 + 3)
    rows = EXPERTS.tokens * shape["num_experts_per_tok"]
    exchanged = LAYERS * 6 * 1.5 * rows * 2 * shape["hidden_size"]
    assert micro.moved["all_to_all"] == pytest.approx(exchanged, rel=0.01), (
        "bf16, six times, and room for half more"
    )
    # Head and embedding, queries and outputs, keys and values, routers.
    per_layer = 2 * 4096 + 2 * 512 + shape["num_experts"]
    outside = shape["hidden_size"] * (2 * shape["vocab_size"] + LAYERS * per_layer)
    assert micro.moved["all_gather"] == pytest.approx(2 * 2 * outside, rel=0.01), "experts' weights stay here"
    assert plan_error(case) < 0.1


def test_what_attention_gave_is_kept_where_there_is_room_for_it():
    again = replace(SMALL, trainer={"gradient_checkpointing": True})
    layout, plan = planned(again)
    shape = MODELS[SMALL.model]
    heads, width = shape["num_attention_heads"], shape["hidden_size"] // shape["num_attention_heads"]
    kept = LAYERS * SMALL.tokens * heads * (2 * width + 4)
    assert layout.keeps_attention and plan.device[ATTENTION] == kept
    found = measure(replace(again, layout=layout))
    assert abs(sum(plan.device.values()) / found.peak() - 1) < 0.1
    without = measure(replace(again, layout=replace(layout, keeps_attention=False)))
    assert found.peak() - without.peak() == pytest.approx(kept, rel=0.1)
    sizes = Sizes((Unit(1, 0, 0, 0, attended=kept),), 0, 0, 0, 0, 0, 0)
    tight = MemoryPlan({}, {"masters": 1000})
    for more, expected in ((-1, False), (1, True)):
        free = int(MARGIN * (1000 + kept)) + more
        rooms = Rooms(Room("host", 1, 1), Room("GPU", free, free))
        assert with_attention(layout, tight, sizes, rooms)[0].keeps_attention is expected


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "bytes_each"), [("adamw_8bit", 2.03), ("muon", 7.28)])
def test_a_cheaper_optimizer_has_the_state_that_is_planned(name, bytes_each):
    """Of two layers, whose embeddings are most of the weights."""
    case = replace(SMALL, layout=DIVIDED, optimizer={"name": name})
    found = measure(case)
    _, plan = planned(case)
    assert found.kept[NAME]["moments"] == pytest.approx(plan.device["moments"], rel=0.01)
    assert plan.device["moments"] == pytest.approx(bytes_each / 4 * plan.device["masters"], rel=0.02)
    assert abs(sum(plan.device.values()) / found.peak() - 1) < 0.1


@pytest.mark.nightly
def test_inputs_of_layers_that_lie_on_the_host_are_not_on_the_gpu():
    """Of six layers one's are at hand."""
    kept = replace(SMALL, tokens=16_384, row_tokens=16_384, layers=6, layout=DIVIDED)
    away = replace(kept, trainer={"backend_options": {"offload_activations": True}})
    inputs = 6 * kept.tokens * MODELS[kept.model]["hidden_size"] * 2
    on_gpu, on_host = measure(kept), measure(away)
    assert planned(away)[1].host[INPUTS] == inputs
    assert on_gpu.peak() - on_host.peak() == pytest.approx(inputs * 5 / 6, rel=0.1)
    assert on_host.phases["micro-batch"].peak("cpu") == pytest.approx(inputs, rel=0.1)
    assert plan_error(away) < 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("away", [False, True], ids=["kept", "away"])
def test_a_7b_model_learns_from_128k_tokens_on_eight_gpus(away):
    options = {"context_parallel": 4, "offload_activations": away}
    case = Case("qwen2.5-7b", 8, tokens=131_072, row_tokens=131_072, trainer={"backend_options": options})
    layout, plan = planned(case)
    measured = measure(replace(case, layout=layout)).peak()
    assert MARGIN * measured < 80e9
    assert sum(plan.device.values()) == pytest.approx(measured, rel=0.1)


@pytest.mark.nightly
def test_a_few_layers_stand_for_all():
    case = replace(SMALL, layout=DIVIDED, layers=None)
    few, whole = measure(case), measure(case, whole=True)
    assert few.peak() == pytest.approx(whole.peak(), rel=0.01)
    for name, phase in whole.phases.items():
        assert few.phases[name].calls == phase.calls, name
        for kind, moved in phase.moved.items():
            assert few.phases[name].moved[kind] == pytest.approx(moved, rel=0.01), (name, kind)
