"""What a lease of the run means for its pools: where their processes compute, who may step, and what a revoke ends."""

from __future__ import annotations

import asyncio
import os

import grpc
import psutil
import pytest
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.lease.devices import boot_id
from headrace_servicekit.rpc.errors import reason_of

OK = simulator_pb2.OUTCOME_STATUS_OK
RUN = "runs/test"
CORE = min(os.sched_getaffinity(0))
SLOT = f"{boot_id()}/cpu:{CORE}"
GPU = "GPU-8f2a/gpu:0"

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core binds everybody")


async def granted(instance, epoch, devices, run=RUN, memory_part=0.0):
    lease = common_pb2.Lease(epoch=epoch, run=run, stage="simulate", devices=devices, memory_part=memory_part)
    await instance.on_grant(lease)
    instance.fence.grant(epoch)


async def revoked(instance, epoch, notice_s=1.0):
    memory = await instance.on_revoke(epoch, notice_s)
    instance.fence.release(epoch)
    return memory


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "headrace_simulator.child" in each.cmdline()]


def cores() -> set[tuple[int, ...]]:
    """Where the threads of the children may compute."""
    threads = [thread.id for child in children() for thread in child.threads()]
    return {tuple(sorted(os.sched_getaffinity(thread))) for thread in threads}


@pytest.fixture
async def pool(simulator, environment_file, instance):
    """A pool of two environments in two processes that needs a lease, which is not held yet."""
    return await simulator.open(f"{environment_file}:make_env", count=2, leased=True)


async def test_a_pool_that_needs_a_lease_is_opened_before_it_and_steps_under_it_alone(pool, instance):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pool.reset()
    assert reason_of(raised.value) == "EPOCH_STALE"
    await granted(instance, 7, [SLOT])
    pool.header.lease_epoch = 7
    assert (await pool.reset()).status == OK
    await revoked(instance, 7)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pool.act([0.0, 0.0])
    assert reason_of(raised.value) == "EPOCH_STALE"


async def test_its_processes_compute_on_the_cores_of_the_lease_from_one_lease_to_the_next(
    pool, instance, arrays
):
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    assert cores() == {everywhere}
    await granted(instance, 7, [SLOT])
    pool.header.lease_epoch = 7
    await pool.send(pool.reset_operation(0), pool.reset_operation(1))
    assert cores() == {(CORE,)} and len(children()) == 2
    await pool.act([7.0, 0.0])  # Its process ends.
    await pool.reset()
    assert cores() == {(CORE,)}, "a process that is made again computes there too"
    before = {child.pid for child in children()}
    await revoked(instance, 7)
    await granted(instance, 8, [f"{boot_id()}/cpu:{core}" for core in everywhere])
    pool.header.lease_epoch = 8
    outcomes = await pool.send(pool.action_operation([0.0, 0.0], 0), pool.action_operation([0.0, 0.0], 1))
    assert {arrays(outcome)["steps"].item() for outcome in outcomes.values()} == {1}
    assert cores() == {everywhere}
    assert {child.pid for child in children()} == before, "the episodes went on"


async def test_another_runs_lease_ends_nothing_here_and_pools_without_one_go_on(
    pool, simulator, environment_file, instance
):
    await granted(instance, 7, [SLOT])
    await granted(instance, 8, [f"{boot_id()}/cpu:{CORE + 1}"], run="runs/other")
    pool.header.lease_epoch = 7
    await pool.reset()
    free = await simulator.open(f"{environment_file}:make_env")
    await free.reset()
    working = asyncio.create_task(pool.act([4.0, 0.0]))
    idle = asyncio.create_task(free.act([4.0, 0.0]))
    await revoked(instance, 8, notice_s=0.0)
    assert ((await working).status, (await idle).status) == (OK, OK)


async def test_a_gpu_that_is_given_back_has_no_process_of_the_run(pool, instance, arrays):
    await granted(instance, 7, [GPU], memory_part=0.4)
    pool.header.lease_epoch = 7
    await pool.reset(0)
    told = [child.environ() for child in children() if "CUDA_VISIBLE_DEVICES" in child.environ()]
    assert {each["CUDA_VISIBLE_DEVICES"] for each in told} == {"GPU-8f2a"}
    assert {each["HEADRACE_MEMORY_PART"] for each in told} == {"0.2"}, "two processes divide the lease's part"
    memory = await revoked(instance, 7)
    assert not children() and memory.used_bytes == 0
    await granted(instance, 8, [GPU])
    pool.header.lease_epoch = 8
    lost = await pool.act([0.0, 0.0])
    assert lost.status == simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
    assert arrays(await pool.reset())["steps"] == 0
