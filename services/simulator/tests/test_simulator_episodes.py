"""Chunks of actions, automatic resets, rewards, observations by reference, and steps under a lease."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from headrace.common.v1 import blobs_pb2, blobs_pb2_grpc
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, reason_of
from headrace_servicekit.rpc.tensors import decode_tensor

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
REFUSED = simulator_pb2.OUTCOME_STATUS_REFUSED
REVOKED = simulator_pb2.OUTCOME_STATUS_REVOKED
SPARSE = simulator_pb2.REWARD_MODE_SPARSE
MATRIX = """
import gymnasium, numpy as np
from gymnasium import spaces
class Matrix(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (2, 3), np.float64)
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float64)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}
    def step(self, action):
        return np.zeros(2), float(action[1, 0]), False, False, {}
make_env = Matrix
"""


def decoded(tensor) -> list:
    return decode_tensor(tensor, max_bytes=1 << 20).tolist()


async def test_a_chunk_gives_each_actions_reward_and_success(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env")
    await pool.reset()
    outcome = await pool.act_chunk([[0.0, 1.0], [5.0, 2.0], [0.0, 3.0]])
    assert (outcome.status, outcome.executed_length, outcome.reward) == (OK, 3, 6.0)
    assert decoded(outcome.rewards) == [1.0, 2.0, 3.0]
    assert decoded(outcome.successes) == [False, True, False] and outcome.success
    assert arrays(outcome)["steps"] == 3
    single = await pool.act([0.0, 1.0])
    assert single.executed_length == 1 and not single.HasField("rewards")


async def test_a_chunk_stops_at_the_episodes_end(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env", options={"ends_at": 2})
    await pool.reset()
    ended = await pool.act_chunk([[0.0, 1.0]] * 4)
    assert (ended.executed_length, ended.terminated, ended.truncated) == (2, True, False)
    assert decoded(ended.rewards) == [1.0, 1.0] and arrays(ended)["steps"] == 2
    limited = await simulator.open(f"{environment_file}:make_env", max_episode_steps=3)
    await limited.reset()
    assert (await limited.act_chunk([[0.0, 1.0]] * 2)).truncated is False
    cut = await limited.act_chunk([[0.0, 1.0]] * 2)
    assert (cut.executed_length, cut.terminated, cut.truncated) == (1, False, True)
    assert (await limited.act([0.0, 1.0])).status == REFUSED


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        ([[0.0, 0.0], [0.0, np.nan]], "action 1 of the chunk: the action holds a value that is not finite"),
        ([[0.0, 11.0]], "action 0 of the chunk"),
        ([0.0, 0.0], "a chunk of 1 or more actions has"),
        (np.zeros((0, 2)), "a chunk of 1 or more actions has"),
        ([[0.0]], "action 0 of the chunk: the action has shape [1]"),
    ],
)
async def test_a_wrong_chunk_changes_nothing(simulator, environment_file, arrays, actions, why):
    pool = await simulator.open(f"{environment_file}:make_env", count=2)
    await pool.send(pool.reset_operation(0), pool.reset_operation(1))
    both = await pool.send(pool.chunk_operation(actions, 0), pool.chunk_operation([[0.0, 0.0]], 1))
    assert both[0].status == REFUSED and why in both[0].detail
    assert both[1].status == OK and arrays(both[1])["steps"] == 1
    assert arrays(await pool.act([0.0, 0.0], 0))["steps"] == 1


@pytest.mark.parametrize("row", [True, False])
async def test_actions_of_a_matrix_may_come_as_rows(simulator, tmp_path, row):
    """A policy draws (2, 3) actions as six numbers; other sizes are refused."""
    (tmp_path / "matrix.py").write_text(MATRIX)
    pool = await simulator.open(f"{tmp_path / 'matrix.py'}:make_env")
    await pool.reset()
    chunk = np.arange(12.0).reshape((2, 6) if row else (2, 2, 3)) / 12
    outcome = await pool.act_chunk(chunk)
    assert (outcome.status, outcome.executed_length) == (OK, 2), outcome.detail
    np.testing.assert_allclose(decoded(outcome.rewards), [3 / 12, 9 / 12])
    assert (await pool.act(chunk[0])).status == OK
    assert "shape [1, 5]" in (await pool.act_chunk(np.zeros((1, 5)))).detail


async def test_a_chunk_has_the_time_of_its_steps(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env", step_timeout_s=0.9)
    await pool.reset()
    slow = [4.0, 0.0]  # half a second each
    assert (await pool.act_chunk([slow, slow, slow])).status == OK


async def test_an_automatic_reset_keeps_the_final_observation(simulator, environment_file, arrays):
    pool = await simulator.open(f"{environment_file}:make_env", max_episode_steps=2, auto_reset=True)
    await pool.reset()
    running = await pool.act([0.0, 0.0])
    assert not running.final_observation
    cut = await pool.act([0.0, 0.0])
    assert cut.truncated and arrays(cut)["steps"] == 0
    assert decoded(cut.final_observation["steps"]) == 2
    following = await pool.act([0.0, 0.0])
    assert following.status == OK and arrays(following)["steps"] == 1
    assert (await pool.act([0.0, 0.0])).truncated


async def test_an_automatic_reset_leaves_a_lost_environment_to_its_user(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env", auto_reset=True)
    await pool.reset()
    assert (await pool.act([7.0, 0.0])).status == LOST
    assert (await pool.act([0.0, 0.0])).status == REFUSED
    assert (await pool.reset()).status == OK


async def test_a_sparse_reward_is_made_of_success(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env", reward_mode=SPARSE)
    await pool.reset()
    assert [(await pool.act([what, 3.0])).reward for what in (0.0, 5.0)] == [0.0, 1.0]
    blind = await simulator.open("CartPole-v1", reward_mode=SPARSE)
    await blind.reset()
    while not (ended := await blind.act(1)).detail:
        assert ended.status == OK and not ended.terminated and not ended.success_reported
    assert ended.status == LOST and "ended without a success flag" in ended.detail


AT_ITS_END = """
import gymnasium, numpy as np
from gymnasium import spaces
class Reach(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.steps += 1
        ended = self.steps == 3
        return np.zeros(1, np.float32), 9.0, ended, False, {"is_success": True} if ended else {}
make_env = Reach
"""


async def test_success_may_be_reported_at_an_episodes_end_alone(simulator, tmp_path):
    (tmp_path / "reach.py").write_text(AT_ITS_END)
    pool = await simulator.open(f"{tmp_path}/reach.py:make_env", reward_mode=SPARSE)
    await pool.reset()
    begun = await pool.act_chunk([[0.0], [0.0]])
    assert (begun.status, begun.reward, begun.success_reported) == (OK, 0.0, False)
    ended = await pool.act_chunk([[0.0], [0.0]])
    assert (ended.reward, ended.success, ended.success_reported, ended.terminated) == (1.0, True, True, True)
    cut = await simulator.open(f"{tmp_path}/reach.py:make_env", reward_mode=SPARSE, max_episode_steps=2)
    await cut.reset()
    early = await cut.act_chunk([[0.0], [0.0]])
    assert (early.status, early.truncated, early.reward) == (OK, True, 0.0), "its limit came before its end"


async def test_as_many_processes_as_asked_for(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env", count=4, processes=4)
    pids = {(await pool.reset(i)).info_json for i in range(4)}
    assert len(pids) == 4
    await pool.act([7.0, 0.0], 0)
    for sibling in (1, 2, 3):
        assert (await pool.act([0.0, 0.0], sibling)).status == OK


async def test_large_observations_travel_by_reference(simulator, environment_file, instance):
    pool = await simulator.open(f"{environment_file}:make_env", blob_bytes=64)
    await pool.reset()
    outcome = await pool.act([0.0, 0.0])
    image = outcome.observation["camera.rgb.front"]
    assert image.WhichOneof("body") == "blob" and list(image.shape) == [4, 6, 3]
    assert outcome.observation["start"].WhichOneof("body") == "data"
    here = BlobReader(instance.config.shm_dir, None)
    elsewhere = BlobReader(instance.config.shm_dir / "another-host", None)
    for reader in (here, elsewhere):
        assert await reader.read(image.blob) == bytes([1]) * 72
    await pool.act([0.0, 0.0])
    with pytest.raises(ServiceError, match="not kept here"):
        await elsewhere.read(image.blob)
    for reader in (here, elsewhere):
        await reader.close()


async def test_a_closed_pool_keeps_no_blobs(simulator, environment_file, instance):
    pool = await simulator.open(f"{environment_file}:make_env", blob_bytes=64)
    image = (await pool.reset()).observation["camera.rgb.front"]
    request = simulator_pb2.ClosePoolRequest(header=simulator.header(), pool=pool.opened.pool)
    await simulator.stub.ClosePool(request)
    channel = dial(instance.address, token=None)
    stub = blobs_pb2_grpc.BlobServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stub.FetchBlob(blobs_pb2.FetchBlobRequest(blob=image.blob)):
            pass
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    await channel.close()


async def test_steps_need_the_pools_lease(simulator, environment_file, instance, arrays):
    instance.fence.grant(7)
    pool = await simulator.open(f"{environment_file}:make_env", lease_epoch=7)
    await pool.reset()
    pool.header.lease_epoch = 0
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pool.act([0.0, 0.0])
    assert reason_of(raised.value) == "EPOCH_STALE"
    pool.header.lease_epoch = 7
    assert arrays(await pool.act([0.0, 0.0]))["steps"] == 1


async def test_a_stream_goes_on_under_another_lease(simulator, environment_file, instance, arrays):
    """One stream: its lease ends, the operation is returned unrun, and the same one runs under the next lease."""
    instance.fence.grant(7)
    pool = await simulator.open(f"{environment_file}:make_env", lease_epoch=7)
    await pool.reset()
    call = pool.stub.Step(timeout=60)

    async def act(header=None):
        request = simulator_pb2.StepRequest(
            header=header,
            pool=pool.opened.pool,
            pool_incarnation=pool.opened.pool_incarnation,
            operations=[pool.action_operation([0.0, 0.0])],
        )
        await call.write(request)
        (outcome,) = (await call.read()).outcomes
        if outcome.status == OK:
            pool.next_index[0] = outcome.step_index + 1
        return outcome

    assert (await act(pool.header)).status == OK
    await instance.on_revoke(7, 1.0)
    instance.fence.release(7)
    refused = await act()
    assert refused.status == REVOKED and "7" in refused.detail
    instance.fence.grant(8)
    pool.header.lease_epoch = 8
    again = await act(pool.header)
    assert again.status == OK and arrays(again)["steps"] == 2
    await call.done_writing()


async def test_a_revoke_ends_what_takes_longer_than_its_notice(simulator, environment_file, instance):
    import asyncio

    instance.fence.grant(7)
    pool = await simulator.open(f"{environment_file}:make_env", lease_epoch=7, step_timeout_s=60.0)
    await pool.reset()
    hanging = asyncio.create_task(pool.act([9.0, 0.0]))
    await asyncio.sleep(0.3)
    await instance.on_revoke(7, 0.2)
    assert (await hanging).status == LOST


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"processes": -1}, "processes"),
        ({"blob_bytes": -1}, "blob_bytes"),
        ({"reward_mode": 9}, "reward_mode"),
    ],
)
async def test_bad_settings_are_refused_with_the_key(simulator, environment_file, fields, expected):
    with pytest.raises(grpc.aio.AioRpcError, match=expected):
        await simulator.open(f"{environment_file}:make_env", **fields)


async def test_an_initial_state_that_is_not_there_is_refused(simulator, environment_file):
    pool = await simulator.open(f"{environment_file}:make_env")
    refused = await pool.reset(init_state=0)
    assert refused.status == REFUSED and "name a seed" in refused.detail


@pytest.mark.parametrize("backend", ["metaworld", "maniskill", "libero"])
async def test_a_simulator_that_is_not_installed_names_its_extra(simulator, backend):
    from importlib.util import find_spec

    modules = {"metaworld": "metaworld", "maniskill": "mani_skill", "libero": "libero"}
    if find_spec(modules[backend]) is not None:
        pytest.skip(f"{backend} is installed here")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await simulator.open("any", backend=backend)
    assert f"headrace-simulator[{backend}]" in raised.value.details()
