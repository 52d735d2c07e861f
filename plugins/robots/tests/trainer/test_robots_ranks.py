"""A small policy on several ranks, which may change between steps, is the policy on one; what does not fit there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from headrace_robots.policies.directory import policy_config
from headrace_robots.trainer.backend.whole import WholeRobot
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.client import dial
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import Room, Rooms, check_rooms
from rank_processes import RankProcess, end
from two_ranks_parts import address_of, form, regroup

pytestmark = pytest.mark.timeout(600)
ROOMY = Rooms(Room("host memory", 2**50, 2**50), None)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A second trainer process; the leader is the test's own."""
    directory = tmp_path_factory.mktemp("ranks")
    port_file = directory / "address"
    child = RankProcess("two_ranks.py", str(port_file), str(directory / "shm"))
    yield port_file
    end([child])


@pytest.fixture
async def other(process, tmp_path, make_config, trainer_client):
    """A client of the second trainer, in no trainer group."""
    async with dial(await address_of(process), token=None) as channel:
        found = trainer_client(channel, tmp_path / "run", make_config)
        yield found
        await found.close_run()


@pytest.fixture
def played(robots):
    """Episodes of a run's own policy."""

    def play(config):
        policy = policy_config(config["model"]["policy"]).build(config["seed"])
        return robots.play(policy, [robots.Reach() for _ in range(6)], range(6), 0)

    return play


async def test_a_robot_policy_learns_on_one_rank_then_two_then_one_as_on_one(
    client, other, robot_config, robots, played, fetched_weights, settled_digest
):
    config = robot_config(options={"epochs": 2, "minibatch_size": 40}, optimizer={"lr": 1e-4})
    episodes = played(config)

    async def run(changes) -> dict[str, torch.Tensor]:
        version, generation = (await client.open(config)).version, 1
        for index in range(3):
            if (members := changes.get(index)) is not None:
                generation += 1
                for each in members:
                    await each.open_run(config)
                assert (await regroup(client, members, generation, version.number)) == version
            groups = [robots.settled(6 * index + p, [each], version) for p, each in enumerate(episodes)]
            number = version.number + 1
            await client.begin(index, 1, version.number, number)
            await client.learn(index, 1, groups)
            reply = await client.commit(index, 1, version.number, number, settled_digest(groups))
            await client.record(index, 1, number)
            version = reply.version
        last = await fetched_weights(client, version.number)
        await client.close_run()
        return last

    expected = await run({})
    found = await run({1: [other], 2: []})
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


async def test_two_ranks_learn_from_episodes_as_one_does(
    client, other, robot_config, robots, played, fetched_weights, settled_digest
):
    options = {"epochs": 2, "minibatch_size": 40, "reward_scale": 0.1}
    config = robot_config(options=options, trainer={"ranks": 2}, optimizer={"lr": 1e-4})
    episodes, replies, weights = played(config), [], []
    for together in (False, True):
        if together:
            await form(client, other, config)
            restored, _ = await asyncio.gather(client.restore("", 1), other.restore("", 1))
            version = restored.version
        else:
            version = (await client.open(config)).version
        groups = [robots.settled(prompt, [each], version) for prompt, each in enumerate(episodes)]
        await client.begin(0, 1, version.number, 2)
        await client.learn(0, 1, groups)
        replies.append(await client.commit(0, 1, version.number, 2, settled_digest(groups)))
        await client.record(0, 1, 2)
        weights.append(await fetched_weights(client, 2))
        await client.close_run()
    one, two = (dict(reply.figures) for reply in replies)
    assert two.keys() == one.keys() and two["optimizer_steps"] == 8
    for name in ("loss", "grad_norm", "entropy", "approx_kl", "value_loss", "explained_variance"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_robot_policy_that_does_not_fit_is_told_that_more_ranks_do_not_help(kind, robot_config):
    config = TrainerConfig.model_validate(robot_config())
    group = SimpleNamespace(device=torch.device(kind), rank=0, world_size=2)
    plan = WholeRobot(config, build_algorithm(config.algorithm), group).memory_plan(ROOMY)
    room = Room("host memory" if kind == "cpu" else "GPU memory", 1, 1)
    rooms = Rooms(room, None) if kind == "cpu" else Rooms(ROOMY.host, room)
    with pytest.raises(Refusal, match=f"give more {room.name}: more ranks alone do not help"):
        check_rooms(plan, rooms)
