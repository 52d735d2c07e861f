"""What a person did in place of the policy: kept with the author, imitated, and no part of a policy's own ratio."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from headrace_modelkit.weights import load_weights
from headrace_robots.policies.directory import policy_config
from headrace_robots.policies.policy import Observation
from headrace_robots.trainer.learner import _kept, plan_credit
from headrace_robots.trainer.replay.records import Sampling, Spaces, Stored
from headrace_robots.trainer.replay.store import ReplayStore
from headrace_servicekit.rpc.episodes import decode_episode, encode_episode
from headrace_servicekit.rpc.errors import ServiceError
from headrace_trainer.learning.samples import EpisodeMember, EpisodeScores, Packed

DONE = np.array([0.8, -0.6])
OPTIONS = {"batch_size": 64, "learning_starts": 0, "updates_per_action": 2.0, "expert": "person"}


def by_a_person(episode, every=2):
    """The person acts in every second chunk."""
    executed, persons = episode.executed_TCA.copy(), np.zeros_like(episode.valid_TC)
    persons[::every] = True
    executed[persons] = DONE
    return replace(episode, executed_TCA=executed, intervened_TC=persons, author="ada")


def test_an_episode_says_what_a_person_did_and_who(robots):
    policy = policy_config({**robots.POLICY, "hidden": [8]}).build(0)
    episode = by_a_person(robots.play(policy, [robots.Reach(horizon=6)], [1], 0)[0])
    again = decode_episode(encode_episode(episode))
    assert again.author == "ada" and (again.intervened_TC == episode.intervened_TC).all()
    np.testing.assert_allclose(again.executed_TCA[0, 0], DONE)
    with pytest.raises(ServiceError, match="intervened: shape"):
        decode_episode(encode_episode(replace(episode, intervened_TC=np.zeros((2, 1), np.bool_))))


def test_a_store_keeps_where_a_person_acted_and_who(tmp_path):
    def opened():
        return ReplayStore(tmp_path / "store.sqlite", 60, Spaces(2, 1), Sampling())

    states, shown = np.zeros((4, 2), np.float32), np.array([False, True, False])
    own = opened()
    for author, mask in (("", None), ("ada", shown)):
        own.insert(
            Stored((0, 0), 1, states, np.ones((3, 1)), np.ones(3), True, False, shown_T=mask, author=author)
        )
    own.commit()
    own.close()
    again = opened()
    assert again.shown(np.arange(8)).tolist() == [False] * 5 + [True, False, False]
    assert [each.author for each in again.episodes.values()] == ["", "ada"]
    assert [each.author for each in again.stored(1)] == ["", "ada"]
    again.close()


async def test_a_policy_imitates_the_person_and_nothing_else(
    client, robots, robot_config, fetched_weights, settled_digest
):
    config = robot_config(
        "dagger",
        options=OPTIONS,
        policy={"hidden": [32], "activation": "relu"},
        optimizer={"lr": 3e-3, "beta2": 0.999, "grad_clip": 10.0, "weight_decay": 0.0},
    )
    version = (await client.open(config)).version
    policy = policy_config(config["model"]["policy"]).build(config["seed"])

    async def step(change):
        nonlocal version
        number = version.number + 1
        episodes = robots.play(policy, [robots.Reach(horizon=24) for _ in range(4)], range(4), number)
        groups = [
            robots.settled(10 * number + place, [change(each)], version)
            for place, each in enumerate(episodes)
        ]
        await client.begin(version.ordinal, 1, version.number, number)
        await client.learn(version.ordinal, 1, groups)
        reply = await client.commit(version.ordinal, 1, version.number, number, settled_digest(groups))
        await client.record(version.ordinal, 1, number)
        version = reply.version
        found = await fetched_weights(client, version.number)
        load_weights(policy, found)
        return {name: value.clone() for name, value in found.items()}

    first = await fetched_weights(client, version.number)
    same = await step(lambda each: each)
    assert all(torch.equal(same[name], value) for name, value in first.items() if name.startswith("actor"))
    for _ in range(2):
        await step(by_a_person)
    states = torch.tensor(np.random.default_rng(9).uniform(-1, 1, (32, 6)), dtype=torch.float32)
    drawn = policy.act(Observation(states), [0] * 32, deterministic=True).executed_BCA[:, 0]
    np.testing.assert_allclose(drawn.mean(0), DONE, atol=0.25)
    (file,) = (client.directory / "replay").glob("*.sqlite")
    with closing(sqlite3.connect(file)) as opened:
        rows = opened.execute("SELECT author, length(shown) FROM episodes ORDER BY id").fetchall()
    assert rows == [("", 0)] * 4 + [("ada", 24)] * 8


def test_a_persons_chunks_carry_no_loss_of_an_on_policy_algorithm(robots):
    from headrace_robots.trainer.algorithms import build_episode_algorithm
    from headrace_schema.sections.learning import AlgorithmSection

    policy = policy_config({**robots.POLICY, "hidden": [8]}).build(0)
    episode = by_a_person(robots.play(policy, [robots.Reach(horizon=6)], [1], 0)[0])
    member = EpisodeMember(
        sample_index=0,
        attempt=1,
        body_digest="",
        reward=0.0,
        instruction=[],
        policy_number=1,
        truncated=True,
        masked=False,
        episode=episode,
    )
    scores = EpisodeScores((0, 0), Packed.of(episode.log_probs_TCA), Packed.of(np.zeros(6, np.float32)), 0.0)
    algorithm = build_episode_algorithm(AlgorithmSection(name="ppo"))
    mask_NC = plan_credit([[_kept(member, scores, 0)]], algorithm).data.mask_NC.array()
    assert mask_NC.any(1).tolist() == [False, True] * 3
