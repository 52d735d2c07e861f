"""What comes through a worker's pipe, in whatever pieces it comes; the pipe is a stream that the test feeds."""

import asyncio
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from headrace_servicekit.process.spawn import descendants
from headrace_servicekit.process.worker import Worker, WorkerGone, WorkerTimeout
from headrace_servicekit.process.worker_pipes import Codec, FrameReader, frame

CODEC = Codec(lambda message: json.dumps(message).encode(), json.loads)


@pytest.fixture
async def pipe():
    return asyncio.StreamReader()


@pytest.fixture
async def worker(pipe):
    return Worker(CODEC, process=None, reader=FrameReader(pipe), writer=None)


def framed(*messages):
    return b"".join(frame(CODEC.encode(message)) for message in messages)


async def test_a_burst_of_replies_is_received_one_by_one(pipe, worker):
    pipe.feed_data(framed({"a": 1}, {"a": 2}, {"a": 3}))
    assert [await worker.receive(1.0) for _ in range(3)] == [{"a": 1}, {"a": 2}, {"a": 3}]


async def test_a_reply_in_pieces_is_whole_again(pipe, worker):
    data = framed({"text": "x" * 1000}, {"a": 2})
    receiving = asyncio.ensure_future(worker.receive(5.0))
    for start in range(0, len(data), 7):
        pipe.feed_data(data[start : start + 7])
        await asyncio.sleep(0)
    assert await receiving == {"text": "x" * 1000}
    assert await worker.receive(1.0) == {"a": 2}


async def test_a_timeout_loses_nothing_of_a_late_reply(pipe, worker):
    data = framed({"a": 1})
    pipe.feed_data(data[:6])
    with pytest.raises(WorkerTimeout, match=r"within 0\.01 s"):
        await worker.receive(0.01)
    pipe.feed_data(data[6:])
    assert await worker.receive(1.0) == {"a": 1}


async def test_a_reply_that_lies_in_the_pipe_counts_however_late_it_is_read(pipe, worker):
    receiving = asyncio.ensure_future(worker.receive(0.0))
    pipe.feed_data(framed({"a": 1}))
    assert await receiving == {"a": 1}


async def test_what_came_before_the_end_is_received_and_then_the_end(pipe, worker):
    pipe.feed_data(framed({"a": 1}) + framed({"a": 2})[:-1])
    pipe.feed_eof()
    assert await worker.receive(1.0) == {"a": 1}
    with pytest.raises(WorkerGone, match="ended"):
        await worker.receive(1.0)


@pytest.mark.parametrize("data", [b"\0\0\0\0", b"\xff\xff\xff\xff", frame(b"no json")])
async def test_a_worker_that_breaks_the_protocol_is_gone(pipe, worker, data):
    pipe.feed_data(data)
    with pytest.raises(WorkerGone, match="broke the protocol"):
        await worker.receive(1.0)


async def test_an_ending_that_is_cancelled_as_the_process_ends_stays_cancelled():
    """asyncio.wait_for of Python 3.11 loses a cancel then, and who was to end goes on for ever."""
    ended = asyncio.get_running_loop().create_future()

    class Process:
        async def wait(self):
            return await ended

    worker = Worker(CODEC, process=Process(), reader=None, writer=None, _killed=True)
    killing = asyncio.ensure_future(worker.kill())
    await asyncio.sleep(0.01)
    ended.set_result(-9)
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing


def test_what_other_threads_have_started_is_found_though_one_ends_meanwhile(monkeypatch):
    read = Path.read_text

    def ended(path, *rest):
        if path.parts[-2:] == (str(os.getpid()), "children"):
            raise FileNotFoundError(path)
        return read(path, *rest)

    monkeypatch.setattr(Path, "read_text", ended)
    with ThreadPoolExecutor(1) as pool, pool.submit(subprocess.Popen, ["sleep", "60"]).result() as child:
        try:
            assert child.pid in descendants([os.getpid()])
        finally:
            child.kill()
