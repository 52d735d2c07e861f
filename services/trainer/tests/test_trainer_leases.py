"""A lease governs where the effect happens: on the compute thread, after the queue, and in every rank's round."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_servicekit.errors import reason_of


@pytest.fixture
def held_learn(monkeypatch):
    """Learn waits on the compute thread, before it has done anything: (reached, go on)."""
    reached, gate = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        if name == "trainer.learn" and not gate.is_set():
            reached.set()
            assert gate.wait(60)

    monkeypatch.setattr("headrace_trainer.session.failpoint_sync", wait)
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
    waiting = servicer_of(client)._compute._pool._work_queue
    async with asyncio.timeout(30):
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
