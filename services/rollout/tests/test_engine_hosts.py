"""An engine over two hosts: what leader and follower tell each other over gRPC; the part is a child that sleeps."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest
import torch
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_rollout.engines.base import Capabilities, EngineConfig, Policy
from headrace_rollout.engines.hosted.backend import version_key
from headrace_rollout.engines.hosted.following import FollowerEngine
from headrace_rollout.engines.hosts import BackendFailed, Hosts
from headrace_servicekit.rpc.server import GrpcServer

CPU = (torch.device("cpu"),)


class Leader(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self):
        self.hosts = Hosts(1, "10.0.0.1")

    async def Follow(self, request_iterator, context):
        async for first in request_iterator:
            async for response in self.hosts.serve(first, request_iterator):
                yield response
            return


class SleepingPart:
    capabilities = Capabilities()

    def __init__(self):
        self.starts = []
        self._child = None

    @property
    def pids(self):
        return [self._child.pid] if self._child is not None and self._child.poll() is None else []

    def start(self, start, meeting, files):
        self.starts.append((meeting.start, meeting.meeting_host, meeting.meeting_port, files))
        self._child = subprocess.Popen(["sleep", "100"])

    def stop(self):
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


async def until(condition):
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_a_part_runs_from_start_to_end_holds_versions_and_its_death_is_named(
    model_config, codec, weights
):
    servicer, part = Leader(), SleepingPart()
    server = GrpcServer("127.0.0.1:0", token=None, instance="rollout-0")
    server.add_service(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, "headrace.rollout.v1.RolloutService"
    )
    address = await server.start()
    config = EngineConfig(model_config, codec, 4)
    hello = rollout_pb2.FollowRequest(run="runs/a", rank=1, instance="rollout-0.b")
    follower, hosts = FollowerEngine(part, config, hello, address, None), servicer.hosts
    beginning = asyncio.ensure_future(hosts.begin())
    await follower.place((), 1)
    await asyncio.sleep(0.1)
    assert not beginning.done(), "it began without the follower's devices"
    await follower.place(CPU, 1)
    asked = await beginning
    await until(lambda: part.pids)
    assert part.starts[0][:3] == (1, "10.0.0.1", asked.meeting_port) and not hosts.broken

    key = version_key(weights.entries)
    holding = asyncio.ensure_future(hosts.hold(key))
    await asyncio.sleep(0.1)
    assert not holding.done(), "the version is not there yet"
    await follower.install(Policy(3, "d"), weights)
    await holding
    assert (part.starts[0][3] / key).read_bytes() == bytes(weights.body) and follower.policy.number == 3

    os.kill(part.pids[0], signal.SIGKILL)
    await until(lambda: hosts.broken)
    assert hosts.broken == "the part of rollout-0.b ended: its process ended"
    with pytest.raises(BackendFailed, match=r"the part of rollout-0\.b ended"):
        await hosts.hold("another")
    await hosts.end()
    await hosts.begin()
    await until(lambda: part.pids)
    assert [start for start, *_ in part.starts] == [1, 2]

    files = str(part.starts[0][3])
    await follower.close()
    assert not part.pids and not await asyncio.to_thread(os.path.exists, files)
    await until(lambda: hosts.broken)
    assert hosts.broken == "rollout-0.b is gone"
    await hosts.end()
    await server.drain(0)
