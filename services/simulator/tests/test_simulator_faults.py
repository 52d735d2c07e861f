"""Environments that hang, die and raise: only their own episode is lost, and a new one stands ready."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.client import dial

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
REFUSED = simulator_pb2.OUTCOME_STATUS_REFUSED
HANG, RAISE, EXIT, NAN = 9.0, 8.0, 7.0, 6.0


@pytest.fixture
async def pool(simulator, environment_file):
    """Four environments in two processes (0 and 2 share one), reset, with a short step limit."""
    return await open_pool(simulator, environment_file, 0.5)


@pytest.fixture
async def patient_pool(simulator, environment_file):
    """The same with a step limit that the other environments' steps come nowhere near on a busy machine."""
    return await open_pool(simulator, environment_file, 3.0)


async def open_pool(simulator, environment_file, step_timeout_s):
    opened = await simulator.open(
        f"{environment_file}:make_env", count=4, seed=5, step_timeout_s=step_timeout_s
    )
    await opened.send(*(opened.reset_operation(i) for i in range(4)))
    return opened


@pytest.mark.parametrize(
    ("action", "why"),
    [(HANG, "longer than 0.5 s"), (EXIT, "exit code 7"), (RAISE, "gripper"), (NAN, "not finite")],
)
async def test_a_lost_environment_is_new_after_a_reset(pool, arrays, action, why):
    lost = await pool.act([action, 0.0], 0)
    assert lost.status == LOST and why in lost.detail
    assert not lost.observation
    early = await pool.act([0.0, 0.0], 0)
    assert early.status == REFUSED and "needs a reset: it was lost" in early.detail
    again = await pool.reset(0)
    assert (again.status, int(arrays(again)["steps"])) == (OK, 0)
    assert (await pool.act([0.0, 0.0], 0)).status == OK


async def test_a_loss_is_remembered_for_a_repeated_request(pool):
    operation = pool.action_operation([EXIT, 0.0], 0)
    first = (await pool.send(operation))[0]
    assert (await pool.send(operation))[0] == first


@pytest.mark.parametrize("loss", [EXIT, RAISE])
async def test_a_new_environment_starts_from_its_seed(pool, simulator, environment_file, arrays, loss):
    await pool.act([loss, 0.0], 1)
    fresh = await simulator.open(f"{environment_file}:make_env", count=4, seed=5)
    expected, found = await fresh.reset(1), await pool.reset(1)
    assert arrays(found)["start"] == arrays(expected)["start"]


async def test_a_dead_process_takes_only_its_own_environments(pool, arrays):
    pids = {i: json.loads((await pool.reset(i)).info_json)["pid"] for i in range(4)}
    assert pids[0] == pids[2] != pids[1] == pids[3]
    await pool.act([EXIT, 0.0], 0)
    neighbour = await pool.act([0.0, 0.0], 2)
    assert neighbour.status == LOST and "process" in neighbour.detail
    assert (await pool.reset(2)).status == OK
    for other in (1, 3):
        assert arrays(await pool.act([0.0, 0.0], other))["steps"] == 1


async def test_a_raising_environment_leaves_its_process_alone(pool, arrays):
    assert (await pool.act([RAISE, 0.0], 0)).status == LOST
    assert arrays(await pool.act([0.0, 0.0], 2))["steps"] == 1


async def test_a_killed_process_is_made_anew(pool):
    pid = json.loads((await pool.reset(0)).info_json)["pid"]
    psutil.Process(pid).kill()
    assert (await pool.act([0.0, 0.0], 0)).status == LOST
    again = await pool.reset(0)
    assert again.status == OK and json.loads(again.info_json)["pid"] != pid


async def test_a_hung_environment_holds_up_no_other_process(patient_pool):
    pool = patient_pool
    hanging = asyncio.create_task(pool.act([HANG, 0.0], 0))
    await asyncio.sleep(0.05)
    for _ in range(10):
        assert (await pool.act([0.0, 0.0], 1)).status == OK
    assert not hanging.done()
    assert (await hanging).status == LOST


async def test_outcomes_of_one_message_do_not_wait_for_its_slowest(patient_pool):
    pool = patient_pool
    operations = [pool.action_operation([HANG, 0.0], 0), pool.action_operation([0.0, 0.0], 1)]

    async def requests():
        yield simulator_pb2.StepRequest(
            header=pool.header,
            pool=pool.opened.pool,
            pool_incarnation=pool.opened.pool_incarnation,
            operations=operations,
        )

    arrived = [
        [(outcome.environment, outcome.status) for outcome in response.outcomes]
        async for response in pool.stub.Step(requests(), timeout=30)
    ]
    assert arrived == [[(1, OK)], [(0, LOST)]]


async def test_a_hung_reset_is_ended_by_its_own_limit(pool):
    begin = time.monotonic()
    lost = await pool.reset(0, options={"hang": True})
    assert lost.status == LOST and "longer than 1 s" in lost.detail
    assert time.monotonic() - begin < 5
    assert (await pool.reset(0)).status == OK


async def test_bad_reset_options_are_refused(pool):
    operation = pool.reset_operation(0)
    operation.reset.options_json = "[]"
    assert (await pool.send(operation))[0].status == REFUSED


def start(command: list[str], directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=directory, stderr=subprocess.DEVNULL)


async def test_nothing_is_left_when_the_service_is_killed(tmp_path, environment_file):
    """The process itself: `python -m headrace_simulator`, a child deep in a step, SIGKILL."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "headrace_simulator",
        "--listen",
        address,
        "--shm-dir",
        str(tmp_path / "shm"),
    ]
    service = start(command, tmp_path)
    try:
        channel = dial(address, token=None)
        stub = simulator_pb2_grpc.SimulatorServiceStub(channel)
        request = simulator_pb2.OpenPoolRequest(
            environment=simulator_pb2.Environment(backend="gymnasium", name=f"{environment_file}:make_env"),
            count=2,
        )
        request.header.request_id = "a"
        opened = await stub.OpenPool(request, timeout=60, wait_for_ready=True)
        call = stub.Step()
        hang = simulator_pb2.EnvironmentOperation(
            reset=simulator_pb2.ResetOperation(options_json='{"hang": true}')
        )
        await call.write(
            simulator_pb2.StepRequest(
                pool=opened.pool, pool_incarnation=opened.pool_incarnation, operations=[hang]
            )
        )
        await asyncio.sleep(0.3)
        children = psutil.Process(service.pid).children(recursive=True)
        assert len(children) == 2
        service.kill()
        assert (await asyncio.to_thread(psutil.wait_procs, children, timeout=20))[1] == []
        call.cancel()
        await channel.close()
    finally:
        service.kill()
        service.wait(10)
