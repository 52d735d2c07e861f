"""RunEpisodes over real gRPC, with a real simulator and its children."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
import torch
from episode_rig import PENDULUM, episode_of, new_policy, open_robot, run_episodes, starts
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_robots.policies.policy import Observation
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.episodes import ACTIONS, STATE
from rollout_calls import HEADER, refused
from simulator_rig import open_pool


@pytest.fixture
async def robot(new_rollout, publish):
    """An instance with an open robot run and version 1 of its policy."""
    rollout = await new_rollout()
    await open_robot(rollout)
    await rollout.install(publish(new_policy(), 1))
    return rollout


def equal(found, expected) -> None:
    """The same episodes, to the rounding of passes over other numbers of rows."""
    assert found.keys() == expected.keys()
    for key, trajectory in found.items():
        one, other = episode_of(trajectory), episode_of(expected[key])
        assert trajectory.finish_reason == expected[key].finish_reason
        np.testing.assert_array_equal(one.valid_TC, other.valid_TC)
        np.testing.assert_allclose(one.executed_TCA, other.executed_TCA, atol=1e-4)
        np.testing.assert_allclose(one.observation[STATE], other.observation[STATE], atol=1e-4)


async def test_an_episode_is_what_gymnasium_does_with_the_same_actions(robot, simulator_address):
    pool = await open_pool(simulator_address)
    trajectories = await (await run_episodes(robot, [pool], starts(range(6), 2))).read_all()
    assert len(trajectories) == 12
    environment = gymnasium.make("Pendulum-v1", max_episode_steps=12)
    for (ordinal, index), trajectory in trajectories.items():
        episode = episode_of(trajectory)
        observation, _ = environment.reset(seed=ordinal)
        rewards = []
        for place in range(12):
            np.testing.assert_array_equal(episode.observation[STATE][place], observation)
            observation, reward, *_ = environment.step(episode.executed_TCA[place, 0])
            rewards.append(reward)
        np.testing.assert_array_equal(episode.final_observation[STATE], observation)
        np.testing.assert_allclose(episode.rewards_TC[:, 0], rewards, rtol=1e-6)
        assert episode.truncated and not episode.terminated and episode.valid_TC.all()
        assert trajectory.finish_reason == common_pb2.FINISH_REASON_TRUNCATED
        said = json.loads(trajectory.completion_text)
        assert said == {"return": pytest.approx(sum(rewards), rel=1e-5), "success": None, "steps": 12}
        assert trajectory.body_digest == trajectory_digest(trajectory)
        assert trajectory.producer == robot.instance.config.incarnation
        assert (trajectory.sample.prompt_ordinal, trajectory.sample.sample_index) == (ordinal, index)


async def test_log_probs_and_values_are_the_policys_own(robot, simulator_address):
    pool = await open_pool(simulator_address, count=2)
    trajectories = await (await run_episodes(robot, [pool], starts(range(2)))).read_all()
    policy = new_policy()
    for trajectory in trajectories.values():
        episode = episode_of(trajectory)
        drawn = torch.from_numpy(episode.sampled[ACTIONS])
        with torch.no_grad():
            found = policy.evaluate(
                Observation(torch.from_numpy(episode.observation[STATE])), {ACTIONS: drawn}
            )
        np.testing.assert_allclose(episode.log_probs_TCA, found.log_probs_BCA.numpy(), atol=1e-5)
        np.testing.assert_allclose(episode.values_T, found.values_B.numpy(), atol=1e-5)
        np.testing.assert_array_equal(episode.executed_TCA, policy.head.scaling(drawn).numpy())


async def test_an_episode_depends_on_its_place_alone(robot, simulator_address):
    pool = await open_pool(simulator_address)
    all_of_them = await (await run_episodes(robot, [pool], starts(range(6), 2))).read_all()
    alone = await (await run_episodes(robot, [pool], starts([4], 2, attempt=3))).read_all()
    equal(alone, {key: all_of_them[key] for key in alone})
    assert not np.array_equal(episode_of(alone[4, 0]).executed_TCA, episode_of(alone[4, 1]).executed_TCA), (
        "samples of one start state draw other noise"
    )
    other = await (await run_episodes(robot, [pool], starts([4]), seed=8)).read_all()
    assert not np.array_equal(episode_of(other[4, 0]).executed_TCA, episode_of(alone[4, 0]).executed_TCA)


@pytest.mark.parametrize("alternating", [1, 3])
async def test_parts_change_no_episode(robot, new_rollout, simulator_address, alternating):
    pool = await open_pool(simulator_address)
    expected = await (await run_episodes(robot, [pool], starts(range(4), 2))).read_all()
    other = await new_rollout("rollout-1")
    await open_robot(other, alternating=alternating)
    await other.install(robot.last)
    second = await open_pool(simulator_address, count=5)
    equal(await (await run_episodes(other, [second], starts(range(4), 2))).read_all(), expected)


async def test_greedy_takes_the_mean(robot, simulator_address):
    pool = await open_pool(simulator_address, count=1)
    (stream,) = (await (await run_episodes(robot, [pool], starts([1]), greedy=True)).read_all()).values()
    (sample,) = (await (await run_episodes(robot, [pool], starts([1], greedy=True))).read_all()).values()
    policy = new_policy()
    for trajectory in (stream, sample):
        episode = episode_of(trajectory)
        observation = Observation(torch.from_numpy(episode.observation[STATE]))
        mean = policy.act(observation, [0] * 12, deterministic=True).executed_BCA
        np.testing.assert_allclose(episode.executed_TCA, mean.numpy(), atol=1e-5)


async def test_bodies_are_kept_unless_it_is_an_evaluation(robot, simulator_address):
    pool = await open_pool(simulator_address)
    trajectories = await (await run_episodes(robot, [pool], starts(range(2)))).read_all()
    await (await run_episodes(robot, [pool], starts(range(5, 8)), evaluation=True)).read_all()
    inventory = await robot.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=HEADER))
    kept = [(item.sample.prompt_ordinal, item.body_digest) for item in inventory.items]
    assert kept == [(ordinal, trajectories[ordinal, 0].body_digest) for ordinal in range(2)]
    keys = [item.sample for item in inventory.items]
    fetch = robot.stub.FetchTrajectories(rollout_pb2.FetchTrajectoriesRequest(header=HEADER, samples=keys))
    fetched = [each async for response in fetch for each in response.trajectories]
    assert fetched == [trajectories[ordinal, 0] for ordinal in range(2)]


async def test_what_is_of_the_other_kind_is_refused(robot, rollout_of_text, simulator_address):
    pool = await open_pool(simulator_address, count=1)
    text = rollout_pb2.GroupAssignment(
        prompt=rollout_pb2.Prompt(text="7"), samples=[rollout_pb2.SampleAssignment(attempt=1)]
    )
    await refused((await robot.generate([text]).start()).read_all(), "WRONG_POLICY", "RunEpisodes")
    await refused(robot.stub.Score(rollout_pb2.ScoreRequest(header=HEADER)), "WRONG_POLICY", "no text")

    async def run(rollout, pools, groups, **opening):
        """The refusal may meet the write of the groups, or the read behind it."""
        await (await run_episodes(rollout, pools, groups, **opening)).read_all()

    await refused(
        run(rollout_of_text, [pool], starts([1]), policy_number=2), "WRONG_POLICY", "Generate", "model.policy"
    )
    await refused(run(robot, [pool], [text]), "INVALID", "prompt", "episode")
    await refused(
        run(robot, [pool], starts([1], task="Pendulum-v9")), "INVALID", "Pendulum-v9", "Pendulum-v1"
    )
    await refused(run(robot, [], starts([1])), "INVALID", "pools")
    await refused(run(robot, [pool], starts([1]), policy_number=2), "POLICY_MISMATCH", "version 2")


@pytest.mark.parametrize(
    ("policy", "environment", "words"),
    [
        ({"state_size": 4}, {}, ["state", "(1, 3)", "4"]),
        ({}, {"state": ["velocity"]}, ["environment.state", "velocity"]),
        ({"bounds": {"low": [-1.0] * 2, "high": [1.0] * 2}}, {}, ["refuses", "bounds"]),
        ({"bounds": {"low": [-9.0], "high": [9.0]}, "log_std": 2}, {}, ["refuses", "bounds"]),
    ],
    ids=["state size", "state name", "action size", "action bounds"],
)
async def test_a_policy_that_does_not_fit_the_environment_is_said_at_once(
    new_rollout, publish, simulator_address, policy, environment, words
):
    rollout = await new_rollout()
    fields = {**PENDULUM, **policy}
    await open_robot(rollout, fields, **environment)
    await rollout.install(publish(new_policy(fields), 1))
    pool = await open_pool(simulator_address, count=1)
    call = await run_episodes(rollout, [pool], starts(range(3)))
    reason = "REFUSED_BY_SIMULATOR" if "refuses" in words else "INVALID"
    await refused(call.read_all(), reason, *words)
