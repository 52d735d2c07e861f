"""The memory plan: what it says against what a backend really has, and what becomes of a run that does not fit."""

from __future__ import annotations

import grpc
import pytest
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.memory.capacity import HostMemory
from headrace_servicekit.rpc.errors import reason_of
from headrace_trainer import memory
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, VALUES
from headrace_trainer.backends.fsdp.layouts.planned import INPUTS, choose_layout
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import (
    COPY,
    GIB,
    LENT,
    MemoryPlan,
    Room,
    Rooms,
    check_host,
    check_room,
    check_rooms,
    kept_bytes,
)

PASSES = {"epochs": 2, "minibatches": 2}
KL = {"kl_loss_coef": 0.1}


ROOMY = Rooms(Room("host memory", 2**50, 2**50), None)
GPU = Rooms(ROOMY.host, Room("GPU memory", 2**50, 2**50))


def planned(config, ranks=1, rooms=ROOMY, **options):
    parsed = TrainerConfig.model_validate(config)
    algorithm = build_algorithm(parsed.algorithm)
    return choose_layout(parsed, algorithm, FsdpOptions(**options), ranks, ranks, rooms)[1]


def ppo(make_config, **options):
    return make_config(algorithm={"name": "ppo", "options": {**PASSES, **KL, **options}})


def test_the_plan_is_what_a_backend_has(make_backend, make_config, accumulate, sequences):
    algorithm = {"name": "grpo", "options": {**PASSES, **KL}}
    backend = make_backend(algorithm=algorithm)
    backend.load_reference()
    plan = backend.memory_plan(ROOMY)
    assert plan.device == {}, "a CPU's memory is the host's"
    assert plan.host["masters"] == sum(shard.nbytes for shard in backend._sharded.shards().values())
    assert plan.host["reference"] == backend.reference_bytes > 100_000
    columns = {OLD_LOG_PROBS: [-1.0], REFERENCE_LOG_PROBS: [-1.0]}
    group = sequences(1)
    for sequence in group:
        sequence.columns.update({name: value * len(sequence.trained) for name, value in columns.items()})
    accumulate(backend, [group], 512)
    gradients = backend.reduced_gradient(1.0)
    assert plan.host["gradients"] == sum(gradient.nbytes for gradient in gradients.values())
    accumulate(backend, [group], 512)
    backend.commit(1.0, 1e-3)
    backend.hold()
    weights, state = backend._held
    moments = [tensors[kind] for tensors in state.tensors.values() for kind in ("exp_avg", "exp_avg_sq")]
    assert plan.host["moments"] == sum(moment.nbytes for moment in moments)
    held = [*weights.values(), *moments]
    assert plan.host["hold"] == sum(tensor.nbytes for tensor in held)


def test_what_an_algorithm_does_not_need_is_not_counted(make_config):
    plain = planned(make_config()).host
    assert plain["reference"] == plain["hold"] == plain["kept groups"] == 0
    with_all = planned(ppo(make_config)).host
    assert all(with_all[part] > 0 for part in ("reference", "hold", "kept groups"))
    own = planned(ppo(make_config, critic="model")).host
    assert 1.5 * with_all["masters"] < own["masters"], "a critic with a body of its own learns too"


def test_ranks_share_the_state_and_a_gpu_has_a_memory_of_its_own(make_config):
    config = ppo(make_config)
    one, two = planned(config), planned(config, ranks=2)
    for part in ("masters", "moments", "reference", "hold"):
        assert two.host[part] == pytest.approx(one.host[part] / 2, rel=0.01)
    assert two.host["gradients"] == one.host["gradients"], "whole until they are reduced"
    assert planned(config, ranks=2, shard="gradients").host["gradients"] < one.host["gradients"]
    gpu = planned(config, rooms=GPU)
    assert set(gpu.host) == {
        *("hold", "kept groups", "reference", "published versions", "weights in transit", COPY, "asleep")
    }
    assert gpu.device["reference"] == gpu.host["reference"] and "hold" not in gpu.device
    state = gpu.device["masters"] + gpu.device["moments"]
    assert gpu.host[COPY] == state and gpu.host["asleep"] == state + gpu.device["gradients"]
    apart = planned(config | {"placement": {"mode": "disaggregated"}}, rooms=GPU)
    assert not apart.host["asleep"], "whose GPU is never another's"
    assert not gpu.host["weights in transit"], "no weight travels while the trainer sleeps"
    assert apart.host["weights in transit"] > 0
    assert COPY not in planned(config | {"checkpoint": {"enabled": False}}, rooms=GPU).host


def test_inputs_of_layers_lie_on_the_host_where_they_are_told_to(make_config):
    kept = planned(
        make_config(trainer={"ranks": 1, "gradient_checkpointing": True}), rooms=GPU, shard="weights"
    )
    away = planned(make_config(), rooms=GPU, shard="weights", offload_activations=True)
    assert "gradient_checkpointing: true, offload_activations: true" in away.layout
    inputs = away.host[INPUTS]
    config = TrainerConfig.model_validate(make_config())
    width = 4 * 64  # fp32
    assert inputs == 2 * config.trainer.micro_batch_tokens * width and INPUTS not in kept.host
    assert kept.device["activations"] - away.device["activations"] == inputs // 2, "one layer's are at hand"


def test_a_host_without_room_for_the_copy_saves_in_place(make_config):
    config = make_config()
    plan = planned(config)
    short = sum(plan.host.values()) - 1
    found = planned(config, rooms=Rooms(Room("host memory", short, 2**50), None))
    assert found.saves_in_place and COPY not in found.host and found.layout == plan.layout
    assert "training waits while a checkpoint is written" in found.reason
    assert not plan.saves_in_place and "training waits" not in plan.reason
    adapters = make_config(trainer={"ranks": 1, "lora": {"rank": 4}})
    assert COPY in planned(adapters, rooms=Rooms(Room("host memory", 1, 2**50), None)).host


def test_what_the_leader_lends_is_planned_where_it_fits_and_costs_no_layout(make_config):
    config = make_config() | {"placement": {"mode": "disaggregated"}}
    lending = config | {"weights": {"transports": ["cuda_ipc", "shm", "grpc"]}}
    without, plan = planned(config, rooms=GPU), planned(lending, rooms=GPU)
    assert plan.lends and plan.device[LENT] == plan.host["published versions"]
    assert LENT not in without.device and LENT not in planned(lending).device
    room = Room("GPU memory", int(1.2 * sum(without.device.values())), 2**50)
    short = planned(lending, rooms=Rooms(ROOMY.host, room))
    assert (short.layout, dict(short.device)) == (without.layout, dict(without.device)) and not short.lends
    assert "cuda_ipc gives way to shm" in short.reason
    by_ranks = planned(config | {"weights": {"publish": "ranks"}}, ranks=2)
    assert 2 * by_ranks.host["published versions"] == without.host["published versions"]
    unread = planned(lending | {"installed": False}, rooms=GPU)
    assert unread.host["published versions"] == 0 and LENT not in unread.device, "nobody takes them"


def test_a_layout_is_taken_where_a_tenth_more_fits_and_the_host_has_its_part(make_config):
    config = make_config()
    wanted = planned(config, rooms=GPU)
    needs = sum(wanted.device.values())
    for times, other in ((1.11, False), (1.05, True)):
        room = Room("GPU memory", int(times * needs), 2**50)
        assert (planned(config, rooms=Rooms(ROOMY.host, room)).layout != wanted.layout) is other
    short = planned(config, rooms=Rooms(Room("host memory", 1, 2**50), GPU.device))
    assert len(short.tried) > 4 and not any(each.fits for each in short.tried)


def test_a_cpu_s_layout_does_not_hang_on_what_else_the_host_does(make_config):
    busy = Rooms(Room("host memory", 1, 2**50), None)
    plan = planned(make_config(), rooms=busy)
    assert plan.layout == planned(make_config()).layout and plan.tried[-1].fits
    with pytest.raises(Refusal) as caught:
        check_rooms(plan, busy)
    assert caught.value.reason == "MEMORY_SHORT", "it waits for memory, and lies as it would"


def test_a_host_too_small_for_all_its_ranks_is_refused_before_a_layout_is_taken(make_backend, monkeypatch):
    backend = make_backend()
    held, backend._layout = backend.layout, None
    needs = sum(backend.memory_plan(ROOMY).host.values())
    rooms = Rooms(Room("host memory", needs // 2, needs // 2), None)
    monkeypatch.setattr(type(backend._ranks), "least_rooms", lambda _: (rooms, 1))
    with pytest.raises(Refusal, match=r"trainer\.ranks: a rank needs at least .* of host memory"):
        backend.load_initial()
    monkeypatch.setattr(type(backend._ranks), "least_rooms", lambda _: (ROOMY, 1))
    backend.load_initial()
    assert backend.layout == held


def test_a_refusal_says_how_many_ranks_would_fit_or_that_none_do(make_config):
    config = make_config(trainer={"ranks": 1, "micro_batch_tokens": 16})
    four = planned(config, ranks=4, rooms=GPU, shard="weights", offload="none")
    room = Room("GPU memory", *[int(1.11 * sum(four.device.values()))] * 2)
    plan = planned(config, rooms=Rooms(ROOMY.host, room), shard="weights", offload="none")
    with pytest.raises(Refusal, match=r"trainer\.ranks: 4 fits, with shard: weights, shard_ranks: 4"):
        check_rooms(plan, Rooms(ROOMY.host, Room("GPU memory", 1, 1)))
    none = planned(config, rooms=Rooms(ROOMY.host, Room("GPU memory", 1, 1)))
    with pytest.raises(Refusal, match="more ranks alone do not help"):
        check_rooms(none, Rooms(ROOMY.host, Room("GPU memory", 1, 1)))


def test_what_all_ranks_of_a_host_need_is_refused_before_anything_is_loaded():
    plan = MemoryPlan({"moments": 3 * GIB, "published versions": 2 * GIB}, {})
    check_host(plan, Rooms(Room("host memory", 14 * GIB, 16 * GIB), None), 4)
    with pytest.raises(Refusal) as caught:
        check_host(plan, Rooms(Room("host memory", 13 * GIB, 16 * GIB), None), 4)
    assert caught.value.reason == "MEMORY_SHORT"
    assert "its 4 ranks need at least 14.00 GiB of host memory" in caught.value.message


def test_kept_groups_grow_with_columns_answers_and_groups(make_config):
    def size(options, **sections):
        config = TrainerConfig.model_validate(
            make_config(algorithm={"name": "ppo", "options": options, **sections})
        )
        return kept_bytes(config, build_algorithm(config.algorithm))

    assert build_algorithm(TrainerConfig.model_validate(ppo(make_config)).algorithm).columns == (
        OLD_LOG_PROBS,
        REFERENCE_LOG_PROBS,
        VALUES,
    )
    assert size({"whiten": False}) == 0, "learned from as they come"
    assert size(PASSES) < size({**PASSES, **KL})
    assert size(PASSES, prompts_per_step=6) == 2 * size(PASSES)


def test_a_refusal_says_what_takes_the_memory():
    needed = {"masters": GIB, "hold": 3 * GIB, "reference": 2 * GIB, "kept groups": 0}
    check_room(needed, Room("host memory", 6 * GIB, 8 * GIB))
    with pytest.raises(Refusal) as caught:
        check_room(needed, Room("host memory", 5 * GIB, 8 * GIB))
    assert caught.value.reason == "MEMORY_SHORT"
    assert "at least 6.00 GiB of host memory, and 5.00 of 8.00 GiB are free" in caught.value.message
    assert "(hold 3.00, reference 2.00, masters 1.00)" in caught.value.message
    with pytest.raises(Refusal) as caught:
        check_room(needed, Room("GPU memory", 4 * GIB, 4 * GIB))
    assert caught.value.reason == "INVALID" and "trainer.reference" in caught.value.message


@pytest.mark.parametrize("part", ["reference", "hold", "kept groups"])
async def test_a_run_is_refused_for_each_part_that_does_not_fit(client, make_config, monkeypatch, part):
    """Memory for all but that part: before anything is loaded, and the next restore may go well."""
    config = ppo(make_config)
    needs = planned(config).host
    without = sum(needs.values()) - needs[part] - needs[COPY]  # which no run has to have
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(2 * GIB, without))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open(config)
    assert reason_of(caught.value) == "MEMORY_SHORT"
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert part in caught.value.details()
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(2 * GIB, sum(needs.values())))
    restored = await client.restore("", 1)
    assert restored.figures["planned_host_bytes"] == sum(needs.values())
