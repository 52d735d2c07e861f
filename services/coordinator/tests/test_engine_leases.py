"""A whole run whose engine spans four of eight GPUs, which are found in a tree of files: what is leased to whom."""

from __future__ import annotations

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

    async def bear(self, kind, name, host):
        await super().bear(kind, name, host)
        if kind != "reward":
            next(reversed(self.instances.values())).devices = self.gpus


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
