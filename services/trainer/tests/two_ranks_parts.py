"""Two ranks, each in a process of its own, asked over gRPC: where they are, their group, steps, weights, leases."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.errors import reason_of


async def address_of(port_file: Path) -> str:
    end = time.monotonic() + 240
    while not await asyncio.to_thread(port_file.exists):
        assert time.monotonic() < end, "the trainer did not start"
        await asyncio.sleep(0.05)
    return await asyncio.to_thread(port_file.read_text)


async def form(leader, follower, config, generation=1):
    where = rendezvous()
    for rank in (leader, follower):
        await rank.open_run(config)
    await asyncio.gather(leader.join(generation, 0, 2, where), follower.join(generation, 1, 2, where))


async def train(client, make_settled, settled_digest, version, count):
    """Steps whose groups need several rounds; the replies."""
    replies = []
    for _ in range(count):
        groups = [make_settled(100 * version.ordinal + p, version=version) for p in range(3)]
        number = version.number + 1
        await client.begin(version.ordinal, 1, version.number, number)
        await client.learn(version.ordinal, 1, groups)
        reply = await client.commit(version.ordinal, 1, version.number, number, settled_digest(groups))
        await client.record(version.ordinal, 1, number)
        replies.append(reply)
        version = reply.version
    return replies


async def weights(client, number) -> np.ndarray:
    await client.publish(number)
    return np.frombuffer(await client.body(number), dtype=np.float32)


async def until_lease(follower, *, holds: bool) -> None:
    """The follower's process has heard the signal: it refuses by its lease, or by its rank."""
    async with asyncio.timeout(120):
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await follower.begin(0, 1, 1, 2)
            if (reason_of(caught.value) == "NOT_LEADER") is holds:
                return


def rendezvous() -> str:
    return f"127.0.0.1:{free_port()}"


async def regroup(leader, others, generation, number):
    """The leader with `others` in a new group, with the state that it had in the one before."""
    await leader.leave(generation - 1, carry=True)
    state = await leader.state()
    assert (state.phase, state.generation) == (pb.STEP_PHASE_UNSPECIFIED, 0)
    assert state.carried_number == number
    where, members = rendezvous(), [leader, *others]
    await asyncio.gather(
        *(member.join(generation, rank, len(members), where) for rank, member in enumerate(members))
    )
    found = await leader.take_up(number)
    again = await leader.take_up(number)
    assert again.version == found.version
    state = await leader.state()
    assert (state.phase, state.generation) == (pb.STEP_PHASE_IDLE, generation)
    assert state.carried_number == 0 and state.version == found.version
    return found.version
