"""RLinf's Channel and ray's Queue between two processes; run by the peers' own Python, see `chunk_stream.py`.

    python ray_channels.py rlinf|queue SECONDS

Prints one JSON line, {pattern: {size: ...}}, with seconds of one message and messages a second. Headrace is not
imported here. Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections import deque
from typing import Any

import torch
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker

SMALL, LARGE = 1024, 1024 * 1024
WINDOWS = {SMALL: 64, LARGE: 8}
"""Messages under way when pipelined."""
WARM_UP = 5
GO = b"g"


def body(size: int) -> Any:
    """A small message is an object, a large one a tensor: RLinf sends both in its own ways."""
    return bytes(size) if size == SMALL else torch.zeros(size, dtype=torch.uint8)


class Producer(Worker):  # type: ignore[misc]
    """Puts."""

    def one_by_one(self, channel: Any, size: int, count: int, path: str) -> list[tuple[float, float]]:
        """(start, acknowledged) of each put; the consumer says when it has the one before."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            consumer, _ = server.accept()
            found = []
            for _ in range(count):
                item = body(size)
                assert consumer.recv(1) == GO
                started = time.monotonic()
                channel.put(item)
                found.append((started, time.monotonic()))
            return found

    def pipelined(self, channel: Any, size: int, count: int) -> list[tuple[float, float]]:
        """A window of puts is never waited for."""
        found, under_way = [], deque()  # type: ignore[var-annotated]
        for _ in range(count):
            started = time.monotonic()
            under_way.append((started, put_soon(channel, body(size))))
            if len(under_way) >= WINDOWS[size]:
                found.append(acknowledged(*under_way.popleft()))
        return [*found, *(acknowledged(*one) for one in under_way)]


class Consumer(Worker):  # type: ignore[misc]
    """Gets."""

    def one_by_one(self, channel: Any, size: int, count: int, path: str) -> list[float]:
        """When each message was here."""
        with socket.socket(socket.AF_UNIX) as producer:
            while producer.connect_ex(path):
                time.sleep(0.01)
            found = []
            for _ in range(count):
                producer.sendall(GO)
                item = channel.get()
                found.append(time.monotonic())
                assert len(item) == size
            return found

    def pipelined(self, channel: Any, size: int, count: int) -> list[float]:
        """A window of gets is always asked for."""
        found, asked = [], deque()  # type: ignore[var-annotated]
        for index in range(count + WINDOWS[size]):
            if index < count:
                asked.append(get_soon(channel))
            if len(asked) >= WINDOWS[size] or (index >= count and asked):
                item = wait_for(asked.popleft())
                found.append(time.monotonic())
                assert len(item) == size
        return found


def put_soon(channel: Any, item: Any) -> Any:
    """A put that is waited for later."""
    if isinstance(channel, Channel):
        return channel.put(item, async_op=True)
    return channel.actor.put.remote(item)


def get_soon(channel: Any) -> Any:
    """A get that is waited for later."""
    return channel.get(async_op=True) if isinstance(channel, Channel) else channel.actor.get.remote()


def wait_for(handle: Any) -> Any:
    """What a handle of `put_soon` or `get_soon` brings."""
    import ray

    return ray.get(handle) if isinstance(handle, ray.ObjectRef) else handle.wait()


def acknowledged(started: float, handle: Any) -> tuple[float, float]:
    """Waits for a put."""
    wait_for(handle)
    return started, time.monotonic()


def measure(producer: Any, consumer: Any, channel: Any, seconds: float) -> dict[str, dict[int, list[float]]]:
    """{"one": {size: seconds of each message}, "pipelined": {size: [messages a second]}}."""
    found: dict[str, dict[int, list[float]]] = {"one": {}, "pipelined": {}}
    for size in (SMALL, LARGE):
        count, taken = WARM_UP * 4, 0.0
        while True:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "go")
                got = consumer.one_by_one(channel, size, count, path)
                sent = producer.one_by_one(channel, size, count, path).wait()[0]
            arrived = got.wait()[0]
            taken = arrived[-1] - sent[0][0]
            if taken > seconds / 2:
                break
            count = int(count * seconds / taken) + 1
        both = [max(ack, here) - start for (start, ack), here in zip(sent, arrived, strict=True)]
        found["one"][size] = both[WARM_UP:]
        count = WINDOWS[size] * 4
        while True:
            got = consumer.pipelined(channel, size, count)
            sent = producer.pipelined(channel, size, count).wait()[0]
            arrived = got.wait()[0]
            taken = max(arrived[-1], sent[-1][1]) - sent[0][0]
            if taken > seconds / 2:
                break
            count = int(count * seconds / taken) + 1
        found["pipelined"][size] = [count / taken]
    return found


def main() -> None:
    """Command line."""
    kind, seconds = sys.argv[1], float(sys.argv[2])
    cluster = Cluster(num_nodes=1)
    placement = NodePlacementStrategy([0])
    producer = Producer.create_group().launch(cluster, name="producer", placement_strategy=placement)
    consumer = Consumer.create_group().launch(cluster, name="consumer", placement_strategy=placement)
    if kind == "rlinf":
        channel = Channel.create(name="channel")
    else:
        from ray.util.queue import Queue

        channel = Queue()
    print(json.dumps(measure(producer, consumer, channel, seconds)), flush=True)


if __name__ == "__main__":
    main()
