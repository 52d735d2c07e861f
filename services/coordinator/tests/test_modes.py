"""The ways to carry a mode out, on an imaginary fleet: who stays loaded, and when learning begins."""

from __future__ import annotations

import asyncio

import pytest
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_coordinator.domain import events as ev
from headrace_simulation.fleet.network import SimulatedInstanceClient
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.fleet.trainer import Trainer
from scene import Scene, ends, trained_once

STEPS = 4
TURNS = STEPS + 1
"""Once more after the last step, whose version is installed too."""


async def nothing(scene):
    """No trouble."""


def lived(gpus=False, rollout=None, trainer=None, **placement):
    scene = Scene(
        nothing,
        steps=STEPS,
        algorithm={"prompts_per_step": 6, "group_size": 4, "options": {}},
        rollout=rollout or {},
        trainer=trainer or {},
        placement={"flow": None, "memory": None, "share": False, **placement},
    )
    scene.gpus = gpus
    (state,) = ends(scene).values()
    (run,) = {event.run for event in scene.log(ev.StepCommitted)}
    assert state == "SUCCEEDED" and trained_once(scene, run)
    return scene


@pytest.fixture
def whole_batch(monkeypatch):
    """The algorithm learns from its whole batch at the commit."""
    opened = Trainer.OpenRun

    async def batched(self, request):
        answer = await opened(self, request)
        answer.barrier = trainer.BARRIER_BATCH
        return answer

    monkeypatch.setattr(Trainer, "OpenRun", batched)


@pytest.fixture
def called(monkeypatch):
    """Names of the unary calls that instances got."""
    call, names = SimulatedInstanceClient.call, []

    async def spied(port, method, request, timeout):
        names.append(method)
        return await call(port, method, request, timeout)

    monkeypatch.setattr(SimulatedInstanceClient, "call", spied)
    return names


@pytest.mark.parametrize(("memory", "moves"), [("resident", False), ("offloaded", True), (None, True)])
def test_sides_that_stay_loaded_give_nothing_back(called, memory, moves):
    scene = lived(mode="collocated", memory=memory)
    assert (called.count("Suspend") >= 2 * TURNS) == moves == bool(called.count("Suspend"))
    assert called.count("InstallPolicy") >= TURNS, "each version is installed"
    stages = {lease.stage for lease in scene.log(ev.LeaseGranted)}
    assert stages == {"generate", "learn"} and len(scene.log(ev.LeaseGranted)) >= 2 * TURNS, "leases as ever"


def test_in_hybrid_rollouts_stay_loaded_unless_the_spec_says_otherwise(called):
    lived(mode="hybrid")
    assert not called.count("Suspend")
    lived(mode="hybrid", memory="offloaded")
    assert called.count("Suspend")


def test_on_gpus_the_ranks_on_the_rollouts_devices_sleep_while_these_generate(called):
    """And the group, which spans all of them, learns once the answers are complete."""
    scene = lived(gpus=True, rollout={"instances": 2}, trainer={"ranks": 3, "helpers": 0}, mode="hybrid")
    devices = {stage: {} for stage in ("generate", "learn")}
    for lease in scene.log(ev.LeaseGranted):
        devices[lease.stage].setdefault(*lease.devices, []).append(lease)
    shared = devices["generate"].keys() & devices["learn"].keys()
    assert len(devices["generate"]) == len(shared) == 2 and len(devices["learn"]) == 3
    (own,) = devices["learn"].keys() - shared
    assert len(devices["learn"][own]) == 1, "nobody else wants that device: its rank stays loaded"
    assert all(len(devices["learn"][device]) >= TURNS for device in shared)
    assert not early(scene) and called.count("Suspend") == 2 * called.count("Pause")


def early(scene):
    """Steps in which something was learned before the last group settled."""
    found, learned = set(), None
    for event in scene.store.log:
        if isinstance(event, ev.StepOpened):
            learned = False
        elif isinstance(event, ev.GroupsAccumulated):
            learned = True
        elif isinstance(event, ev.GroupsSettled) and learned:
            found.add(scene.store.log.index(event))
    return len(found)


@pytest.mark.parametrize("mode", ["disaggregated", "hybrid"])
def test_an_infer_pass_is_made_beside_generation(whole_batch, mode):
    assert early(lived(mode=mode))
    assert not early(lived(mode=mode, flow="sequential"))


def test_a_batch_is_learned_from_on_all_devices_in_hybrid(whole_batch):
    for event in lived(mode="hybrid").log(ev.StepCommitted):
        works = {
            stage: {device for device, stages in event.view["devices"].items() if stage in stages}
            for stage in ("generate", "learn")
        }
        assert works["generate"] < works["learn"]


@pytest.fixture
def given(monkeypatch):
    """By prompt, the devices that the trainer had when it was first given the group."""
    learn, found = Trainer._learn, {}

    async def spied(self, request, revoked):
        for group in request.groups:
            found.setdefault(group.prompt_ordinal, len(self.using()))
        async for outcome in learn(self, request, revoked):
            yield outcome

    monkeypatch.setattr(Trainer, "_learn", spied)
    return found


def test_what_is_left_after_the_last_answer_is_given_to_all_devices_in_hybrid(given):
    last, settled = [], None
    for event in lived(mode="hybrid").store.log:
        if isinstance(event, ev.GroupsSettled):
            settled = event.groups[-1][0]
        elif isinstance(event, ev.GroupDropped):
            settled = None  # It was not the last of the step's groups to end.
        elif isinstance(event, ev.StepCommitted) and settled is not None:
            last.append((given[settled], len(event.view["devices"])))
    # Not in all: what settled before the last answer of a step may be the last to settle too.
    assert sum(had == every for had, every in last) > len(last) / 2, last
    assert min(given.values()) < max(given.values()), "the others are learned while answers are made"


def test_prefill_that_rollouts_tell_of_is_a_part_of_generating(called):
    for step in lived(mode="disaggregated").log(ev.StepCommitted):
        assert 0.0 < step.view["stage_s"]["prefill"] < step.view["stage_s"]["generate"]
        devices = {device for device, stages in step.view["devices"].items() if "prefill" in stages}
        assert devices and devices == {
            d for d, stages in step.view["devices"].items() if "generate" in stages
        }


@pytest.mark.parametrize("mode", ["disaggregated", "collocated"])
def test_rollouts_generate_while_the_trainer_copies_its_state_where_they_have_devices_of_their_own(
    monkeypatch, mode
):
    """And no step begins at the trainer before the copy is taken."""
    save, begin, install = Trainer.SaveCheckpoint, Trainer.BeginStep, Rollout.InstallPolicy
    told = []

    async def slow(self, request):
        told.append("save")
        await asyncio.sleep(5)
        told.append("saved")
        return await save(self, request)

    async def begun(self, request):
        told.append("begin")
        return await begin(self, request)

    async def installed(self, request):
        told.append("install")
        return await install(self, request)

    monkeypatch.setattr(Trainer, "SaveCheckpoint", slow)
    monkeypatch.setattr(Trainer, "BeginStep", begun)
    monkeypatch.setattr(Rollout, "InstallPolicy", installed)
    scene = Scene(
        nothing,
        steps=3,
        placement={"mode": mode, "flow": None, "memory": None, "share": False},
        checkpoint={"enabled": True, "interval_steps": 1},
    )
    (state,) = ends(scene).values()
    assert state == "SUCCEEDED"
    (run,) = {event.run for event in scene.log(ev.StepCommitted)}
    assert trained_once(scene, run)
    first = told.index("save")
    second = first + told[first:].index("saved")
    assert ("install" in told[first:second]) == (mode == "disaggregated")
    assert "begin" not in told[first:second]
