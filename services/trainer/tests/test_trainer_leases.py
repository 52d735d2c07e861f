"""A lease governs where the effect happens: on the compute thread, after the queue, and in every rank's round."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_modelkit import threads
from headrace_servicekit.memory import allocator
from headrace_servicekit.rpc.errors import ServiceError, reason_of
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.ranks.rounds import Rounds


def test_what_is_moved_elsewhere_and_back_goes_on_as_if_nothing_was(make_backend, accumulate, sequences):
    """Suspend on a GPU, with a copy for the move: masters, open and reduced gradients, moments."""
    commits = []
    for moves in (False, True):
        backend = make_backend()
        for step in range(3):
            backend.zero()
            accumulate(backend, [sequences(step)], 48)
            if moves:
                old = {tensor.data_ptr() for tensor in backend._sharded.shards().values()}
                backend.move(lambda tensor: tensor.clone())
                new = {tensor.data_ptr() for tensor in backend._sharded.shards().values()}
                assert not old & new
            assert backend.gradient_is_finite()
            if moves:
                backend.move(lambda tensor: tensor.clone())
            accumulate(backend, [sequences(step + 10)], 48)
            report = backend.commit(7.0, 1e-3)
            commits.append((report.grad_norm, [value.sum().item() for _, value in backend.weights()]))
    assert commits[:3] == commits[3:]


async def test_cores_and_threads_of_a_round_are_the_lease_s(client, make_settled):
    cores = sorted(os.sched_getaffinity(0))
    seen = []

    def look() -> None:
        seen.append((torch.get_num_threads(), os.sched_getaffinity(0)))

    version = (await client.open()).version
    servicer = servicer_of(client)
    try:
        for held in (cores[:2], cores[:1], cores[-1:]):
            await client.instance.on_grant(
                common_pb2.Lease(epoch=12, devices=[f"b/cpu:{core}" for core in held])
            )
            await client.infer([make_settled(0, version=version).members[0].trajectory])
            await servicer._compute(look)
            assert seen[-1] == (len(held), set(held))
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        torch.set_num_threads(1)


async def test_what_is_measured_of_threads_is_of_one_run(client, make_settled, monkeypatch):
    cores, clock, seen, infer = sorted(os.sched_getaffinity(0)), [0.0], [], FsdpBackend.infer

    def passed() -> float:
        clock[0] += torch.get_num_threads()  # two threads take twice as long as one
        return clock[0]

    def noted(backend: FsdpBackend, rows: Any, columns: Any) -> object:
        seen.append(torch.get_num_threads())
        return infer(backend, rows, columns)

    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=passed))
    monkeypatch.setattr(FsdpBackend, "infer", noted)
    lease = common_pb2.Lease(epoch=12, devices=[f"b/cpu:{core}" for core in cores[:2]])
    try:
        version = (await client.open()).version
        await client.instance.on_grant(lease)
        for _ in range(8):
            await client.infer([make_settled(0, version=version).members[0].trajectory])
        assert seen[-2:] == [1, 1]
        version = (await client.reopen()).version
        await client.infer([make_settled(0, version=version).members[0].trajectory])
        assert seen[-1] == 2
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        torch.set_num_threads(1)


async def test_a_batch_grows_with_the_ranks_that_there_are_not_with_those_asked_for(client, make_config):
    config = make_config()
    config["trainer"] = {**config.get("trainer", {}), "ranks": 4, "micro_batch_tokens": 100}
    await client.open_run(config)
    await client.join(1)
    assert servicer_of(client)._queue._batch_tokens() == 200, (
        "two micro-batches for the one rank that has joined"
    )


async def test_a_gpu_that_is_not_there_is_refused(client):
    with pytest.raises(ServiceError, match="GPU-8f2a is leased and this process sees no GPU"):
        await client.instance.on_grant(common_pb2.Lease(epoch=2, devices=["GPU-8f2a/gpu:0"]))


@pytest.fixture
def held_learn(monkeypatch):
    """Learn waits on the compute thread, before it has done anything: (reached, go on)."""
    reached, gate = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "trainer.learn" and not gate.is_set():
            reached.set()
            assert gate.wait(60)

    monkeypatch.setattr("headrace_trainer.session.session.failpoint_sync", wait)
    yield reached, gate
    gate.set()


async def refusal(call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return reason_of(caught.value)


def servicer_of(client):
    return client.instance._services[0][1]


async def queued_behind(client, reached, call) -> asyncio.Task:
    """`call`, once it has been admitted and waits for the compute thread, which is at `reached`."""
    waiting = servicer_of(client)._compute.pool._work_queue
    async with asyncio.timeout(120):
        assert await asyncio.to_thread(reached.wait, 30)
        task = asyncio.create_task(call)
        while waiting.empty():  # noqa: ASYNC110  # another thread's queue
            await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize(
    ("lapse", "reason"),
    [
        (lambda fence: fence.grant(11, 0.0), "LEASE_QUIESCED"),
        (lambda fence: fence.release(11), "EPOCH_STALE"),
    ],
)
async def test_a_commit_that_waited_asks_its_lease_again(
    client, held_learn, make_settled, settled_digest, lapse, reason
):
    reached, gate = held_learn
    version = (await client.open()).version
    groups = [make_settled(0, version=version)]
    await client.begin(0, 1, 1, 2)
    learning = asyncio.create_task(client.learn(0, 1, groups))
    committing = await queued_behind(client, reached, client.commit(0, 1, 1, 2, settled_digest([])))
    lapse(client.instance.fence)
    gate.set()
    assert await refusal(learning) == reason
    assert await refusal(committing) == reason
    client.instance.fence.grant(11)
    state = await client.state()
    assert state.phase == pb.STEP_PHASE_ACCUMULATING and not state.accumulated_prompts
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_COMMITTED and reply.version.number == 2


async def test_a_restore_that_waited_asks_its_lease_again(client, held_learn, make_settled):
    reached, gate = held_learn
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    learning = asyncio.create_task(client.learn(0, 1, [make_settled(0, version=version)]))
    restoring = await queued_behind(client, reached, client.restore("", 5))
    client.instance.fence.grant(11, 0.0)
    gate.set()
    assert await refusal(learning) == await refusal(restoring) == "LEASE_QUIESCED"
    assert (await client.state()).version.number == 1


async def test_what_waits_behind_a_suspend_finds_the_trainer_suspended(client, held_learn, make_settled):
    reached, gate = held_learn
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    learning = asyncio.create_task(client.learn(0, 1, [make_settled(0, version=version)]))
    suspending = await queued_behind(client, reached, client.suspend())
    late = asyncio.create_task(client.learn(0, 1, [make_settled(1, version=version)]))
    gate.set()
    await suspending
    assert [len(response.outcomes) for response in await learning] == [1]
    assert await refusal(late) == "SUSPENDED"


async def learn_until(client, groups, sent, ends):
    """A Learn stream of one message a group that stays open: `sent(index)` is awaited before each, `ends` at last."""

    async def requests():
        for index, group in enumerate(groups):
            await sent(index)
            yield pb.LearnRequest(header=client.header(), step=0, attempt=1, groups=[group])
        await ends.wait()

    return [response async for response in client.stub.Learn(requests(), timeout=240)]


async def test_a_revoke_ends_a_stream_in_order_and_the_next_lease_takes_the_rest(
    client, held_learn, make_settled, settled_digest
):
    reached, gate = held_learn
    version = (await client.open()).version
    groups = [make_settled(prompt, version=version) for prompt in range(3)]
    await client.begin(0, 1, 1, 2)
    all_sent, ends = asyncio.Event(), asyncio.Event()

    async def sent(index):
        if index:
            assert await asyncio.to_thread(reached.wait, 30)
        if index == 2:
            all_sent.set()

    learning = asyncio.create_task(learn_until(client, groups, sent, ends))
    await asyncio.wait_for(all_sent.wait(), 30)
    revoking = await queued_behind(client, reached, client.instance.on_revoke(11, 10.0))
    gate.set()
    await revoking
    client.instance.fence.release(11)
    *outcomes, last = await asyncio.wait_for(learning, 30)
    assert last.revoked and not last.outcomes and not any(response.revoked for response in outcomes)
    learned = [outcome.prompt_ordinal for response in outcomes for outcome in response.outcomes]
    assert learned == [0] == (await client.state()).accumulated_prompts

    client.lease = 12
    client.instance.fence.grant(12)
    await client.instance.on_grant(common_pb2.Lease(epoch=12))
    await client.learn(0, 1, groups[1:])
    reply = await client.commit(0, 1, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_COMMITTED


async def test_a_stream_that_waits_for_more_ends_with_its_own_lease_only(client, make_settled):
    version = (await client.open()).version
    await client.begin(0, 1, 1, 2)
    client.instance.fence.grant(12)
    ends = {11: asyncio.Event(), 12: asyncio.Event()}
    streams = {}
    for prompt, epoch in enumerate(ends):
        client.lease = epoch
        groups = [make_settled(prompt, version=version)]
        streams[epoch] = asyncio.create_task(
            learn_until(client, groups, lambda _: asyncio.sleep(0), ends[epoch])
        )
        async with asyncio.timeout(120):
            while prompt not in (await client.state()).accumulated_prompts:  # noqa: ASYNC110  # the trainer's
                await asyncio.sleep(0.01)
    await client.instance.on_revoke(11, 10.0)
    assert [response.revoked for response in await asyncio.wait_for(streams[11], 30)] == [False, True]
    ends[12].set()
    assert [response.revoked for response in await asyncio.wait_for(streams[12], 30)] == [False]


async def test_a_lease_that_lapses_inside_a_batch_costs_the_attempt_and_says_so(
    client, make_config, make_settled, settled_digest, monkeypatch
):
    """A part of a batch is in the accumulators: trying again under the same attempt would count it twice."""
    lead = Rounds.lead

    def lapses(self, round):
        finite = lead(self, round)
        if isinstance(round, list) and self.attempt[1] == 1:
            client.instance.fence.grant(11, 0.0)
        return finite

    async def in_one_message():
        yield pb.LearnRequest(header=client.header(), step=0, attempt=1, groups=groups)

    monkeypatch.setattr(Rounds, "lead", lapses)
    version = (await client.open(make_config(trainer={"micro_batch_tokens": 48}))).version
    groups = [make_settled(prompt, version=version) for prompt in range(3)]
    await client.begin(0, 1, 1, 2)
    assert await refusal(client.stub.Learn(in_one_message()).read()) == "ATTEMPT_LOST"
    assert (await client.state()).phase == pb.STEP_PHASE_IDLE
    client.instance.fence.grant(11)
    await client.begin(0, 2, 1, 2)
    await client.learn(0, 2, groups)
    reply = await client.commit(0, 2, 1, 2, settled_digest(groups))
    assert reply.result == pb.COMMIT_RESULT_COMMITTED


@pytest.mark.parametrize(("share", "trims"), [(0.0, 0), (1.0, 1)])
def test_a_cpu_s_freed_pages_go_back_when_the_host_is_short_of_memory(
    make_backend, monkeypatch, share, trims
):
    called = []
    monkeypatch.setattr(
        allocator, "_libc", lambda: SimpleNamespace(malloc_trim=lambda pad: called.append(pad))
    )
    monkeypatch.setattr(allocator, "SHORT_SHARE", share)
    backend = make_backend()
    backend.suspend()
    backend.wake()
    assert len(called) == trims


async def test_a_release_on_a_cpu_tells_the_whole_resident_set(client):
    """What is kept is told: nothing that a suspend leaves in the process is hidden from the coordinator."""
    await client.open()
    memory = await client.instance.on_revoke(11, 10.0)
    resident = allocator.resident_bytes()
    assert abs(memory.used_bytes - resident) < 64 << 20 < resident and memory.free_bytes > 0
