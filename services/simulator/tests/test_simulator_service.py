"""The service over real gRPC: pools, episodes, idempotency, against gymnasium itself."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec

import grpc
import gymnasium
import numpy as np
import psutil
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import message_of, reason_of
from headrace_servicekit.rpc.tensors import decode_tensor
from headrace_simulator.pools.host import task_capabilities

OK = simulator_pb2.OUTCOME_STATUS_OK
REFUSED = simulator_pb2.OUTCOME_STATUS_REFUSED


async def refused(call, code=grpc.StatusCode.INVALID_ARGUMENT) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is code, raised.value
    return raised.value


def reference_rollout(seed: int, actions: list[int]) -> list[tuple]:
    """The same episodes in gymnasium, without the service."""
    environment = gymnasium.make("CartPole-v1")
    rows = [(environment.reset(seed=seed)[0], 0.0, False, False)]
    for action in actions:
        if rows[-1][2] or rows[-1][3]:
            rows.append((environment.reset()[0], 0.0, False, False))
        else:
            rows.append(environment.step(action)[:4])
    return rows


async def test_cartpole_equals_gymnasium_by_seed(simulator, arrays):
    pool = await simulator.open("CartPole-v1", count=3, seed=11)
    actions = [int(a) for a in np.random.default_rng(5).integers(0, 2, 60)]
    rows = {i: [(await pool.reset(i))] for i in range(3)}
    for action in actions:
        ended = {i: rows[i][-1].terminated or rows[i][-1].truncated for i in range(3)}
        outcomes = await pool.send(
            *(pool.reset_operation(i) if ended[i] else pool.action_operation(action, i) for i in range(3))
        )
        for i, outcome in outcomes.items():
            rows[i].append(outcome)
    for i in range(3):
        expected = reference_rollout(11 + i, actions)
        assert any(row[2] for row in expected)
        for outcome, (observation, reward, terminated, truncated) in zip(rows[i], expected, strict=True):
            np.testing.assert_array_equal(arrays(outcome)[""], observation)
            assert (outcome.status, outcome.reward, outcome.terminated, outcome.truncated) == (
                OK,
                reward,
                terminated,
                truncated,
            )


async def test_seeds_of_a_reset_and_of_the_pool(simulator, arrays):
    pool = await simulator.open("CartPole-v1", seed=3)
    first = arrays(await pool.reset())[""]
    going_on = arrays(await pool.reset())[""]
    named = arrays(await pool.reset(seed=3))[""]
    np.testing.assert_array_equal(first, named)
    assert not np.array_equal(first, going_on)


async def test_lists_environments_page_by_page(simulator):
    listed, token = [], ""
    while True:
        request = simulator_pb2.ListEnvironmentsRequest(page_size=25, page_token=token)
        page = await simulator.stub.ListEnvironments(request)
        assert len(page.environments) <= 25
        listed += [(each.backend, each.name) for each in page.environments]
        token = page.next_page_token
        if not token:
            break
    assert ("gymnasium", "CartPole-v1") in listed
    assert len(listed) == len(set(listed)) > 25


async def test_spaces_of_nested_observations(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env")
    spaces = {space.name: space for space in pool.opened.observation_spaces}
    assert set(spaces) == {"steps", "camera.rgb.front", "start"}
    assert decode_tensor(spaces["steps"].high, max_bytes=8) == 1000
    assert list(spaces["camera.rgb.front"].shape) == [4, 6, 3]
    assert not spaces["start"].HasField("low")
    assert decode_tensor(pool.opened.action_space.high, max_bytes=8).tolist() == [10, 10]
    observed = arrays(await pool.reset())
    assert observed["camera.rgb.front"].dtype == np.uint8
    assert observed["steps"].shape == ()


async def test_a_caller_that_reads_no_info_gets_that_of_resets_alone(simulator, environment_file):
    name = f"{environment_file}:make_env"
    silent, told = await simulator.open(name, without_info=True), await simulator.open(name)
    resets = [await pool.reset() for pool in (silent, told)]
    assert json.loads(resets[0].info_json).keys() == json.loads(resets[1].info_json).keys() != set()
    acted = [await pool.act([5.0, 1.5]) for pool in (silent, told)]
    assert [bool(outcome.info_json) for outcome in acted] == [False, True]
    assert (acted[0].success, acted[0].reward) == (acted[1].success, acted[1].reward)


async def test_success_info_and_final_observation(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env", options={"ends_at": 2})
    await pool.reset()
    first = await pool.act([5.0, 1.5])
    assert (first.success, first.reward, first.terminated) == (True, 1.5, False)
    assert json.loads(first.info_json) == {"is_success": True, "depth": 0.5}
    last = await pool.act([0.0, 0.0])
    assert last.terminated and not last.truncated and not last.success
    assert arrays(last)["steps"] == 2
    after = await pool.act([0.0, 0.0])
    assert after.status == REFUSED and "needs a reset" in after.detail
    assert arrays(await pool.reset())["steps"] == 0


async def test_the_service_counts_the_time_limit(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env", max_episode_steps=3)
    for _ in range(2):
        await pool.reset()
        flags = [(await pool.act([0.0, 0.0])).truncated for _ in range(3)]
        assert flags == [False, False, True]


async def test_the_time_limit_replaces_the_environments_own(simulator):
    pool = await simulator.open("MountainCar-v0", max_episode_steps=220)
    await pool.reset()
    truncated = [(await pool.act(1)).truncated for _ in range(220)]
    assert truncated.index(True) == 219
    own = await simulator.open("MountainCar-v0")
    await own.reset()
    assert [(await own.act(1)).truncated for _ in range(200)].index(True) == 199


async def test_a_refused_action_changes_nothing(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env")
    early = await pool.act([0.0, 0.0])
    assert early.status == REFUSED and "needs a reset: it is new" in early.detail
    await pool.reset()
    for wrong in ([0.0, 11.0], [0.0], [0.0, np.nan], [True, False]):
        outcome = await pool.act(wrong)
        assert outcome.status == REFUSED and outcome.step_index == 1, wrong
    assert (await pool.act([0.0, 1.0], 5)).status == REFUSED
    good = await pool.act([0.0, 1.0])
    assert (good.status, good.step_index, int(arrays(good)["steps"])) == (OK, 1, 1)


async def test_a_repeated_index_is_answered_from_memory(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env")
    await pool.reset()
    operation = pool.action_operation([0.0, 1.0])
    first = (await pool.send(operation))[0]
    again = (await pool.send(operation))[0]
    assert again == first and arrays(again)["steps"] == 1
    other = await pool.act([0.0, 2.0], index=1)
    assert other.status == REFUSED and "another operation" in other.detail
    gap = await pool.act([0.0, 1.0], index=5)
    assert gap.status == REFUSED and "where 2 is next" in gap.detail
    past = await pool.reset(index=0)
    assert past.status == REFUSED
    assert arrays(await pool.act([0.0, 1.0], index=2))["steps"] == 2


async def test_an_operation_outlives_the_stream_that_asked(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env")
    await pool.reset()
    operation = pool.action_operation([4.0, 1.0])
    call = pool.stub.Step()
    request = simulator_pb2.StepRequest(
        header=pool.header,
        pool=pool.opened.pool,
        pool_incarnation=pool.opened.pool_incarnation,
        operations=[operation],
    )
    await call.write(request)
    await asyncio.sleep(0.25)
    call.cancel()
    outcome = (await pool.send(operation))[0]
    assert (outcome.status, int(arrays(outcome)["steps"])) == (OK, 1)
    after = await pool.act([0.0, 1.0], index=2)
    assert (after.step_index, int(arrays(after)["steps"])) == (2, 2)


async def test_opening_is_idempotent_by_request(simulator):
    first = await simulator.open("CartPole-v1", request_id="a")
    again = await simulator.open("CartPole-v1", request_id="a")
    other = await simulator.open("CartPole-v1", request_id="b")
    assert first.opened == again.opened
    assert first.opened.pool != other.opened.pool
    error = await refused(
        simulator.open("CartPole-v1", request_id="a", seed=1), grpc.StatusCode.ALREADY_EXISTS
    )
    assert reason_of(error) == "CONFLICT"


async def test_closing_ends_the_processes(simulator, instance):
    pool = await simulator.open("CartPole-v1", count=4, request_id="a")
    children = psutil.Process().children(recursive=True)
    assert len(children) == 2 and instance.open_runs.names() == ["runs/test"]
    request = simulator_pb2.ClosePoolRequest(header=simulator.header(), pool=pool.opened.pool)
    for _ in range(2):
        await simulator.stub.ClosePool(request)
    assert psutil.wait_procs(children, timeout=5)[1] == [] and not instance.open_runs.names()
    await refused(pool.reset(), grpc.StatusCode.NOT_FOUND)
    await refused(simulator.open("CartPole-v1", count=4, request_id="a"), grpc.StatusCode.ALREADY_EXISTS)


async def test_another_incarnation_is_refused(simulator):
    pool = await simulator.open("CartPole-v1")
    pool.opened.pool_incarnation = "of-before"
    await refused(pool.reset(), grpc.StatusCode.FAILED_PRECONDITION)


async def test_one_operation_an_environment_and_message(simulator):
    pool = await simulator.open("CartPole-v1")
    operations = [pool.reset_operation(index=0), pool.reset_operation(index=1)]
    assert "at most one" in message_of(await refused(pool.send(*operations)))


async def test_a_past_coordinator_is_refused(simulator):
    pool = await simulator.open("CartPole-v1")
    pool.header.coordinator_epoch = 0
    error = await refused(pool.reset(), grpc.StatusCode.FAILED_PRECONDITION)
    assert reason_of(error) == "EPOCH_STALE"


async def test_environments_are_limited(simulator):
    pool = await simulator.open("CartPole-v1", count=30)
    error = await refused(simulator.open("CartPole-v1", count=3), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "more than 32" in message_of(error)
    await simulator.stub.ClosePool(
        simulator_pb2.ClosePoolRequest(header=simulator.header(), pool=pool.opened.pool)
    )
    await simulator.open("CartPole-v1", count=3)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "CartPol-v1",
            {},
            "environment.name: gymnasium has no environment 'CartPol-v1'; the nearest are Cart",
        ),
        (
            "CartPole-v1",
            {"backend": "gymnasum"},
            "environment.backend: there is no backend 'gymnasum'; did you",
        ),
        ("CartPole-v1", {"options": {"gravitas": 1}}, "options_json: TypeError"),
        ("CartPole-v1", {"options": [1]}, "options_json: give a JSON object"),
        ("CartPole-v1", {"count": 0}, "count"),
        ("CartPole-v1", {"max_episode_steps": -1}, "max_episode_steps"),
        ("absent.py:make_env", {}, "no such file"),
        ("robots.py", {}, "name the function too"),
        ("robots.py:make_envy", {}, "there is no function 'make_envy'"),
        ("robots.py:make_broken", {}, "no robot today"),
        ("robots.py:make_text", {}, "its observation is Text"),
        ("robots.py:make_many", {}, "its actions are Sequence"),
    ],
)
async def test_bad_pools_are_refused_with_the_key(simulator, environment_file, name, fields, expected):
    error = await refused(simulator.open(name, **fields))
    assert expected in message_of(error)
    assert not psutil.Process().children(recursive=True)


async def test_render(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env", count=2)
    await pool.send(pool.reset_operation(0), pool.reset_operation(1))
    await pool.act([0.0, 0.0], 1)
    request = simulator_pb2.RenderRequest(pool=pool.opened.pool, environments=[1, 0])
    frames = [
        decode_tensor(each, max_bytes=1 << 20) for each in (await simulator.stub.Render(request)).frames
    ]
    assert [(frame.shape, int(frame[0, 0, 0])) for frame in frames] == [((8, 8, 3), 1), ((8, 8, 3), 0)]
    blind = await simulator.open(f"{environment_file}:make_env", options={"picture": False})
    await blind.reset()
    request = simulator_pb2.RenderRequest(pool=blind.opened.pool, environments=[0])
    await refused(simulator.stub.Render(request), grpc.StatusCode.FAILED_PRECONDITION)
    request.environments[0] = 7
    await refused(simulator.stub.Render(request))


async def test_an_episode_goes_on_where_it_cannot_be_recorded(simulator, environment_file):
    """No frame is made without ffmpeg, or of an environment without pictures; who asks for the video is told."""
    pool = await simulator.open(f"{environment_file}:make_env", options={"picture": False})
    request = simulator_pb2.RenderRequest(pool=pool.opened.pool, environments=[0], video=True)
    await pool.reset()
    error = await refused(simulator.stub.Render(request), grpc.StatusCode.FAILED_PRECONDITION)
    assert "nothing was recorded" in message_of(error)
    await pool.reset(record=True)
    outcome = await pool.act([0.0, 0.0])
    assert outcome.status == simulator_pb2.OUTCOME_STATUS_OK
    error = await refused(simulator.stub.Render(request), grpc.StatusCode.FAILED_PRECONDITION)
    said = (
        "renders no rgb_array" if find_spec("imageio_ffmpeg") else "pip install 'headrace-simulator[video]'"
    )
    assert said in message_of(error)


async def test_an_instance_registers_the_names_of_its_environments(instance):
    (listed,) = [text for text in instance.capabilities["tasks"] if text.startswith("gymnasium=")]
    assert "Pendulum-v1" in json.loads(listed.partition("=")[2])


def test_a_list_of_environments_that_no_registration_holds_is_left_out():
    long = [("huge", f"task-{number:06}") for number in range(10_000)]
    assert task_capabilities([("small", "b"), ("small", "a"), *long]) == ['small=["a", "b"]']
