"""The backend `robot` over the real service: its process, its children, the operator's page and its signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from harness.wires import wire
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.rpc.relay import listen_for
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.rpc.tensors import decode_tensor
from headrace_simulator.__main__ import mount
from services_simulator_conftest import SimulatorClient

OK, LOST = simulator_pb2.OUTCOME_STATUS_OK, simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
FILE = Path(__file__).with_name("robot_arm.py")


@pytest.fixture
def reset_timeout_s():
    return 60.0


@pytest.fixture
def port(monkeypatch, tmp_path):
    """Of the operator's page; the robot's host is this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = probe.getsockname()[1]
    monkeypatch.setenv("HEADRACE_SIMULATOR_ROBOT", f"{FILE}:make_arm")
    monkeypatch.setenv("ARM_STOP_FILE", str(tmp_path / "stopped"))
    monkeypatch.setenv("ARM_PAGE_PORT", str(found))
    return found


@pytest.fixture
def confirmed(monkeypatch):
    monkeypatch.setenv("ARM_CONFIRM", "1")


class Operator:
    """A person at the page."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(self.url, timeout=20) as page:
            self.key = page.read().decode().partition('const key = "')[2].partition('"')[0]

    def say(self, what, **headers):
        given = {"X-Robot-Key": self.key, **headers}
        request = urllib.request.Request(f"{self.url}/{what}", b"operator=grace", given, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def look(self):
        with urllib.request.urlopen(f"{self.url}/state", timeout=20) as answer:
            return json.loads(answer.read())

    async def sees(self, state):
        async with asyncio.timeout(30):
            while True:
                text = await asyncio.to_thread(
                    lambda: urllib.request.urlopen(f"{self.url}/state", timeout=20).read()
                )
                if json.loads(text)["state"] == state:
                    return json.loads(text)
                await asyncio.sleep(0.01)


def row(lift, turn=0.0):
    return np.array([lift, turn], np.float32)


async def test_a_pool_acts_by_the_robots_process_and_the_host_opens_nothing_else(port, simulator, arrays):
    listed = (await simulator.stub.ListEnvironments(simulator_pb2.ListEnvironmentsRequest())).environments
    assert [(each.backend, each.name) for each in listed] == [("robot", "make_arm")]
    pool = await simulator.open("make_arm", backend="robot")
    assert {space.name for space in pool.opened.observation_spaces} == {"state", "front"}
    begun = await pool.reset(seed=1)
    assert begun.status == OK and arrays(begun)["front"].shape == (8, 8, 3)
    chunk = await pool.act_chunk(np.stack([row(0.1), row(0.2), row(0.3)]))
    assert chunk.executed_length == 3 and not chunk.HasField("interventions")
    np.testing.assert_allclose(arrays(chunk)["state"], [0.3, 0], atol=1e-6)
    fast = await pool.act(row(-1.0))
    assert fast.status == LOST and "limits.lift.pos.speed" in fast.detail
    for backend, name, words in (
        ("gymnasium", "CartPole-v1", "this host has a robot"),
        ("robot", "make_arn", "there is no robot 'make_arn'; did you mean 'make_arm'?"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await simulator.open(name, backend=backend)
        assert words in message_of(refused.value)
    with pytest.raises(grpc.aio.AioRpcError, match="stop_file"):
        await simulator.open("make_arm", backend="robot", options={"stop_file": "elsewhere"})


async def test_only_a_person_on_the_host_stops_clears_and_confirms(confirmed, port, simulator, arrays):
    pool = await simulator.open("make_arm", backend="robot", step_timeout_s=60.0)
    operator = await asyncio.to_thread(Operator, port)
    begins = asyncio.create_task(pool.reset())
    assert (await operator.sees("waits for a reset"))["operator"] == "ada"
    assert await asyncio.to_thread(lambda: operator.say("confirmed", **{"X-Robot-Key": "guessed"})) == 403
    assert await asyncio.to_thread(lambda: operator.say("confirmed", Host="evil.example:80")) == 403
    assert not begins.done()
    assert await asyncio.to_thread(operator.say, "confirmed") == 200
    assert (await begins).status == OK
    assert (await pool.act(row(0.1))).status == OK
    assert await asyncio.to_thread(operator.say, "take") == 200
    taken = await pool.act(row(0.2))
    while not taken.author:  # the page's word may come a tick later
        taken = await pool.act(row(0.2))
    assert taken.author == "grace"
    done = decode_tensor(taken.interventions, max_bytes=1 << 10)
    np.testing.assert_allclose(done[0], arrays(taken)["state"], atol=1e-6)
    assert await asyncio.to_thread(lambda: operator.say("stop", **{"X-Robot-Key": "anybody"})) == 200
    await operator.sees("stopped")
    stopped = await pool.act(row(0.3))
    assert stopped.status == LOST and "emergency stop" in stopped.detail
    # The coordinator closes and opens pools as it likes: the stop stays.
    again = await simulator.open("make_arm", backend="robot", step_timeout_s=60.0)
    begins = asyncio.create_task(again.reset())
    await operator.sees("stopped")
    assert await asyncio.to_thread(operator.say, "clear") == 200
    await operator.sees("waits for a reset")
    assert await asyncio.to_thread(operator.say, "give") == 200
    assert await asyncio.to_thread(operator.say, "confirmed") == 200
    assert (await begins).status == OK
    assert await asyncio.to_thread(operator.say, "success") == 200
    last = await again.act(row(0.4))
    assert last.terminated and last.success


@pytest.mark.nightly  # The station's own tests are its quick twin.
async def test_a_signal_stops_it_and_a_killed_child_leaves_the_robot_held(port, simulator, monkeypatch):
    pool = await simulator.open("make_arm", backend="robot")
    await pool.reset()
    await pool.act(row(0.1))
    operator = await asyncio.to_thread(Operator, port)
    children = {each.cmdline()[-1]: each for each in psutil.Process().children()}
    children["headrace_simulator.child"].send_signal(signal.SIGKILL)
    await operator.sees("idle")
    lost = await pool.act(row(0.2))
    assert lost.status == LOST
    assert (await pool.reset()).status == OK
    broker = children["headrace_robots.simulator.robot.broker"]
    os.kill(broker.pid, signal.SIGUSR1)
    await operator.sees("stopped")
    broker.send_signal(signal.SIGKILL)  # the stop outlives its process
    ended = await pool.act(row(0.1))
    assert ended.status == LOST
    async with asyncio.timeout(60):
        while True:
            try:
                again = await asyncio.to_thread(Operator, port)
                break
            except (OSError, urllib.error.URLError):
                await asyncio.sleep(0.05)
    await again.sees("stopped")


async def test_a_robot_file_that_is_wrong_is_named_as_a_pool_is_opened(port, simulator, monkeypatch):
    monkeypatch.setenv("HEADRACE_SIMULATOR_ROBOT", f"{FILE}:without_a_limit")  # read by the robot's process
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await simulator.open("make_arm", backend="robot")
    text = message_of(refused.value)
    assert "HEADRACE_SIMULATOR_ROBOT" in text and "limits: 'turn.pos'" in text, text


class Coordinator(fleet_pb2_grpc.FleetServiceServicer):
    """Listens for instances as the real one does, and knows nothing else."""

    def __init__(self):
        self.registered = asyncio.get_running_loop().create_future()

    async def Register(self, request, context):
        if not self.registered.done():
            self.registered.set_result(request.address)
        return fleet_pb2.RegisterResponse(coordinator_epoch=1)

    async def Relay(self, request_iterator, context):
        async for response in listen_for(request_iterator, "127.0.0.1"):
            yield response


@pytest.fixture
async def behind_a_wire(port, tmp_path, monkeypatch):
    """A robot's host that only dials, by a wire that a test cuts; a client that knows the coordinator alone."""
    monkeypatch.setenv("ARM_SILENCE_S", "0.5")
    coordinator, server = Coordinator(), GrpcServer("127.0.0.1:0", token=None, instance="coordinator")
    add = fleet_pb2_grpc.add_FleetServiceServicer_to_server
    server.add_service(add, coordinator, "headrace.coordinator.v1.FleetService")
    async with wire(await server.start()) as cable:
        fields = {"shm_dir": tmp_path / "shm", "data_dir": tmp_path / "data"}
        instance = Instance(
            InstanceConfig(kind="simulator", coordinator=cable.address, outgoing=True, **fields)
        )
        close = await mount(instance)
        await instance.start()
        channel = dial(await coordinator.registered, token=None)
        yield SimulatorClient(simulator_pb2_grpc.SimulatorServiceStub(channel)), cable
        await channel.close()
        cable.mend()
        await close()
        await instance.stop(0.5)
    await server.drain(0)


async def test_a_lost_link_holds_the_robot_and_what_failed_is_told_after_it(behind_a_wire, port):
    simulator, cable = behind_a_wire
    pool = await simulator.open("make_arm", backend="robot")
    assert (await pool.reset()).status == OK
    assert (await pool.act(row(0.1))).status == OK
    operator = await asyncio.to_thread(Operator, port)
    cable.cut()
    acting = asyncio.create_task(pool.act(row(0.2)))
    told = await operator.sees("idle")
    assert "no action came for" in told["why"] and not acting.done()
    cable.mend()
    lost = await acting
    assert lost.status == LOST and "no action came for" in lost.detail
    again = await pool.reset()  # the robot has held, and goes on from there
    assert again.status == OK
    np.testing.assert_allclose(decode_tensor(again.observation["state"], max_bytes=99), [0.1, 0], atol=1e-6)
    cable.reset()  # the connection itself is gone: it is made anew, at the same address
    async with asyncio.timeout(60):
        while True:
            try:
                listed = await simulator.stub.ListEnvironments(
                    simulator_pb2.ListEnvironmentsRequest(), timeout=5
                )
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
    assert listed.environments[0].name == "make_arm"
    assert (await pool.reset()).status == OK, "the pool is still there"
