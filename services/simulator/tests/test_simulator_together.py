"""Environments that one call steps: Gymnasium's vectors in each mode of beginning anew, and batches of tensors.

The vectors here are whole ones, in a file as a user has it; those of tensors have the forms of ManiSkill and Isaac Lab.
"""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium
import numpy as np
import pytest
from contract_cases import UNDER_TEST
from gymnasium import spaces
from headrace.simulator.v1 import simulator_pb2
from headrace_robots.simulator.isaaclab import FORM as BY_IDS
from headrace_robots.simulator.isaaclab import batched as isaac
from headrace_robots.simulator.maniskill.backend import FORM as BY_INDEX
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.rpc.tensors import decode_tensor
from headrace_simulator import backends
from headrace_simulator.backends.base import BackendError, Start
from headrace_simulator.backends.batched import Batched, bound_memory, require_gpu
from headrace_simulator.batches import outcome_of
from headrace_simulator.pipes import MEMORY_PART

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(UNDER_TEST != "gymnasium", reason="asked once, of gymnasium")
OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
REFUSED = simulator_pb2.OUTCOME_STATUS_REFUSED

# Walks to 3; each environment shows (position, its start, steps of the whole vector's process).
VECTORS = """
import os

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

MODES = {"next": AutoresetMode.NEXT_STEP, "same": AutoresetMode.SAME_STEP, "off": AutoresetMode.DISABLED}


class Walks(VectorEnv):
    def __init__(self, num_envs, mode="next", partial=True):
        self.num_envs, self.partial = num_envs, partial
        self.metadata = {"autoreset_mode": MODES[mode]}
        self.single_observation_space = spaces.Dict({
            "place": spaces.Box(-100, 100, (1,), np.float32), "from": spaces.Box(0, 1, (1,), np.float32)
        })
        self.single_action_space = spaces.Box(-9, 9, (1,), np.float32)
        self.random = [np.random.default_rng(i) for i in range(num_envs)]
        self.place, self.start = np.zeros(num_envs), np.zeros(num_envs)
        self.done, self.calls = np.zeros(num_envs, bool), 0

    def observe(self):
        return {"place": self.place[:, None].astype(np.float32), "from": self.start[:, None].astype(np.float32)}

    def begin(self, i, seed=None):
        if seed is not None:
            self.random[i] = np.random.default_rng(seed)
        self.start[i] = self.place[i] = self.random[i].random()
        self.done[i] = False

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        if not self.partial:
            mask = np.ones(self.num_envs, bool)
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + i for i in range(self.num_envs)]
        if 13 in seed:
            raise RuntimeError("there is no floor to begin on")
        for i in np.flatnonzero(mask):
            self.begin(i, seed[i])
        return self.observe(), {}

    def step(self, actions):
        self.calls += 1
        if float(actions.max()) == 9:
            raise RuntimeError("the floor broke")
        if float(actions.max()) == 8:
            os._exit(8)
        mode, before = self.metadata["autoreset_mode"], self.done.copy()
        assert mode is not AutoresetMode.DISABLED or not before.any(), "one has ended and was not reset"
        for i in np.flatnonzero(before if mode is AutoresetMode.NEXT_STEP else []):
            self.begin(i)
        self.place += np.where(before & (mode is AutoresetMode.NEXT_STEP), 0, actions[:, 0])
        self.done = (self.place >= 3) & ~before
        ended, reward = self.done.copy(), actions[:, 0].astype(float)
        info = {"success": ended.copy(), "_success": np.ones(self.num_envs, bool)}
        info["calls"] = np.full(self.num_envs, self.calls)
        if mode is AutoresetMode.SAME_STEP and ended.any():
            info["final_obs"], info["_final_obs"] = self.observe(), ended
            info["final_info"], info["_final_info"] = {"success": ended.copy()}, ended
            info["success"] = np.zeros(self.num_envs, bool)
            for i in np.flatnonzero(ended):
                self.begin(i)
        return self.observe(), reward, ended, np.zeros(self.num_envs, bool), info

    def close_extras(self, **kwargs):
        pass


def make_one(num_envs):
    return gymnasium.make("Pendulum-v1")
"""


@pytest.fixture
def vectors(tmp_path):
    (tmp_path / "walks.py").write_text(VECTORS)
    return "walks.py:Walks"


async def walk(pool, by, *, chunk=False):
    """All environments that are given a way, in one message."""
    operation = pool.chunk_operation if chunk else pool.action_operation
    return await pool.send(*(operation(np.float32(way), environment) for environment, way in by.items()))


@pytest.mark.parametrize("mode", ["next", "same", "off"])
async def test_each_environment_has_episodes_of_its_own_whatever_the_vector_does_at_an_end(
    simulator, vectors, arrays, mode
):
    pool = await simulator.open(vectors, options={"mode": mode}, count=3, vectorized=True)
    begun = await pool.send(*(pool.reset_operation(i, seed=7 if i < 2 else 8) for i in range(3)))
    starts = [arrays(begun[i])["from"].item() for i in range(3)]
    assert starts[0] == starts[1] != starts[2], "an environment's seed decides, and not its place"
    ended = await walk(pool, {0: [3.0], 1: [1.0], 2: [1.0]})
    assert [ended[i].terminated for i in range(3)] == [True, False, False]
    assert ended[0].success and arrays(ended[0])["place"].item() == pytest.approx(starts[0] + 3)
    on = await walk(pool, {1: [1.0], 2: [0.5]})
    assert arrays(on[1])["place"].item() == pytest.approx(starts[1] + 2)
    again = await pool.reset(0, seed=7)
    assert arrays(again)["place"].item() == pytest.approx(starts[0])
    last = await walk(pool, {0: [1.0], 1: [0.0], 2: [0.0]})
    places = [arrays(last[i])["place"].item() for i in range(3)]
    assert places == pytest.approx([starts[0] + 1, starts[1] + 2, starts[2] + 1.5])


async def test_chunks_of_a_message_and_of_several_are_stepped_in_one_call(simulator, vectors):
    pool = await simulator.open(vectors, count=2, vectorized=True)
    await pool.send(pool.reset_operation(0, seed=1), pool.reset_operation(1, seed=1))
    both = await walk(pool, {0: [[1.0], [2.0], [1.0]], 1: [[0.5], [0.5], [0.5]]}, chunk=True)
    assert (both[0].executed_length, both[1].executed_length) == (2, 3)
    rewards = decode_tensor(both[0].rewards, max_bytes=1 << 20)
    assert rewards.tolist() == [1.0, 2.0] and '"calls": 3' in both[1].info_json
    await pool.reset(0)
    one, other = await asyncio.gather(walk(pool, {0: [0.1]}), walk(pool, {1: [0.1]}))
    assert '"calls": 4' in one[0].info_json and '"calls": 4' in other[1].info_json


async def test_an_episode_whose_action_does_not_come_is_abandoned_and_the_others_go_on(simulator, vectors):
    pool = await simulator.open(vectors, count=2, vectorized=True)
    await pool.send(pool.reset_operation(0), pool.reset_operation(1))
    assert (await walk(pool, {0: [0.1]}))[0].status == OK
    lost = (await walk(pool, {0: [0.1], 1: [0.1]}))[1]
    assert lost.status == LOST and "no action of it came within 0.3 s" in lost.detail
    await pool.reset(1)
    assert {each.status for each in (await walk(pool, {0: [0.1], 1: [0.1]})).values()} == {OK}


def of_rows(response):
    """Outcomes by environment, whether they came as rows or one by one."""
    rows = [outcome_of(response.batch, row) for row in range(len(response.batch.environments))]
    return {each.environment: each for each in [*response.outcomes, *rows]}


@pytest.mark.parametrize("mode", ["next", "same", "off"])
async def test_a_batch_comes_to_what_its_chunks_come_to_one_by_one(simulator, vectors, mode):
    fields = {"options": {"mode": mode}, "count": 3, "vectorized": True, "without_info": True}
    pool, other = [await simulator.open(vectors, max_episode_steps=5, **fields) for _ in range(2)]
    for each in (pool, other):
        await each.send(*(each.reset_operation(i, seed=i) for i in range(3)))
    ways = [[[1.0], [0.5]], [[0.25], [0.25]], [[2.0], [1.5]]]
    ended: set[int] = set()
    for turn in range(5):
        acting = {i: ways[i] for i in range(3) if i not in ended}
        begun = [i for i in range(3) if i in ended]
        response = await pool.send_batch(acting, *(pool.reset_operation(i, seed=turn) for i in begun))
        assert sorted(response.batch.environments) == sorted(acting), "all came in rows"
        operations = [other.chunk_operation(np.float32(way), i) for i, way in acting.items()]
        alone = await other.send(*operations, *(other.reset_operation(i, seed=turn) for i in begun))
        found = of_rows(response)
        for each in found.values():
            if begun and each.environment in begun:
                each.info_json = alone[each.environment].info_json
        assert found == alone
        pool.next_index = dict(other.next_index)
        ended = {i for i in acting if alone[i].terminated or alone[i].truncated}
    assert of_rows(response)[2].truncated or turn


async def test_a_batch_is_repeated_refused_and_lost_as_its_chunks_are(simulator, vectors):
    pool = await simulator.open(vectors, count=4, processes=2, vectorized=True, without_info=True)
    await pool.send(*(pool.reset_operation(i, seed=i) for i in range(4)))
    first = await pool.send_batch({0: [[1.0]], 1: [[0.5]]})
    again = await pool.send_batch({0: [[1.0]], 1: [[0.5]]})
    assert of_rows(again) == of_rows(first) and not again.batch.environments
    other = of_rows(await pool.send_batch({0: [[2.0]], 1: [[0.5]]}))
    assert other[0].status == REFUSED and "was another operation" in other[0].detail
    assert other[1] == of_rows(first)[1]
    pool.next_index |= {0: 2, 1: 2}
    beyond = of_rows(await pool.send_batch({0: [[1.0]], 1: [[10.0]]}))
    assert [beyond[i].status for i in range(2)] == [OK, REFUSED] and "out of its bounds" in beyond[1].detail
    both = of_rows(await pool.send_batch({2: [[0.5]], 3: [[0.5]], 7: [[0.5]]}))
    assert [both[i].status for i in (2, 3, 7)] == [OK, OK, REFUSED]
    pool.next_index |= {2: 2, 3: 2}
    for way in (9.0, 8.0):
        lost = of_rows(await pool.send_batch({2: [[0.5]], 3: [[way]]}))
        assert [lost[i].status for i in (2, 3)] == [LOST, LOST]
        pool.next_index |= {i: lost[i].step_index + 1 for i in (2, 3)}
        await pool.send(*(pool.reset_operation(i, seed=i) for i in (2, 3)))
    with pytest.raises(Exception, match="give one of each"):
        call = await pool.stream()
        batch = simulator_pb2.ChunkBatch(environments=[2, 3], step_indices=[1])
        await call.write(pool.request(batch=batch))
        await call.read()


@pytest.mark.parametrize("way", [9.0, 8.0], ids=["raises", "dies"])
async def test_a_vector_that_raises_or_dies_takes_its_environments_and_is_made_anew(simulator, vectors, way):
    pool = await simulator.open(vectors, count=4, processes=2, vectorized=True)
    await pool.send(*(pool.reset_operation(i) for i in range(4)))
    broken = await walk(pool, {0: [way], 1: [0.1], 2: [0.1], 3: [0.1]})
    assert [broken[i].status for i in range(4)] == [LOST, LOST, OK, OK], "blocks lie in processes"
    await pool.send(*(pool.reset_operation(i) for i in range(2)))
    whole = await walk(pool, {i: [0.1] for i in range(4)})
    assert {each.status for each in whole.values()} == {OK}


async def test_a_vector_that_raises_as_episodes_begin_is_dropped_with_its_reason_and_made_anew(
    simulator, vectors
):
    pool = await simulator.open(vectors, count=4, processes=2, vectorized=True)
    await pool.send(*(pool.reset_operation(i, seed=i) for i in range(4)))
    broken = await pool.send(pool.reset_operation(0, seed=13), pool.reset_operation(1, seed=1))
    assert [broken[i].status for i in range(2)] == [LOST, LOST], "its other environment is lost with it"
    assert all("RuntimeError: there is no floor to begin on (walks.py:" in broken[i].detail for i in range(2))
    others = await walk(pool, {2: [0.1], 3: [0.1]})
    assert [others[i].status for i in (2, 3)] == [OK, OK], "those of the other process go on"
    await pool.send(*(pool.reset_operation(i, seed=i) for i in range(2)))
    whole = await walk(pool, {i: [0.1] for i in range(4)})
    assert {each.status for each in whole.values()} == {OK}


async def test_rules_of_the_pool_hold_for_each_environment(simulator, vectors, arrays):
    pool = await simulator.open(
        vectors, count=2, vectorized=True, max_episode_steps=2, auto_reset=True,
        reward_mode=simulator_pb2.REWARD_MODE_SPARSE,
    )  # fmt: skip
    await pool.send(pool.reset_operation(0, seed=3), pool.reset_operation(1, seed=4))
    first = await walk(pool, {0: [3.0], 1: [1.0]})
    assert (first[0].reward, first[1].reward) == (1.0, 0.0) and first[0].final_observation
    second = await walk(pool, {0: [0.0], 1: [1.0]})
    assert second[1].truncated and not second[0].truncated
    final = decode_tensor(second[1].final_observation["place"], max_bytes=1 << 10)
    assert final > 2 > arrays(second[1])["place"], "the next episode has begun"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("name", "backend", "options", "words"),
    [
        ("walks.py:Walks", "gymnasium", {"partial": False}, "begins an episode in all of them"),
        ("walks.py:make_one", "gymnasium", {}, "not a VectorEnv"),
        ("CartPole-v1", "gymnasium", {}, "Set options.vectorization_mode: sync"),
        ("Pendulum-v1", "gymnasium", {"vectorization_mode": "async"}, "it may be 'sync'"),
        ("calculator", "conversation", {}, "conversation steps no environments together"),
        (
            "Pendulum-v1",
            "gymnasium",
            {"variant": {"execution": {"random_start": 3}}},
            "takes no step alone",
        ),
    ],
)
async def test_what_cannot_be_stepped_together_is_refused_with_the_way_out(
    simulator, vectors, name, backend, options, words, count
):
    if count == 1 and not options.get("partial", True):
        pytest.skip("one that begins all begins one alone")
    with pytest.raises(Exception) as raised:
        await simulator.open(name, backend=backend, options=options, count=count, vectorized=True)
    assert words in message_of(raised.value)


class Batch(gymnasium.Env):
    """Tensors (N, …) of torch, as ManiSkill gives and takes them; starts are drawn from one stream a call."""

    def __init__(self, number: int) -> None:
        self.num_envs, self.device = number, torch.device("cpu")
        self.single_observation_space = spaces.Dict(
            {
                "state": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "sensor_data": spaces.Dict(
                    {"base": spaces.Dict({"rgb": spaces.Box(0, 255, (4, 4, 3), np.uint8)})}
                ),
            }
        )
        self.single_action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.state = torch.zeros(number, 2)
        self.received: list[Any] = []

    def observe(self) -> dict[str, Any]:
        image = torch.zeros(self.num_envs, 4, 4, 3, dtype=torch.uint8) + torch.arange(self.num_envs).view(
            -1, 1, 1, 1
        )
        return {"state": self.state.clone(), "sensor_data": {"base": {"rgb": image.to(torch.uint8)}}}

    def begin(self, seed: int | None, chosen: Any) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            torch.manual_seed(seed)
        self.state[chosen] = torch.rand(len(chosen), 2)
        return self.observe(), {"elapsed_steps": torch.zeros(self.num_envs)}

    def step(self, action: Any) -> tuple[Any, ...]:
        assert isinstance(action, torch.Tensor) and action.shape == (self.num_envs, 2)
        self.state = self.state + action
        done = self.state[:, 0] > 2
        info = {
            "success": done.clone(),
            "elapsed_steps": torch.ones(self.num_envs),
            "log": {"mean": torch.ones(())},
        }
        return self.observe(), action.sum(1), done, torch.zeros_like(done), info

    def render(self) -> Any:
        return self.observe()["sensor_data"]["base"]["rgb"]


class ByIndex(Batch):
    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        chosen = (options or {}).get("env_idx", torch.arange(self.num_envs))
        return self.begin(seed[0] if isinstance(seed, list) else seed, chosen)


class ByIds(Batch):
    def reset(
        self, *, seed: Any = None, env_ids: Any = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        return self.begin(seed, torch.arange(self.num_envs) if env_ids is None else env_ids)


class AllAtOnce(Batch):
    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.begin(seed, torch.arange(self.num_envs))


FORMS = [(ByIndex, BY_INDEX), (ByIds, BY_IDS)]


@pytest.mark.parametrize(("kind", "form"), FORMS, ids=["maniskill", "isaaclab"])
def test_a_batch_of_tensors_is_rows_and_a_seed_decides_one_start_alone(kind, form):
    vector = Batched(kind(4), 4, form, "a batch")
    assert [space.name for space in vector.observation_spaces] == ["sensor_data.base.rgb", "state"]
    begun = vector.reset({place: Start(seed) for place, seed in enumerate((5, 6, 5, 6))})
    states = [begun[place][0]["state"] for place in range(4)]
    assert np.array_equal(states[0], states[2]) and np.array_equal(states[1], states[3])
    assert not np.array_equal(states[0], states[1])
    made = vector.step({1: np.array([1, 0.5], np.float32), 3: np.array([1, 1], np.float32)})
    assert set(made) == {1, 3}
    np.testing.assert_allclose(made[1].observation["state"], states[1] + [1, 0.5])
    assert made[1].observation["sensor_data.base.rgb"].min() == 1, "the row is the environment's own"
    assert (made[3].reward, made[3].success, made[3].info["elapsed_steps"]) == (2.0, False, 1.0)
    made = vector.step({1: np.ones(2, np.float32), 3: np.ones(2, np.float32)})
    assert (made[1].terminated, made[1].success) == (True, True)
    again = vector.reset({1: Start(5)})[1][0]["state"]
    np.testing.assert_array_equal(again, states[0])
    frame = vector.render(2)
    assert frame.shape == (4, 4, 3) and frame.max() == 2


@pytest.mark.parametrize(("told", "bound"), [("0.2", [0.2]), (None, [])])
def test_torch_of_a_simulator_takes_its_part_of_a_joint_lease_and_no_more(monkeypatch, told, bound):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    monkeypatch.delenv(MEMORY_PART, raising=False)
    if told is not None:
        monkeypatch.setenv(MEMORY_PART, told)
    bound_memory()
    assert taken == bound


def test_a_simulator_on_a_gpu_is_refused_without_one_and_a_task_that_begins_all_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError) as refused:
        require_gpu("options_json.sim_backend", "gpu")
    assert "placement.simulator" in refused.value.message and "physx_cpu" in refused.value.message
    with pytest.raises(BackendError, match="all of its environments at once"):
        isaac(AllAtOnce(2), 2, "Isaac-Ant-Direct-v0")
    assert isaac(ByIds(2), 2, "Isaac-Lift-v0").action_space.shape == (2,)
    assert "isaaclab" in backends.BACKENDS.names()
