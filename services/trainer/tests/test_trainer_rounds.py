"""The queue before the compute thread is bounded, and a stuck round ends the process with a clear line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.samples import LearnItem
from headrace_trainer.wire import learn as learn_queue
from headrace_trainer.wire.learn import LearnQueue


@pytest.fixture
def item(make_group):
    def make(prompt: int) -> LearnItem:
        return LearnItem(0, 1, [make_group(prompt)])

    return make


async def test_a_full_queue_slows_its_sender(item, monkeypatch):
    monkeypatch.setattr(learn_queue, "BATCHES", 2)
    monkeypatch.setattr(learn_queue, "LEAST_QUEUED", 0)
    gate = asyncio.Event()
    batches = []

    async def learn(items):
        batches.append(len(items))
        await gate.wait()
        return [[] for _ in items]

    size = item(0).groups[0].token_count()
    queue = started(learn, lambda: 2 * size + size // 2)
    sender = asyncio.create_task(_put(queue, [item(0)] * 9))
    await asyncio.sleep(0.05)
    assert not sender.done() and batches == [2]
    gate.set()
    futures = await asyncio.wait_for(sender, 20)
    assert await asyncio.gather(*futures) == [[]] * 9
    assert max(batches) == 2 and sum(batches) == 9


def started(learn, batch_tokens=lambda: 10**6):
    """A queue whose worker runs."""
    queue = LearnQueue(learn, batch_tokens)
    queue.worker = asyncio.create_task(queue.work())
    return queue


async def _put(queue, items):
    return [await queue.put(one) for one in items]


async def test_a_refusal_reaches_its_item_alone(item):
    async def learn(items):
        return [Refusal("CONFLICT", "no") if index == 1 else [] for index, _ in enumerate(items)]

    queue = started(learn)
    first, second, third = [await queue.put(item(prompt)) for prompt in range(3)]
    assert await first == [] and await third == []
    with pytest.raises(Refusal):
        await second


async def test_a_batch_with_room_waits_for_a_sender_that_may_still_send(item):
    batches = []

    async def learn(items):
        batches.append(len(items))
        return [[] for _ in items]

    queue = started(learn)
    with queue.sender():
        futures = [await queue.put(item(0))]
        await asyncio.sleep(0)
        futures.append(await queue.put(item(1)))
        await asyncio.gather(*futures)
        lone = await queue.put(item(2))
        await asyncio.wait_for(lone, 20)  # a sender that is silent is not waited for long
    assert batches == [2, 1]


async def test_the_end_of_a_senders_stream_starts_the_batch(item, monkeypatch):
    monkeypatch.setattr(learn_queue, "LINGER_S", 60)

    async def learn(items):
        return [[] for _ in items]

    queue = started(learn)
    with queue.sender():
        future = await queue.put(item(0))
    assert await asyncio.wait_for(future, 20) == []


async def test_a_batch_is_not_held_up_where_batches_take_long(item, monkeypatch):
    monkeypatch.setattr(learn_queue, "LINGER_S", 60)
    monkeypatch.setattr(learn_queue, "SHORT_S", 0.01)

    async def learn(items):
        await asyncio.sleep(0.02)
        return [[] for _ in items]

    queue = started(learn)
    with queue.sender():
        first = await queue.put(item(0))
    await first
    with queue.sender():
        await asyncio.wait_for(await queue.put(item(1)), 20)


async def test_what_came_during_a_batch_waits_no_longer(item, monkeypatch):
    monkeypatch.setattr(learn_queue, "LINGER_S", 60)
    monkeypatch.setattr(learn_queue, "SHORT_S", 60)
    begun, gates = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    calls = []

    async def learn(items):
        calls.append(items)
        begun[len(calls) - 1].set()
        await gates[len(calls) - 1].wait()
        return [[] for _ in items]

    queue = started(learn)
    with queue.sender():
        futures = [await queue.put(item(0))]
        queue._first_at -= 60  # it has waited long enough
        await asyncio.wait_for(begun[0].wait(), 20)
        futures.append(await queue.put(item(1)))
        queue._first_at -= 60  # and so has this one, behind a batch that takes so long
        gates[0].set()
        await asyncio.wait_for(begun[1].wait(), 20)
        gates[1].set()
        await asyncio.gather(*futures)


async def test_a_failed_batch_is_heard_and_the_queue_goes_on(item):
    calls = []

    async def learn(items):
        calls.append(items)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return [[] for _ in items]

    queue = started(learn)
    with pytest.raises(RuntimeError, match="out of memory"):
        await (await queue.put(item(0)))
    assert await (await queue.put(item(1))) == []


STUCK = """
import time, torch
from types import SimpleNamespace
from headrace_trainer.ranks import messages, rounds
from headrace_trainer.group.forming import join_trainer_group
rounds.DEADLINE_S = 0.3
trainer_group = join_trainer_group(4, 0, 1, "", 5, torch.device("cpu"))
rank = SimpleNamespace(ranks=trainer_group, execute=lambda _: time.sleep(60))
stuck = rounds.Rounds(rank, holds_lease=lambda: True)
stuck.attempt = (7, 2)
stuck.lead(messages.CommitRound(1.0, 0.0, 0.0))
"""


def test_a_stuck_round_exits_with_a_clear_last_line():
    child = subprocess.run(
        [sys.executable, "-c", STUCK],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 70
    last = child.stderr.strip().splitlines()[-1]
    assert "stuck in round 1 (commit) of generation 4, step 7 attempt 2" in last
