"""Results of a stream's work: in any order, bounded, together where they come together."""

import asyncio

import pytest
from headrace_servicekit.rpc.streams import unordered, until


async def requests(*batches):
    for batch in batches:
        yield batch


async def collected(results):
    return [batch async for batch in results]


async def test_results_come_as_they_are_ready_and_each_once():
    begun, follows = asyncio.Event(), {2: asyncio.Event(), 0: asyncio.Event(), 1: asyncio.Event()}

    async def work(number):
        if number == 1:
            begun.set()
        await begun.wait()
        await follows[number].wait()
        return number

    follows[0].set()
    found = []
    async for batch in unordered(requests([2, 0], [1]), lambda batch: map(work, batch), 10):
        found += batch
        if len(found) < 3:
            follows[len(found)].set()
    assert found == [0, 1, 2]


async def test_a_slow_reader_stops_the_pump():
    started = []

    async def work(number):
        started.append(number)
        return number

    stream = unordered(requests(range(100)), lambda batch: map(work, batch), 4)
    await anext(stream)
    await asyncio.sleep(0.05)
    assert len(started) <= 8
    await stream.aclose()


async def test_what_is_nearly_ready_comes_along_but_nobody_waits_for_a_straggler():
    never = asyncio.Event()

    async def work(number):
        for _ in range(5 * number):
            await asyncio.sleep(0)
        if number == 2:
            await never.wait()
        return number

    stream = unordered(requests([0, 1, 2]), lambda batch: map(work, batch), 10, linger_s=0.5)
    async with asyncio.timeout(30):
        assert await anext(stream) == [0, 1]
    await stream.aclose()


async def test_the_last_result_ends_the_linger_at_once():
    async def work(seconds):
        await asyncio.sleep(seconds)
        return seconds

    stream = unordered(requests([0.0, 0.05]), lambda batch: map(work, batch), 10, linger_s=30)
    async with asyncio.timeout(5):
        assert await collected(stream) == [[0.0, 0.05]]


async def test_a_request_that_is_done_waits_for_no_other():
    never = asyncio.Event()

    async def work(number):
        if number == 2:
            await never.wait()
        return number

    stream = unordered(requests([2], [0, 1]), lambda batch: map(work, batch), 10, linger_s=30)
    async with asyncio.timeout(10):
        assert await anext(stream) == [0, 1]
    await stream.aclose()


async def test_a_future_costs_no_task_and_its_failure_ends_the_stream():
    def work(number):
        future = asyncio.get_running_loop().create_future()
        if number == 1:
            future.set_exception(ValueError("broken"))
        else:
            future.set_result(number)
        return future

    with pytest.raises(ValueError, match="broken"):
        await collected(unordered(requests([0, 1, 2]), lambda batch: map(work, batch), 10))


async def test_a_refused_request_ends_the_wait_for_the_end_of_the_run():
    """A generator that nobody closes leaves its task to the garbage collector, which logs an error."""
    ended = asyncio.Event()
    before = asyncio.all_tasks()

    def refuse(request):
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        await collected(unordered(until(ended, requests([[0], [1]])), refuse, 10))
    left = asyncio.all_tasks() - before
    await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 10)
