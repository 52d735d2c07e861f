"""A device without room for a micro-batch: real trainer processes whose layers raise torch.OutOfMemoryError."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_modelkit.devices import is_out_of_memory
from headrace_servicekit.rpc.client import dial
from headrace_trainer.errors import OutOfMemory
from headrace_trainer.ranks.reduced import Reduced
from rank_processes import RankProcess, end
from trainer_calls import refusal
from two_ranks_parts import address_of, form, rendezvous, weights

pytestmark = pytest.mark.timeout(300)
BUDGET = 64
GROUPS = 8


@pytest.fixture
def spawn(tmp_path):
    """Starts trainer processes with devices of a size."""
    children = []

    def start(where: str = "never", kept: int = 0, again: int = 0):
        port_file = tmp_path / f"{len(children)}.address"
        settings = str(port_file), str(tmp_path / "shm"), where, str(kept), str(again)
        children.append(RankProcess("small_device.py", *settings))
        return port_file

    yield start
    end(children)


@pytest.fixture
def config(make_config):
    """Of runs whose groups make micro-batches of nearly BUDGET places."""
    return lambda ranks=1: make_config(
        trainer={"micro_batch_tokens": BUDGET, "ranks": ranks}, optimizer={"lr": 1e-4}
    )


async def attempt(client, make_settled, settled_digest, number: int, base):
    """One attempt at the step after `base`, of the same groups whenever it is made: its commit's reply."""
    groups = [make_settled(prompt, version=base) for prompt in range(GROUPS)]
    await client.begin(base.ordinal, number, base.number, base.number + 1)
    await client.learn(base.ordinal, number, groups)
    return await client.commit(base.ordinal, number, base.number, base.number + 1, settled_digest(groups))


async def unharmed(client, config, make_settled, settled_digest) -> np.ndarray:
    """The weights after one step of a trainer with room for everything."""
    base = (await client.open(config())).version
    await attempt(client, make_settled, settled_digest, 1, base)
    await client.record(0, 1, 2)
    return await weights(client, 2)


@pytest.mark.parametrize("where", ["forward", "backward"])
async def test_a_step_without_room_is_trained_once_with_half_the_micro_batch(
    where, spawn, client, tmp_path, make_config, trainer_client, config, make_settled, settled_digest
):
    whole = await unharmed(client, config, make_settled, settled_digest)
    async with dial(await address_of(spawn(where, BUDGET // 2)), token=None) as channel:
        small = trainer_client(channel, tmp_path / "small", make_config)
        base = (await small.open(config())).version
        reason, message = await refusal(attempt(small, make_settled, settled_digest, 1, base))
        assert reason == "ATTEMPT_LOST"
        assert "CUDA out of memory" in message
        assert "micro-batches of 32 tokens" in message
        assert (await small.state()).phase == pb.STEP_PHASE_IDLE

        reply = await attempt(small, make_settled, settled_digest, 2, base)
        assert (reply.version.number, reply.version.ordinal, reply.group_count) == (2, 1, GROUPS)
        await small.record(0, 2, 2)
        np.testing.assert_allclose(await weights(small, 2), whole, rtol=1e-5, atol=1e-6)


async def test_recomputation_follows_half_the_micro_batch_and_then_the_run_ends(
    spawn, client, tmp_path, make_config, trainer_client, config, make_settled, settled_digest
):
    whole = await unharmed(client, config, make_settled, settled_digest)
    for again, ends in ((BUDGET, False), (0, True)):
        async with dial(await address_of(spawn("forward", 0, again)), token=None) as channel:
            small = trainer_client(channel, tmp_path / f"small{again}", make_config)
            base = (await small.open(config())).version
            reason, message = await refusal(attempt(small, make_settled, settled_digest, 1, base))
            assert (reason, "half as many" in message) == ("ATTEMPT_LOST", True)
            reason, message = await refusal(attempt(small, make_settled, settled_digest, 2, base))
            assert (reason, "gradient_checkpointing: true" in message) == ("ATTEMPT_LOST", True)
            if not ends:
                await attempt(small, make_settled, settled_digest, 3, base)
                await small.record(0, 3, 2)
                np.testing.assert_allclose(await weights(small, 2), whole, rtol=1e-5, atol=1e-6)
                continue
            reason, message = await refusal(attempt(small, make_settled, settled_digest, 3, base))
            assert reason == "INVALID"  # the coordinator ends the run: the same step would end alike
            assert message.startswith("trainer.micro_batch_tokens: ")
            assert "lower trainer.micro_batch_tokens (now 32)" in message


async def test_all_ranks_agree_on_one_that_has_no_room(
    spawn, client, tmp_path, make_config, trainer_client, config, make_settled, settled_digest
):
    whole = await unharmed(client, config, make_settled, settled_digest)
    addresses = [await address_of(file) for file in (spawn(), spawn("backward", BUDGET // 2))]
    async with dial(addresses[0], token=None) as first, dial(addresses[1], token=None) as second:
        leader = trainer_client(first, tmp_path / "run", make_config)
        follower = trainer_client(second, tmp_path / "run", make_config)
        await form(leader, follower, config(ranks=2))
        base = (await asyncio.gather(leader.restore("", 1), follower.restore("", 1)))[0].version
        reason, message = await refusal(attempt(leader, make_settled, settled_digest, 1, base))
        assert reason == "OUT_OF_MEMORY"
        assert "rank 1 ran out of device memory" in message
        assert "micro-batches of 32 tokens" in message
        for rank in (leader, follower):
            assert (await rank.state()).generation == 0

        # As the coordinator recovers: opened again, another group, the newest checkpoint.
        where = rendezvous()
        for rank in (leader, follower):
            await rank.open_run(config(ranks=2))
        await asyncio.gather(leader.join(2, 0, 2, where), follower.join(2, 1, 2, where))
        base = (await asyncio.gather(leader.restore("", 11), follower.restore("", 11)))[0].version
        reply = await attempt(leader, make_settled, settled_digest, 1, base)
        assert (reply.version.ordinal, reply.group_count) == (1, GROUPS)
        await leader.record(0, 1, 12)
        np.testing.assert_allclose(await weights(leader, 12), whole, rtol=1e-5, atol=1e-6)


def test_who_says_that_there_is_no_memory():
    allocator = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    nccl = RuntimeError(
        "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"
    )
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert all(map(is_out_of_memory, (allocator, nccl, cublas)))
    other = RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")
    assert not any(map(is_out_of_memory, other))


def test_a_single_sequence_is_not_halved(make_config, make_backend):
    reduced = Reduced(make_backend()._config)
    short = OutOfMemory("no room", group_lost=False)
    reduced.reduce(short, divisible=False, may_recompute=True)
    assert reduced.told == (512, True) and short.retries
    again = OutOfMemory("no room", group_lost=False)
    reduced.reduce(again, divisible=False, may_recompute=False)
    assert not again.retries
