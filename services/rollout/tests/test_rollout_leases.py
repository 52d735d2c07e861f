"""Authority over an instance: epochs, leases, and what a grant or its end does."""

from __future__ import annotations

import os

import pytest
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from rollout_calls import HEADER, RUN, refused


async def test_a_stale_epoch_or_a_missing_lease_changes_nothing(rollout, assignments, publish):
    stale = common_pb2.CommandHeader(run=RUN, coordinator_epoch=0, lease_epoch=1)
    await refused(rollout.stub.Pause(rollout_pb2.PauseRequest(header=stale)), "EPOCH_STALE")
    rollout.instance.fence.release(1)
    await refused(rollout.install(publish(tiny_model(seed=4), 2)), "EPOCH_STALE", "lease")
    for groups in ([], assignments):
        call = await rollout.generate(groups).start()
        await refused(call.read_all(), "EPOCH_STALE", "lease")


async def test_a_revoked_lease_sends_partials_and_frees_the_device(rollout, assignments):
    call = await rollout.generate(assignments, chunk_tokens=1, max_new_tokens=110).start()
    await call.read_until(lambda call: call.chunks)
    assert await rollout.instance.on_revoke(1, 1.0) > 0
    await call.read_all()
    assert call.partials
    again = rollout.generate(assignments)
    await refused((await again.start()).read_all(), "POLICY_MISMATCH", "none is installed")
    # The next lease begins as the first one did, also when the engine was suspended before.
    for _ in range(2):
        await rollout.install(rollout.last)
        assert len(await (await rollout.generate(assignments).start()).read_all()) == 12
        await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
        await rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER))
        await rollout.instance.on_revoke(1, 1.0)


async def test_a_lease_that_is_not_renewed_makes_no_more_tokens_until_it_is(rollout, assignments):
    call = await rollout.generate(assignments, half_close=False, chunk_tokens=1, max_new_tokens=110).start()
    await call.read_until(lambda call: call.chunks)
    rollout.instance.fence.release(1)
    await rollout.instance.on_quiesce(1)
    await call.assign(assignments)
    await refused(call.read_all(), "EPOCH_STALE", "lease")
    assert call.partials
    rollout.instance.fence.grant(1)
    assert len(await (await rollout.generate(assignments).start()).read_all()) == 12


async def test_a_grant_sets_cores_and_threads_of_the_decoding_thread(rollout):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    try:
        lease = common_pb2.Lease(epoch=2, devices=[f"host/cpu:{core}" for core in cores[:2]])
        await rollout.instance.on_grant(lease)
        assert rollout.decoding_threads() == 2
        await rollout.instance.on_revoke(2, 1.0)
        assert rollout.decoding_threads() == 1
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
