"""Tokens of a hosted engine come many at a time: what is made of them is what one at a time would give."""

from __future__ import annotations

import asyncio
import threading

import pytest
from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.hosted.backend import Request, Tokens
from headrace_rollout.engines.hosted.requests import (
    LOOK_TOKENS,
    UPDATE_TOKENS,
    RequestedTrajectory,
    interval_of,
)
from headrace_rollout.engines.samples import Distribution, Finish, Group, Sample
from headrace_rollout.engines.trajectory import Bounds, StopMatcher
from headrace_rollout.streams.base import Handover

POLICY = Policy(3, "three")


@pytest.fixture
def begin(codec, collector):
    """A requested sample of one prompt, and the ids that end it."""
    bounds = Bounds(512, 1_000_000, codec.eos_ids)

    def begin(stops=(), limit=24, chunk_tokens=0):
        stream = collector.stream(stop=stops, max_new_tokens=limit, chunk_tokens=chunk_tokens)
        matcher = StopMatcher(codec, stops) if stops else None
        group = Group(0, codec.encode_prompt(text="7"), [])
        trajectory = bounds.begin(stream, group, Sample(0, 1), matcher)
        return RequestedTrajectory(
            trajectory, Request("one", [], limit, Distribution(), 0, [], "", interval=interval_of(trajectory))
        )

    return begin


def outcome(sample, ids, size, eos):
    """Finish and ids of a sample that gets tokens `size` at a time, and the tokens of its chunks."""
    chunks = []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        for update in sample.take(Tokens(part, [-float(token) for token in part]), POLICY, eos):
            chunks.append((update.offset, list(update.token_ids)))
            if update.finish is not None:
                assert [-p for p in update.whole.log_probs] == list(update.whole.token_ids)
                assert list(update.whole.spans) == [(3, len(update.whole.token_ids))]
                return update.finish, list(update.whole.token_ids), chunks
    return None, None, chunks


@pytest.mark.parametrize(
    ("text", "stops", "limit", "ends", "finish"),
    [
        ("1 + 2 = 3", (), 24, True, Finish.EOS),
        ("1 + 2 = 3 + 4 = 5", (), 6, True, Finish.LENGTH),
        ("12", (), 3, True, Finish.EOS),  # both at once: it ended by itself
        ("1 + 2 = 3 + 4", (" = ",), 24, True, Finish.STOP),
        ("1 + 2 = 3", ("2 = 3+", "= "), 24, False, Finish.STOP),  # the later one is complete first
        ("1 + 2", ("+ 3",), 24, True, Finish.EOS),
        ("1 + 2 = 3", (" = ",), 8, True, Finish.STOP),
    ],
)
def test_an_answer_ends_where_it_would_token_by_token(begin, codec, text, stops, limit, ends, finish):
    eos = codec.eos_ids
    ids = [*codec.encode_prompt(text=text), *([min(eos)] if ends else []), *codec.encode_prompt(text="+ 9")]
    one = outcome(begin(stops, limit), ids, 1, eos)
    assert one[0] is finish
    for size in (2, 3, 5, len(ids)):
        assert outcome(begin(stops, limit), ids, size, eos)[:2] == one[:2]


def test_chunks_have_their_size_whatever_comes_at_a_time(begin, codec):
    ids = codec.encode_prompt(text="1 + 2 = 3 + 4 = 5")[:12]
    finish, whole, chunks = outcome(begin((), 12, chunk_tokens=4), ids, 5, codec.eos_ids)
    assert finish is Finish.LENGTH and whole == ids
    assert [token for _, part in chunks for token in part] == ids
    assert [offset for offset, _ in chunks] == [0, 4, 8]


def test_updates_are_as_far_apart_as_chunks_and_stop_strings_allow(begin):
    found = [begin(*each).request.interval for each in [((), 24, 0), (("x",), 24, 0), ((), 24, 3)]]
    assert found == [UPDATE_TOKENS, LOOK_TOKENS, 3]
    assert begin((), 24, 1000).request.interval == UPDATE_TOKENS


async def test_items_of_a_thread_come_in_order_with_few_wakes():
    loop, taken, ended = asyncio.get_running_loop(), [], asyncio.Event()

    def take(item):
        taken.append(item)
        if item == 999:
            ended.set()

    wakes, call_soon = [], loop.call_soon_threadsafe
    handover = Handover(loop, take)
    loop.call_soon_threadsafe = lambda *call: (wakes.append(1), call_soon(*call))
    try:
        thread = threading.Thread(target=lambda: [handover.put(item) for item in range(1000)])
        thread.start()
        thread.join()  # the loop takes nothing meanwhile
        assert len(wakes) == 1
    finally:
        del loop.call_soon_threadsafe
    await asyncio.wait_for(ended.wait(), 10)
    assert taken == list(range(1000))
    handover.put(999)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken[-1] == 999 and len(taken) == 1001
