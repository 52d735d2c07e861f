"""A broadcast that reaches the GPUs of engines' workers: processes with imaginary GPUs, and Gloo in NCCL's place."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from broadcast_member import RUN, Imaginary, published, serve, take
from headrace.common.v1 import common_pb2
from headrace_modelkit import broadcasting
from headrace_modelkit.broadcasting import NCCL
from headrace_rollout.engines.hosted.relaying import RELAYS, Relayed
from headrace_servicekit.weights import broadcasts, collective
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore

pytestmark = pytest.mark.timeout(90)
WORKER = Path(__file__).with_name("broadcast_member.py")
LAYOUT = [(f"layers.{index}", common_pb2.DATA_TYPE_UINT8, (3 << 20, 1)) for index in range(5)]
COLLECTIVE, GRPC = common_pb2.WEIGHT_TRANSPORT_COLLECTIVE, common_pb2.WEIGHT_TRANSPORT_GRPC


class Trainer:
    def __init__(self, store):
        self.store, self.groups = store, Imaginary("GPU-trainer")
        self.servicer = WeightServicer(store, self.groups)
        self.described = published(store, RUN, 1, LAYOUT, os.urandom(15 << 20))

    def told(self, receivers):
        source = self.store.source(RUN, 1)
        source.receivers = receivers
        return source


@pytest.fixture
async def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(broadcasts, "GATHER_S", 30.0)
    monkeypatch.setattr(collective, "SEAT_S", 60.0)
    monkeypatch.setitem(broadcasting.BUCKET_BYTES, NCCL, 1 << 20)
    store = WeightStore(tmp_path / "trainer", "trainer")
    made = Trainer(store)
    server = await serve(store, made.servicer)
    yield made
    await server.drain(0)
    store.close()


@pytest.fixture
def hosts(tmp_path):
    found = [WeightStore(tmp_path / f"host-{index}", f"rollout-{index}") for index in range(2)]
    yield found
    for store in found:
        store.close()


@asynccontextmanager
async def worker(directory, name):
    """A worker of an engine, which listens in `directory`."""
    directory.mkdir()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        "worker",
        name,
        env={**os.environ, RELAYS: str(directory)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert await child.stdout.readline() == b"listens\n"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_workers_take_a_version_for_their_instances_by_nccl(trainer, hosts, tmp_path):
    async with worker(tmp_path / "a", "GPU-a"), worker(tmp_path / "b", "GPU-b"):
        groups = [Relayed(lambda name=name: tmp_path / name) for name in "ab"]
        assert [each.device_id() for each in groups] == ["GPU-a", "GPU-b"]
        taking = [
            take(store, trainer.described, trainer.told(2), own)
            for store, own in zip(hosts, groups, strict=True)
        ]
        for found in await asyncio.gather(*taking):
            assert (found.transport, found.fallbacks) == (COLLECTIVE, [])
            assert bytes(found.body) == bytes(trainer.store.get(RUN, 1).body)
    calls = trainer.groups.calls
    # Sizes and pieces, the end, and only then, when all have that, the group's end.
    assert calls[0] == "nccl" and calls[-2:] == ["allreduce", "shutdown"]
    assert calls[1:-2] == ["broadcast"] * (2 * 15 + 1)


async def test_a_worker_that_dies_in_a_broadcast_leads_to_the_next_way(trainer, hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(broadcasting, "STALL_S", 2.0)
    async with worker(tmp_path / "a", "GPU-a") as child:
        join, begun, ended = trainer.groups.join, asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def held(*where):
            group = join(*where)
            send = group.send

            def pieces_until_death(pieces):
                for index, piece in enumerate(pieces):
                    if index == 3:
                        loop.call_soon_threadsafe(begun.set)
                        ended.wait(30)
                    yield piece

            group.send = lambda pieces: send(pieces_until_death(pieces))
            return group

        monkeypatch.setattr(trainer.groups, "join", held)
        taking = take(hosts[0], trainer.described, trainer.told(1), Relayed(lambda: tmp_path / "a"))
        await begun.wait()
        child.kill()
        await child.wait()
        ended.set()
        found = await taking
        assert found.transport == GRPC and bytes(found.body) == bytes(trainer.store.get(RUN, 1).body)
        assert found.fallbacks[0].startswith("collective from trainer: ")
    assert Relayed(lambda: tmp_path / "a").device_id() == "", "what is left of it answers nobody"


async def test_without_a_worker_that_listens_it_is_gloo(trainer, hosts, tmp_path):
    found = await take(hosts[0], trainer.described, trainer.told(1), Relayed(lambda: None))
    assert (found.transport, found.fallbacks) == (COLLECTIVE, []) and trainer.groups.calls[0] == "gloo"
