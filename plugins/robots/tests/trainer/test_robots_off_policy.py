"""A trainer learns off policy, over gRPC: updates, the replay store, checkpoints, and what it refuses."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing

import grpc
import numpy as np
import pytest
import torch
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.weights import load_weights
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.trainer.replay.records import read_uses

SMALL = {"batch_size": 16, "critic_hidden": [16], "learning_starts": 24, "updates_per_action": 0.25}
HEADS = {
    "sac": {"head": "squashed"},
    "crossq": {"head": "squashed"},
    "td3_bc": {"head": "deterministic"},
    "iql": {},
    "recap": {"conditioned": True},
}


@pytest.fixture
def off_policy(robot_config):
    """The JSON of OpenRun for an algorithm that learns off policy."""

    def make(name="sac", options=(), policy=(), **more):
        own = {"hidden": [16], "activation": "relu", **HEADS.get(name, {}), **dict(policy)}
        optimizer = {"lr": 1e-3, "beta2": 0.999, "grad_clip": 10.0}
        return robot_config(name, options={**SMALL, **dict(options)}, policy=own, optimizer=optimizer, **more)

    return make


@pytest.fixture
def played(robots):
    """Groups of four start states, drawn by the policy that a version is."""

    def run(policy, version, step):
        worlds = [robots.Reach(horizon=12) for _ in range(4)]
        episodes = robots.play(policy, worlds, range(4 * step, 4 * step + 4), step)
        return [robots.settled(4 * step + place, [each], version) for place, each in enumerate(episodes)]

    return run


def new_policy(config):
    return policy_config(config["model"]["policy"]).build(config["seed"])


async def step(client, groups, version, digest_of, number=None):
    number = number or version.number + 1
    await client.begin(version.ordinal, 1, version.number, number)
    await client.learn(version.ordinal, 1, groups)
    reply = await client.commit(version.ordinal, 1, version.number, number, digest_of(groups))
    await client.record(version.ordinal, 1, number)
    return reply


@pytest.mark.parametrize("name", ["sac", "crossq", "td3_bc", "iql", "recap"])
async def test_a_step_makes_the_updates_that_are_due_and_publishes_the_policy_alone(
    name, client, off_policy, played, fetched_weights, settled_digest
):
    config = off_policy(name)
    version = (await client.open(config)).version
    policy = new_policy(config)
    first = await fetched_weights(client, version.number)
    made = []
    for number in range(3):
        reply = await step(client, played(policy, version, number), version, settled_digest)
        version = reply.version
        weights = await fetched_weights(client, version.number)
        load_weights(policy, weights)
        made.append(reply.figures.get("replay_updates"))
    # 48 chunks a step, 24 of the run without an update, then one for every fourth.
    assert made == [6.0, 18.0, 30.0]
    assert reply.figures["updates_per_action"] == pytest.approx(0.25)
    assert (reply.figures["replay_chunks"], reply.figures["replay_episodes"]) == (144, 12)
    assert 0 < reply.figures["replay_age_mean"] < 3
    assert np.isfinite(reply.figures["loss"])
    assert not any(key.startswith(("value", "critics")) or "target" in key for key in weights)
    assert not torch.equal(first["actor.0.weight"], weights["actor.0.weight"])


@pytest.mark.parametrize(
    "options", [{"draws": "prioritised", "n_step": 3}, {"critics": 3, "draws": "recent"}]
)
async def test_a_restored_run_goes_on_to_the_bit_and_forgets_what_came_after(
    options, client, off_policy, played, fetched_weights, settled_digest
):
    config = off_policy(options=options)
    version = (await client.open(config)).version
    policy = new_policy(config)
    for number in range(2):
        version = (await step(client, played(policy, version, number), version, settled_digest)).version
        load_weights(policy, await fetched_weights(client, version.number))
    saved = (await client.save(version.number)).checkpoint
    groups = played(policy, version, 2)
    reply = await step(client, groups, version, settled_digest)
    expected = await fetched_weights(client, reply.version.number)
    # Another step behind it, whose episodes the store has to forget.
    await step(client, played(policy, reply.version, 3), reply.version, settled_digest)
    again = (await client.restore(saved.name, reply.version.number + 2)).version
    assert again.ordinal == version.ordinal
    groups = played(policy, again, 2)
    repeated = await step(client, groups, again, settled_digest)
    found = await fetched_weights(client, repeated.version.number)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    same = {name: value for name, value in reply.figures.items() if "seconds" not in name}
    assert {name: repeated.figures[name] for name in same} == same
    assert repeated.figures["replay_episodes"] == 12


SCORED = [
    ("sac", "none", [0.5, 1.0]),
    ("sac", "add", [0.5, 3.5]),
    ("sac", "replace", [0.0, 2.5]),
    ("recap", "replace", [0.0, 2.5]),
    ("success_cloning", "add", [0.5, 3.5]),
]
"""What is stored of two actions that earned 1 and 2, of an episode that is worth 5 to the scorers, by half."""


@pytest.mark.parametrize(("name", "score", "earned"), SCORED)
async def test_the_last_chunk_of_a_stored_episode_earns_its_score(
    name, score, earned, client, off_policy, robots, settled_digest
):
    options = {"score": score, "reward_scale": 0.5, "updates_per_action": 0}
    config = off_policy(name, options | ({"weigh": "return"} if name == "success_cloning" else {}))
    if name == "success_cloning":
        config["algorithm"]["options"].pop("critic_hidden")
    version = (await client.open(config)).version
    (played,) = robots.play(new_policy(config), [robots.Reach(horizon=2)], [0], 0)
    played = dataclasses.replace(played, rewards_TC=np.array([[1.0], [2.0]], np.float32))
    groups = [robots.settled(place, [played], version, reward=lambda episode: 5.0) for place in range(4)]
    await step(client, groups, version, settled_digest)
    (path,) = (client.directory / "replay").glob("*.sqlite")
    with closing(sqlite3.connect(path)) as file:
        totals = file.execute("SELECT chunks, total, body FROM episodes").fetchall()
    assert [(chunks, total) for chunks, total, _ in totals] == [(2, sum(earned))] * 4
    assert np.frombuffer(totals[0][2], np.float32)[-2:].tolist() == earned, "rewards are the last of a body"


async def test_an_attempt_that_is_aborted_leaves_the_store_as_it_was(
    client, off_policy, played, settled_digest
):
    config = off_policy()
    version = (await client.open(config)).version
    policy = new_policy(config)
    await client.begin(0, 1, version.number, version.number + 1)
    await client.learn(0, 1, played(policy, version, 7))
    await client.abort(0, 1)
    groups = played(policy, version, 0)
    await client.begin(0, 2, version.number, version.number + 2)
    await client.learn(0, 2, groups)
    await client.commit(0, 2, version.number, version.number + 2, settled_digest(groups))
    uses = [use for path in (client.directory / "replay").glob("*.sqlite") for use in read_uses(path)]
    assert [use.slot for use in uses] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert sum(use.uses for use in uses) == 6 * SMALL["batch_size"]


@pytest.mark.parametrize(
    ("name", "change", "key", "said"),
    [
        ("sac", {"policy": {"head": "gaussian"}}, "model.policy.head", "set model.policy.head: squashed"),
        (
            "td3_bc",
            {"policy": {"head": "squashed"}},
            "model.policy.head",
            "set model.policy.head: deterministic",
        ),
        ("sac", {"options": {"capacity": 1}}, "algorithm.options.capacity", "greater than or equal to 2"),
        ("sac", {"options": {"least_of": 3}}, "algorithm.options", "least_of: 3 of 2 critics"),
        ("sac", {"options": {"epochs": 2}}, "algorithm.options.epochs", "epochs"),
        ("rlpd", {"policy": {"head": "squashed"}}, "trainer.warmup.demonstrations", "half|0.5 of each batch"),
        ("dagger", {"options": {"expert": "/nowhere"}}, "algorithm.options.expert", "/nowhere"),
        ("dagger", {}, "algorithm.options.expert", "name a policy's directory"),
        ("dagger", {"options": {"score": "add"}}, "algorithm.options.score", "score"),
        (
            "success_cloning",
            {"options": {"score": "replace"}},
            "algorithm.options",
            "weigh: success reads none; set weigh: return",
        ),
        ("recap", {"policy": {"conditioned": False}}, "model.policy.conditioned", "conditioned: true"),
        (
            "crossq",
            {
                "policy": {
                    "head": "gaussian",
                    "categories": [3, 0],
                    "bounds": {"low": [0, -1], "high": [2, 1]},
                }
            },
            "algorithm.name",
            "categories are .3, 0.",
        ),
    ],
)
async def test_what_does_not_go_together_is_refused_by_key(name, change, key, said, client, off_policy):
    with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
        config = off_policy(name, **change)
        if name in ("dagger", "success_cloning"):  # which have no critics
            config["algorithm"]["options"].pop("critic_hidden")
        await client.open(config)
    assert key in caught.value.details()


async def test_a_checkpoint_of_other_critics_is_refused_and_names_them(
    client, off_policy, played, fetched_weights, settled_digest
):
    config = off_policy()
    version = (await client.open(config)).version
    version = (await step(client, played(new_policy(config), version, 0), version, settled_digest)).version
    saved = (await client.save(version.number)).checkpoint
    await client.close_run()
    with pytest.raises(grpc.aio.AioRpcError, match=r"critics.*give algorithm.name, its critics"):
        await client.open(off_policy(options={"critics": 4}), saved.name, number=20)


@pytest.fixture
def shown(tmp_path, robots):
    """Writes demonstrations of Reach: episodes of a script, with rewards unless it is told otherwise."""

    def write(name="shown", *, rewarded=True, size=6, broken=False):
        found = []
        for number in range(6):
            world, episode = robots.Reach(horizon=12), EpisodeData("reach")
            state = world.reset(10**6 + number)
            for place in range(world.horizon):
                action = np.clip(4 * (state[4:] - state[:2]), -1, 1)
                episode.states.append(np.resize(np.asarray(state, np.float32), size))
                episode.actions.append(action.astype(np.float32))
                state, reward, success, _ = world.step(action)
                if rewarded:
                    episode.rewards.append(np.nan if broken and place == 3 else reward)
                    episode.successes.append(success)
                    episode.ends.append(place == 11 and success)
            found.append(episode)
        write_data_set(tmp_path / name, found, {})
        return str(tmp_path / name)

    return write


RLPD = {"critics": 3, "actor_every": 2, "updates_per_action": 0.5}


async def test_half_of_each_batch_is_of_demonstrations(client, off_policy, played, shown, settled_digest):
    trainer = {"warmup": {"demonstrations": shown()}}
    config = off_policy("rlpd", {**RLPD, "batch_size": 20}, {"head": "squashed"}, trainer=trainer)
    version = (await client.open(config)).version
    policy = new_policy(config)
    reply = await step(client, played(policy, version, 0), version, settled_digest)
    uses = [use for path in (client.directory / "replay").glob("*.sqlite") for use in read_uses(path)]
    assert reply.figures["replay_updates"] == 12
    assert sum(use.uses for use in uses) == 12 * 10, "the other half was drawn from the demonstrations"


WARMED = {"iql": "warmup_critic_loss", "td3_bc": "warmup_critic_loss", "recap": "warmup_value_loss"}


@pytest.mark.parametrize("name", ["iql", "td3_bc", "sac", "recap"])
async def test_a_run_may_begin_with_demonstrations(name, client, off_policy, shown, fetched_weights):
    warmup = {"demonstrations": shown(), "steps": 20, "lr": 1e-3, "batch": 32}
    config = off_policy(name, trainer={"warmup": warmup})
    reply = await client.open(config)
    assert reply.warmup_steps == 20
    assert WARMED.get(name, "warmup_last_loss") in reply.figures and all(
        np.isfinite(value) for value in reply.figures.values()
    )
    weights = await fetched_weights(client, reply.version.number)
    assert not torch.equal(weights["actor.0.weight"], new_policy(config).state_dict()["actor.0.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewarded": False}, "states no reward of each step.*--noise 0"),
        ({"size": 5}, "has 5 numbers of a state, and the policy 6"),
        ({"broken": True}, "frame 3: number 0 of next.reward is nan"),
    ],
)
async def test_demonstrations_that_do_not_fit_are_refused_and_named(change, said, client, off_policy, shown):
    trainer = {"warmup": {"demonstrations": shown(**change)}}
    config = off_policy("rlpd", RLPD, {"head": "squashed"}, trainer=trainer)
    with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
        await client.open(config)
    assert "trainer.warmup.demonstrations" in caught.value.details()


async def test_a_gradient_that_is_not_finite_moves_nothing(
    client, off_policy, played, fetched_weights, settled_digest
):
    config = off_policy(options={"reward_scale": 1e38})
    version = (await client.open(config)).version
    before = await fetched_weights(client, version.number)
    policy = new_policy(config)
    groups = played(policy, version, 0)
    await client.begin(0, 1, version.number, version.number + 1)
    await client.learn(0, 1, groups)
    reply = await client.commit(0, 1, version.number, version.number + 1, settled_digest(groups))
    assert trainer_pb2.CommitResult.Name(reply.result).endswith("NONFINITE")
    uses = [use for path in (client.directory / "replay").glob("*.sqlite") for use in read_uses(path)]
    assert not uses, "nothing is stored"
    exported = load_policy((await client.export("now")).path)
    assert all(torch.equal(value, before[name]) for name, value in exported.state_dict().items())
