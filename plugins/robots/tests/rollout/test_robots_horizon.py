"""Samples of a fixed horizon: an environment goes on with its episode in the next one that it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from episode_rig import PENDULUM, WALKER, episode_of, new_policy, open_robot, run_episodes, starts
from headrace_servicekit.rpc.episodes import STATE
from simulator_rig import SimulatorProcess, open_pool


@pytest.fixture(scope="module")
def simulator_address(tmp_path_factory) -> Iterator[str]:
    process = SimulatorProcess(tmp_path_factory.mktemp("simulator"))
    yield process.address
    process.kill()


async def samples(rollout, pools, ordinals, **fields):
    """What one stream after another makes of these start states: episodes and what is said of them, by ordinal."""
    call = await run_episodes(rollout, pools, starts(ordinals, task=pools[0].task), **fields)
    found = await call.read_all()
    assert not call.partials and not call.lost
    return {
        ordinal: (episode_of(each), json.loads(each.completion_text)) for (ordinal, _), each in found.items()
    }


async def test_an_environment_goes_on_where_the_sample_before_was_cut_also_in_the_next_stream(
    new_rollout, publish, simulator_address
):
    rollout = await new_rollout()
    await open_robot(rollout, PENDULUM, horizon=5)
    await rollout.install(publish(new_policy(), 1))
    pool = await open_pool(simulator_address, count=1, max_episode_steps=12)
    first = await samples(rollout, [pool], range(2))
    second = await samples(rollout, [pool], range(2, 5))
    parts = [*(first[i] for i in range(2)), *(second[i] for i in range(2, 5))]
    assert [each.steps for each, _ in parts] == [5, 5, 2, 5, 5]
    for (one, _), (other, _) in pairwise(parts[:3]):
        assert one.truncated and not one.terminated
        np.testing.assert_array_equal(one.final_observation[STATE], other.observation[STATE][0])
    assert not np.array_equal(parts[2][0].final_observation[STATE], parts[3][0].observation[STATE][0])
    returns = [said["return"] for _, said in parts]
    assert returns[2] == pytest.approx(sum(each.total_reward for each, _ in parts[:3]))
    assert returns[3] == pytest.approx(parts[3][0].total_reward), "it is another episode"
    whole = (await samples(rollout, [pool], [9], evaluation=True))[9][0]
    assert whole.steps == 12, "an evaluation has whole episodes"
    after = (await samples(rollout, [pool], [3]))[3][0]
    np.testing.assert_array_equal(after.observation[STATE][0], parts[3][0].observation[STATE][0])


async def test_an_environment_that_is_lost_between_two_samples_begins_with_the_next_ones_start_state(
    new_rollout, publish, simulator_address
):
    rollout = await new_rollout()
    await open_robot(rollout, WALKER, backend="gymnasium", horizon=2)
    await rollout.install(publish(new_policy(WALKER), 1))
    pool = await open_pool(simulator_address, "robots.py:make_env", count=1)
    cut = (await samples(rollout, [pool], [666]))[666][0]
    lost = (await samples(rollout, [pool], [5]))[5][0]
    own = (await samples(rollout, [await open_pool(simulator_address, "robots.py:make_env", count=1)], [5]))[
        5
    ][0]
    assert (cut.steps, lost.steps) == (2, 2)
    np.testing.assert_array_equal(lost.observation[STATE], own.observation[STATE])
