"""Episodes of environments that one call steps, which end at different times: none is lost, and none waits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from episode_rig import episode_of, new_policy, open_robot, run_episodes, starts
from headrace_servicekit.rpc.episodes import STATE
from simulator_rig import SimulatorProcess, open_pool

TASK, PLAN = "CartPole-v1", "planned.py:make"
POLE = {
    "kind": "mlp",
    "bounds": {"low": [0.0], "high": [1.0]},
    "categories": [2],
    "state_size": 4,
    "hidden": [8],
}
TOGETHER = {"name": TASK, "vectorized": True, "processes": 1, "max_episode_steps": 60, "without_info": True}
# Each episode ends when its seed says so, or has success then; one that begins with 13 begins nowhere.
PLANNED = """
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

MODES = {"next": AutoresetMode.NEXT_STEP, "same": AutoresetMode.SAME_STEP, "off": AutoresetMode.DISABLED}


class Planned(gymnasium.Env):
    observation_space = spaces.Box(-100, 1000, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ends=True):
        self.ends, self.last, self.steps, self.nan = ends, 3, 0, False

    def observe(self):
        return np.array([np.nan if self.nan and self.steps >= self.last else self.last, self.steps, 0, 0], np.float32)

    def reset(self, *, seed=None, options=None):
        if seed == 13:
            raise RuntimeError("there is no floor to begin on")
        self.last, self.steps, self.nan = 3 if seed is None else 1 + seed % 7, 0, seed == 19
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps >= self.last
        return self.observe(), float(self.steps), over and self.ends, False, {"success": over}


def make(num_envs, mode="next", kind="sync", ends=True):
    vector = AsyncVectorEnv if kind == "async" else SyncVectorEnv
    return vector([lambda: Planned(ends)] * num_envs, autoreset_mode=MODES[mode])
"""


@pytest.fixture(scope="module")
def simulator_address(tmp_path_factory) -> Iterator[str]:
    """A simulator that waits for an action that does not come for longer than a test may take."""
    directory = tmp_path_factory.mktemp("simulator")
    (directory / "planned.py").write_text(PLANNED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_SIMULATOR_GATHER_S", "3600")
        process = SimulatorProcess(directory)
    yield process.address
    process.kill()


@pytest.fixture
async def pole(new_rollout, publish):
    """Makes an instance with a policy of two categories, whose environments are stepped together."""

    async def make(**environment):
        rollout = await new_rollout()
        await open_robot(rollout, POLE, vectorized=True, **{"alternating": 1, **environment})
        await rollout.install(publish(new_policy(POLE), 1))
        return rollout

    return make


async def played(rollout, pools, seeds, **options):
    """What the episodes of these seeds came to, by seed. The stream would end too late if it waited for an action."""
    task = pools[0].task
    call = await run_episodes(rollout, pools, starts(seeds, task=task), **options)
    found = {ordinal: each for (ordinal, _), each in (await call.read_all()).items()}
    assert sorted(found) == sorted(seeds) and not call.partials
    return found


def said(trajectory):
    return json.loads(trajectory.completion_text)


@pytest.mark.parametrize(
    ("alternating", "processes", "count"), [(1, 1, 8), (2, 2, 8), (2, 1, 8), (3, 1, 5), (1, 1, 1), (1, 3, 4)]
)
async def test_poles_that_fall_at_different_times_are_what_gymnasium_does(
    pole, simulator_address, alternating, processes, count
):
    rollout = await pole(alternating=alternating)
    options = {"vectorization_mode": "sync"}
    pool = await open_pool(
        simulator_address, **{**TOGETHER, "processes": processes}, options=options, count=count
    )
    found = await played(rollout, [pool], range(24))
    environment = gymnasium.make(TASK, max_episode_steps=60)
    for seed, trajectory in found.items():
        assert "error" not in said(trajectory), said(trajectory)
        episode = episode_of(trajectory)
        observation, _ = environment.reset(seed=seed)
        for place in range(episode.steps):
            np.testing.assert_array_equal(episode.observation[STATE][place], observation)
            observation, _, terminated, _, _ = environment.step(int(episode.executed_TCA[place, 0, 0]))
        assert terminated == episode.terminated
    assert len({said(each)["steps"] for each in found.values()}) > 3, "they end at different times"


@pytest.mark.parametrize("mode", ["next", "same", "off"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_the_vector_does_at_an_end(pole, simulator_address, mode, kind):
    rollout = await pole()
    pool = await open_pool(
        simulator_address,
        PLAN,
        count=4,
        processes=1,
        vectorized=True,
        without_info=kind == "sync",  # the answers are then rows of a batch
        options={"mode": mode, "kind": kind},
    )
    found = await played(rollout, [pool], range(13))
    assert {seed: said(each)["steps"] for seed, each in found.items()} == {
        seed: 1 + seed % 7 for seed in range(13)
    }
    (broken,) = (await played(rollout, [pool], [13])).values()
    assert "no floor to begin on" in said(broken)["error"]
    # All in the same step, fewer than places, and one alone.
    for seeds in (range(20, 41, 7), [7, 14], [6]):
        assert {said(each)["steps"] for each in (await played(rollout, [pool], seeds)).values()} == {
            1 + seeds[0] % 7
        }


@pytest.mark.parametrize("said_by", ["stop_on_success", "until_success"])
async def test_an_episode_that_ends_with_its_success_is_waited_for_by_no_other(
    pole, simulator_address, said_by
):
    of_run, of_stream = ({said_by: True}, {}) if said_by == "stop_on_success" else ({}, {said_by: True})
    rollout = await pole(**of_run)
    pool = await open_pool(
        simulator_address,
        PLAN,
        count=4,
        processes=1,
        vectorized=True,
        without_info=said_by == "until_success",
        options={"ends": False},
    )
    found = await played(rollout, [pool], range(10), **of_stream)
    for seed, trajectory in found.items():
        assert (said(trajectory)["steps"], said(trajectory)["success"]) == (1 + seed % 7, True)
        assert episode_of(trajectory).terminated


async def test_a_row_that_is_no_number_costs_its_own_episode_and_greedy_ones_are_drawn_beside_others(
    pole, simulator_address
):
    rollout = await pole()
    pool = await open_pool(simulator_address, PLAN, count=4, processes=1, vectorized=True, without_info=True)
    call = await run_episodes(rollout, [pool], starts([18, 19], task=PLAN), half_close=False)
    await call.assign(starts([20, 27], task=PLAN, greedy=True))
    await call.call.done_writing()
    found = {ordinal: each for (ordinal, _), each in (await call.read_all()).items()}
    assert "holds nan at element 0" in said(found[19])["error"]
    assert {seed: said(found[seed])["steps"] for seed in (18, 20, 27)} == {18: 5, 20: 7, 27: 7}
    drawn, alone = episode_of(found[18]), await played(rollout, [pool], [18])
    np.testing.assert_array_equal(drawn.executed_TCA, episode_of(alone[18]).executed_TCA)
    greedy = episode_of(found[20])
    alone = await played(rollout, [pool], [20], greedy=True)
    np.testing.assert_array_equal(greedy.executed_TCA, episode_of(alone[20]).executed_TCA)
