"""Scorers under leases: where their processes compute, and that none computes without a lease."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest
from headrace_reward.config import PoolSettings
from headrace_reward.runs import Item, Runs, Status
from headrace_schema.sections.scoring import RewardSection

GPU, OTHER = "GPU-8f2a/gpu:0", "GPU-11c4/gpu:1"
SEEN = {"GPU-8f2a": 1.0, "GPU-11c4": 2.0, "": 0.0}
TELLS = """
import os, time
SEEN = {SEEN}
def score(completion):
    time.sleep(4 if completion == "slow" else 0)
    cores, seen = len(os.sched_getaffinity(0)), SEEN[os.environ["CUDA_VISIBLE_DEVICES"]]
    return {{"seen": seen, "process": os.getpid(), "cores": cores, "score": 1.0}}
"""


@pytest.fixture
async def runs(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS.format(SEEN=SEEN))
    made = Runs(tmp_path, PoolSettings(children=1))
    section = RewardSection.model_validate({"scorers": [{"name": "tells.py:score"}], "timeout_s": 20})
    await made.open("runs/a", section, leased=True)
    yield made
    await made.close_all()


def asked(runs, ordinal, completion="2"):
    answer = {"prompt": "", "completion": completion, "reference": "", "metadata": {}}
    return runs.get("runs/a").score(Item(ordinal, 0, 1, False, False, answer))


async def told(future):
    found = await asyncio.wait_for(future, 30)
    assert found.status is Status.OK, found.detail
    return {name.rpartition("/")[2]: value for name, value in found.parts.items()}


def lease(runs, epoch, *devices):
    held = {epoch}
    runs.lease(epoch, "runs/a", devices, lambda: epoch in held)
    return held


async def test_nothing_is_scored_without_a_lease_and_gpus_are_seen_under_theirs_alone(runs):
    waits = asked(runs, 1)
    await asyncio.sleep(0.3)
    assert not waits.done()
    lease(runs, 1, GPU)
    first = await told(waits)
    assert first["seen"] == 1.0
    again = await told(asked(runs, 2))
    assert again["process"] == first["process"], "it stays loaded while the lease lasts"
    await runs.settle(1, 5.0)
    assert not psutil.pid_exists(int(first["process"])), "its memory is proven free with its process"
    waits = asked(runs, 3)
    await asyncio.sleep(0.3)
    assert not waits.done()
    lease(runs, 2, OTHER)
    assert (await told(waits))["seen"] == 2.0


async def test_a_lease_that_ends_in_the_middle_costs_no_answer(runs):
    lease(runs, 1, GPU)
    before = await told(asked(runs, 1))
    slow = asked(runs, 2, "slow")
    for epoch in (1, 2, 3):  # As often as would make an answer whose process died count as failed.
        await asyncio.sleep(0.2 if epoch == 1 else 1.5)
        await runs.settle(epoch, 0.05)
        assert not slow.done() and not psutil.pid_exists(int(before["process"]))
        lease(runs, epoch + 1, GPU)
    assert (await told(slow))["process"] != before["process"]


async def test_a_lease_that_is_not_renewed_holds_answers_back(runs):
    held = lease(runs, 1, GPU)
    await told(asked(runs, 1))
    held.clear()
    waits = asked(runs, 2)
    await asyncio.sleep(0.3)
    assert not waits.done()
    held.add(1)
    await told(waits)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core alone")
async def test_on_cpu_slots_a_process_is_bound_to_its_cores_and_stays(runs):
    cores = sorted(os.sched_getaffinity(0))
    lease(runs, 1, f"boot/cpu:{cores[0]}")
    first = await told(asked(runs, 1))
    assert (first["seen"], first["cores"]) == (0.0, 1)
    await runs.settle(1, 5.0)
    lease(runs, 2, *(f"boot/cpu:{core}" for core in cores[:2]))
    second = await told(asked(runs, 2))
    assert second["process"] == first["process"] and second["cores"] == 2
