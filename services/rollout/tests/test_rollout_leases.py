"""Authority over an instance: epochs, leases, and what a grant or its end does."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from headrace_rollout import service
from headrace_rollout.engines.base import Policy, Scope, Weights
from headrace_rollout.engines.samples import Distribution
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.rpc.errors import ServiceError
from rollout_calls import HEADER, RUN, refused


async def test_a_stale_epoch_or_a_missing_lease_changes_nothing(rollout, assignments, publish):
    stale = common_pb2.CommandHeader(run=RUN, coordinator_epoch=0, lease_epoch=1)
    await refused(rollout.stub.Pause(rollout_pb2.PauseRequest(header=stale)), "EPOCH_STALE")
    rollout.instance.fence.release(1)
    await refused(rollout.install(publish(tiny_model(seed=4), 2)), "EPOCH_STALE", "lease")
    for groups in ([], assignments):
        call = await rollout.generate(groups).start()
        await refused(call.read_all(), "EPOCH_STALE", "lease")


async def test_a_lease_of_a_part_of_a_gpus_memory_bounds_what_torch_takes_there(rollout, monkeypatch):
    taken = {}
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, at: taken.update({at: part})
    )
    monkeypatch.setattr(
        service, "devices_of", lambda names: tuple(torch.device("cuda", i) for i in range(len(names)))
    )
    rollout.servicer._run = None
    for part, bound in ((0.6, 0.6), (0.0, 1.0)):
        lease = common_pb2.Lease(
            epoch=3, run=RUN, stage="generate", devices=["GPU-8f2a/gpu:0"], memory_part=part
        )
        await rollout.instance.on_grant(lease)
        assert taken == {torch.device("cuda", 0): bound}


async def test_a_revoked_lease_sends_partials_and_frees_the_device(rollout, assignments):
    call = await rollout.generate(assignments, chunk_tokens=1, max_new_tokens=110).start()
    await call.read_until(lambda call: call.chunks)
    memory = await rollout.instance.on_revoke(1, 10.0)
    assert memory.free_bytes > 0 and memory.used_bytes > 0
    await call.read_all()
    assert call.partials and call.revoked
    again = rollout.generate(assignments)
    await refused((await again.start()).read_all(), "POLICY_MISMATCH", "none is installed")
    # The next lease begins as the first one did, also when the engine was suspended before.
    for _ in range(2):
        await rollout.install(rollout.last)
        assert len(await (await rollout.generate(assignments).start()).read_all()) == 12
        await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
        await rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER))
        await rollout.instance.on_revoke(1, 1.0)


async def test_an_engine_that_may_keep_its_memory_goes_on_without_an_install(rollout, assignments):
    call = await rollout.generate(assignments, chunk_tokens=1, max_new_tokens=110).start()
    await call.read_until(lambda call: call.chunks)
    await rollout.instance.on_revoke(1, 10.0, True)
    await call.read_all()
    assert call.partials and call.revoked, "its samples end all the same"
    engine = rollout.servicer._run.engine
    assert await engine._call(torch.get_num_threads) == 1, "and it holds no slots"
    assert len(await (await rollout.generate(assignments).start()).read_all()) == 12
    await rollout.instance.on_revoke(1, 1.0, True)
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER))
    again = rollout.generate(assignments)
    await refused((await again.start()).read_all(), "POLICY_MISMATCH", "none is installed")


async def test_a_stream_goes_on_under_another_lease(rollout, assignments):
    call = await rollout.generate([], half_close=False, chunk_tokens=1, max_new_tokens=110).start()
    rollout.instance.fence.grant(2)
    await call.reauthorize(2)
    await call.assign(assignments)
    await call.read_until(lambda call: call.chunks)
    # The streams of the old lease end, and this is none of them any more.
    await rollout.servicer._run.revoke_streams(1, 5.0)
    rollout.instance.fence.release(1)
    await call.call.done_writing()
    assert len(await call.read_all()) == 12 and not call.revoked and not call.partials


async def test_a_stream_takes_no_lease_that_is_not_held(rollout, assignments):
    call = await rollout.generate([], half_close=False).start()
    await call.reauthorize(2)
    await refused(call.read_all(), "EPOCH_STALE", "lease epoch 2")


async def test_no_token_is_made_once_the_lease_has_lapsed(rollout, assignments):
    """Nobody tells the engine: it asks at every round."""
    call = await rollout.generate(assignments, half_close=False, chunk_tokens=1, max_new_tokens=110).start()
    await call.read_until(lambda call: call.chunks)
    rollout.instance.fence.grant(1, 0.0)
    await call.read_until(lambda call: len(call.partials) + len(call.finished()) == 12)
    assert not rollout.engine._decoder.living
    rollout.instance.fence.grant(1)
    await call.assign(assignments)
    await call.call.done_writing()
    await call.read_all()
    assert call.partials and len(call.partials) + len(call.chunks) >= 24


@pytest.mark.parametrize("call", ["install", "wake", "score"])
async def test_what_waits_for_the_engine_s_thread_asks_its_lease_again(rollout, publish, call):
    engine, fence = rollout.engine, rollout.instance.fence
    acts = {
        "install": lambda authority: engine.install(
            Policy(9, "nine"), Weights((), memoryview(b"")), authority
        ),
        "wake": lambda authority: engine.wake(Scope.ALL, authority),
        "score": lambda authority: engine.score([([1, 2], 1)], Distribution(), authority),
    }
    gate = threading.Event()
    engine._executor.submit(gate.wait, 60)
    authority = rollout.servicer._authority(HEADER)
    authority()
    waiting = asyncio.create_task(acts[call](authority))
    await asyncio.sleep(0)
    fence.grant(1, 0.0)
    gate.set()
    with pytest.raises(ServiceError, match="LEASE_QUIESCED"):
        await waiting
    assert engine.policy.number == 1


async def test_a_gpu_that_is_not_there_is_refused(rollout):
    with pytest.raises(ServiceError, match="GPU-8f2a is leased and this process sees no GPU"):
        await rollout.instance.on_grant(common_pb2.Lease(epoch=2, devices=["GPU-8f2a/gpu:0"]))


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
        assert rollout.decoding() == (2, set(cores[:2]))
        await rollout.instance.on_revoke(2, 1.0)
        assert rollout.decoding()[0] == 1
        for core in cores[:2]:
            lease = common_pb2.Lease(epoch=3 + core, devices=[f"host/cpu:{core}"])
            await rollout.instance.on_grant(lease)
            assert rollout.decoding() == (1, {core})
            await rollout.instance.on_revoke(lease.epoch, 1.0)
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


@pytest.mark.parametrize(("same_host", "kept"), [(True, True), (False, True), (False, False)])
async def test_a_moved_sample_s_cache_is_taken_by_the_instance_that_goes_on(
    rollout, new_rollout, assignments, monkeypatch, same_host, kept
):
    """From the host's tmpfs, else from the instance that has it; without it the context is computed again."""
    other = await new_rollout("rollout-other")
    await other.open(rollout.model_path, max_concurrency=16)
    await other.install(rollout.last)
    if not same_host:
        monkeypatch.setattr(BlobReader, "_from_file", lambda reader, reference: None)
    whole = await (await rollout.generate(assignments, max_new_tokens=60).start()).read_all()
    call = await rollout.generate(assignments, chunk_tokens=1, max_new_tokens=60).start()
    await call.read_until(lambda call: call.chunks)
    await rollout.instance.on_revoke(1, 10.0)
    await call.read_all()
    moved = {(each.sample.prompt_ordinal, each.sample.sample_index): each.state for each in call.partials}
    assert moved and all(state.HasField("cache") for state in moved.values())
    if not kept:
        for state in moved.values():
            rollout.servicer._caches.blobs.release(state.cache.blob)
    groups = []
    for group in assignments:
        rest = [each for each in group.samples if (group.prompt_ordinal, each.sample_index) in moved]
        for sample in rest:
            sample.resume.CopyFrom(moved[group.prompt_ordinal, sample.sample_index])
        if rest:
            groups.append(
                rollout_pb2.GroupAssignment(
                    prompt_ordinal=group.prompt_ordinal, prompt=group.prompt, samples=rest
                )
            )
    finished = await (await other.generate(groups, max_new_tokens=60).start()).read_all()
    assert {key: ids(body) for key, body in finished.items()} == {key: ids(whole[key]) for key in moved}
    assert (other.engine.figures.prefill_tokens == 0) is kept


def ids(body):
    return [token for segment in body.branches[0].segments for token in segment.tokens.token_ids]
