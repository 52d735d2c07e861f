"""A whole run whose engine spans four of eight GPUs, which are found in a tree of files: what is leased to whom."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from headrace_coordinator.domain import events as ev
from headrace_servicekit.lease.gpus import Nvidia, find_gpus
from headrace_simulation.fleet.rollout import Rollout
from scene import Scene, ends, trained_once

DRIVER_FILE = "GPU UUID: \t GPU-{0}\nDevice Minor: \t {0}\n"


@pytest.fixture
def gpus(tmp_path):
    """Names of a machine's eight GPUs, of which CUDA_VISIBLE_DEVICES hides two."""
    for number in range(8):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{number:02}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(DRIVER_FILE.format(number))
    machine = Nvidia(tmp_path, lambda *asked: "")
    return tuple(gpu.name for gpu in find_gpus({"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2"}, [machine]))


class GpuScene(Scene):
    """Rollout and trainer see these GPUs."""

    gpus: tuple[str, ...] = ()
    by_host: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    async def bear(self, kind, name, host):
        await super().bear(kind, name, host)
        if kind != "reward":
            next(reversed(self.instances.values())).devices = self.by_host.get(host, self.gpus)


async def nothing(scene):
    """No trouble."""


@pytest.mark.parametrize(("mode", "apart"), [("collocated", False), ("disaggregated", True)])
def test_an_engine_leases_the_gpus_that_it_spans_and_a_rank_one(gpus, mode, apart):
    options = {"engine": "vllm", "engine_options": {"tensor_parallel_size": 4}}
    scene = GpuScene(
        nothing,
        steps=3,
        rollout=options,
        placement={"mode": mode, "flow": None, "memory": None, "share": False},
    )
    scene.gpus = gpus
    (state,) = ends(scene).values()
    (run,) = {event.run for event in scene.log(ev.StepCommitted)}
    assert state == "SUCCEEDED" and trained_once(scene, run)
    held = {True: set(), False: set()}
    for event in scene.log(ev.LeaseGranted):
        held[isinstance(scene.instances[event.incarnation], Rollout)].add(tuple(event.devices))
    (engine,), (rank,) = held[True], held[False]
    assert len(engine) == 4 and len(rank) == 1 and {*engine, *rank} <= {*gpus}
    assert (rank[0] in engine) is not apart


@pytest.mark.parametrize("victim", [None, 0, 1], ids=["nobody", "the leader", "the follower"])
def test_an_engine_over_two_hosts_leases_the_gpus_of_both_and_is_made_anew_when_a_part_dies(
    monkeypatch, victim
):
    """Rank 0 alone makes answers; each part holds its half; a part that dies is replaced, and both stand together."""
    makers = []
    generate = Rollout.Generate

    def watched(self, requests):
        makers.append(self.rank)
        return generate(self, requests)

    monkeypatch.setattr(Rollout, "Generate", watched)

    async def play(scene):
        if victim is not None:
            await scene.until(lambda: len(scene.log(ev.StepCommitted)) >= 2)
            (run,) = {event.run for event in scene.log(ev.StepCommitted)}
            grant = scene.coordinator.event_log.state.runs[run].grant
            await scene.kill(grant.rollouts[victim])

    options = {"engine": "vllm", "instances": 2, "engine_options": {"tensor_parallel_size": 4, "hosts": 2}}
    scene = GpuScene(
        play,
        steps=8,
        rollout=options,
        placement={"mode": "collocated", "flow": None, "memory": None, "share": False},
    )
    scene.hosts = ["h1", "h2"]
    scene.by_host = {host: tuple(f"GPU-{host}{n}/gpu:{n}" for n in range(2)) for host in scene.hosts}
    scene.counts = {"rollout": 2, "trainer": 1}
    (state,) = ends(scene).values()
    (run,) = {event.run for event in scene.log(ev.StepCommitted)}
    assert state == "SUCCEEDED" and trained_once(scene, run)
    assert makers and not any(makers), "a follower was asked for answers"
    assert {each.rank for each in scene.instances.values() if isinstance(each, Rollout)} == {0, 1}
    held = {}
    for event in scene.log(ev.LeaseGranted):
        instance = scene.instances[event.incarnation]
        if isinstance(instance, Rollout):
            held.setdefault(instance.host, set()).update(event.devices)
            assert len(event.devices) == 2
    assert held == {host: {*gpus} for host, gpus in scene.by_host.items()}
