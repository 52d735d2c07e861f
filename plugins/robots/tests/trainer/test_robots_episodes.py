"""A trainer learns from episodes of a robot policy, over gRPC: steps, checkpoints, what it publishes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.trainer.algorithms import EPISODE_ALGORITHMS, OFF_POLICY, build_episode_algorithm
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import AlgorithmSection
from headrace_servicekit.registry import Registry
from headrace_servicekit.rpc.errors import reason_of
from headrace_trainer import workloads
from headrace_trainer.errors import Refusal
from headrace_trainer.export import export_checkpoint

PPO = {"epochs": 2, "minibatch_size": 40, "gamma": 0.97, "reward_scale": 0.1}


@pytest.fixture
def play(robots):
    """(groups, episodes) of four start states, drawn by the policy that a version is."""

    def run(policy, version, *, step=0, members=1, first=0, **world):
        seeds = [100 * step + prompt for prompt in range(4) for _ in range(members)]
        worlds = [robots.Reach(**world) for _ in seeds]
        episodes = robots.play(policy, worlds, seeds, 1000 * step + first)
        parts = [episodes[place * members : (place + 1) * members] for place in range(4)]
        return [robots.settled(4 * step + place, part, version) for place, part in enumerate(parts)], episodes

    return run


def new_policy(config):
    return policy_config(config["model"]["policy"]).build(config["seed"])


async def step(client, groups, version, digest_of, *, number=None):
    """One committed and recorded step."""
    number = number or version.number + 1
    await client.begin(version.ordinal, 1, version.number, number)
    replies = await client.learn(version.ordinal, 1, groups)
    reply = await client.commit(version.ordinal, 1, version.number, number, digest_of(groups))
    await client.record(version.ordinal, 1, number)
    return replies, reply


async def test_a_step_of_ppo_makes_a_version_whose_normaliser_has_seen_its_states(
    client, robot_config, play, fetched_weights, settled_digest
):
    config = robot_config(options=PPO)
    version = (await client.open(config)).version
    first = await fetched_weights(client, version.number)
    policy = new_policy(config)
    assert all(torch.equal(first[name], value) for name, value in state_tensors(policy))
    groups, episodes = play(policy, version)
    replies, reply = await step(client, groups, version, settled_digest)
    assert [r.outcomes[0].disposition for r in replies] == [1, 1, 1, 1]
    assert (reply.sequence_count, reply.token_count) == (4, 96)
    assert dict(reply.tokens_by_version) == {version.number: 96}
    figures = dict(reply.figures)
    assert figures["log_prob_mismatch_max"] < 1e-5 and figures["log_prob_compared_tokens"] == 96
    shown = {"loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"}
    assert shown | {"grad_norm", "learning_rate", "log_prob_mismatch_mean"} <= figures.keys()
    assert figures["optimizer_steps"] == 2 * 3
    after = await fetched_weights(client, reply.version.number)
    states = torch.from_numpy(np.concatenate([e.observation["state"] for e in episodes])).double()
    assert torch.allclose(after["normalizer.mean"], states.mean(0), atol=1e-6)
    assert int(after["normalizer.count"]) == 96 and int(after["normalizer.updates"]) == 1
    assert not torch.equal(after["actor.0.weight"], first["actor.0.weight"])


async def test_the_critic_learns_alone_in_the_first_steps_and_at_a_rate_of_its_own(
    client, robot_config, play, fetched_weights, settled_digest
):
    """So that a policy that was cloned is not moved by a critic that knows nothing yet."""
    config = robot_config(options=PPO | {"critic_warmup_steps": 1, "critic_lr": 3e-3})
    version = (await client.open(config)).version
    policy = new_policy(config)
    seen = [await fetched_weights(client, version.number)]
    for number in range(2):
        groups, _ = play(policy, version, step=number)
        _, reply = await step(client, groups, version, settled_digest)
        version = reply.version
        seen.append(await fetched_weights(client, version.number))
        load_weights(policy, seen[-1])
    first, second, third = seen
    for name in ("actor.0.weight", "head.log_std"):
        assert torch.equal(first[name], second[name]) and not torch.equal(second[name], third[name])
    assert not torch.equal(first["critic.0.weight"], second["critic.0.weight"])
    moved = (second["critic.0.weight"] - first["critic.0.weight"]).abs().max()
    assert moved > 6e-3, "six optimizer steps of 0.003 each"


async def test_a_restored_step_is_the_same_to_the_bit(
    client, robot_config, play, fetched_weights, settled_digest
):
    config = robot_config(options=PPO)
    version = (await client.open(config)).version
    groups, _ = play(new_policy(config), version)
    _, reply = await step(client, groups, version, settled_digest)
    saved = (await client.save(reply.version.number)).checkpoint
    policy = new_policy(config)
    following, _ = play(policy, reply.version, step=1)
    await step(client, following, reply.version, settled_digest)
    expected = await fetched_weights(client, reply.version.number + 1)
    await client.close_run()
    restored = (await client.open(config, saved.name, number=20)).version
    again, _ = play(policy, restored, step=1)
    await step(client, again, restored, settled_digest)
    found = await fetched_weights(client, 21)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = robot_config(options=PPO, policy={"hidden": [32]})
    await client.close_run()
    with pytest.raises(Exception) as refusal:
        await client.open(other, saved.name, number=40)
    assert reason_of(refusal.value) == "CHECKPOINT_MISMATCH" and "model.policy" in str(refusal.value)


async def test_an_exported_policy_is_the_version(
    client, robot_config, play, fetched_weights, settled_digest, tmp_path
):
    config = robot_config(options=PPO)
    version = (await client.open(config)).version
    groups, _ = play(new_policy(config), version)
    _, reply = await step(client, groups, version, settled_digest)
    await client.suspend()
    await client.wake()
    exported = load_policy((await client.export("final")).path)
    await client.save(reply.version.number)
    of_files = load_policy(export_checkpoint(client.directory, lambda _: tmp_path / "of files").directory)
    expected = await fetched_weights(client, reply.version.number)
    for policy in (exported, of_files):
        assert all(torch.equal(value, expected[name]) for name, value in state_tensors(policy))
    await client.close_run()
    by_path = robot_config(options=PPO) | {"model": {"path": str(tmp_path / "run" / "final")}}
    reopened = (await client.open(by_path, number=30)).version
    assert reopened.digest == reply.version.digest


async def test_grpo_learns_from_groups_and_nothing_behind_a_success(
    client, robot_config, play, settled_digest
):
    config = robot_config(
        "grpo", group_size=3, options={"epochs": 2, "level": "chunk"}, policy={"chunk_length": 4}
    )
    version = (await client.open(config)).version
    groups, episodes = play(new_policy(config), version, members=3)
    _, reply = await step(client, groups, version, settled_digest)
    assert reply.figures["optimizer_steps"] == 2 and reply.sequence_count == 12
    chunks = sum(
        1 + int(np.argmax(e.successes_TC.any(1))) if e.success else len(e.successes_TC) for e in episodes
    )
    assert reply.figures["log_prob_compared_tokens"] == chunks
    assert "value_loss" not in reply.figures


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("dapo", {}, "use crossq, dagger, grpo,"),
        ("ppo", {"kl_loss_coef": 0.1}, "kl_loss_coef"),
        ("ppo", {"critic": "model"}, "critic"),
        ("ppo", {"minibatches": 2, "minibatch_size": 8}, "minibatch_size"),
        ("ppo", {"until_success": True}, "until_success"),
        ("grpo", {"gamma": 0.9}, "gamma"),
    ],
)
async def test_what_episodes_do_not_have_is_refused_by_name(client, robot_config, name, options, key):
    with pytest.raises(Exception, match=key) as refusal:
        await client.open_run(robot_config(name, group_size=2, options=options))
    assert reason_of(refusal.value) == "INVALID"


@pytest.mark.parametrize("section", [{"policy": {"kind": "mpl"}}, {"policy": {"hidden": 3}}])
async def test_a_policy_that_cannot_be_is_refused(client, robot_config, section):
    with pytest.raises(Exception, match=r"model\.policy\.(kind|hidden)") as refusal:
        await client.open_run(robot_config(**section))
    assert reason_of(refusal.value) == "MODEL_NOT_READABLE"


async def test_a_value_that_is_not_finite_refuses_its_group_alone(
    client, robot_config, robots, play, settled_digest
):
    config = robot_config(options=PPO)
    version = (await client.open(config)).version
    groups, episodes = play(new_policy(config), version)
    spoilt = episodes[0].rewards_TC.copy()
    spoilt[3, 0] = np.nan
    far = {"actions": np.full_like(episodes[1].sampled["actions"], 1e30)}
    groups[0] = robots.settled(0, [replace(episodes[0], rewards_TC=spoilt)], version, lambda _: 0.0)
    groups[1] = robots.settled(1, [replace(episodes[1], sampled=far)], version)
    await client.begin(0, 1, version.number, 2)
    replies = await client.learn(0, 1, groups)
    outcomes = [reply.outcomes[0] for reply in replies]
    assert [outcome.disposition for outcome in outcomes] == [2, 2, 1, 1]
    assert "rewards" in outcomes[0].detail and "log-prob" in outcomes[1].detail
    reply = await client.commit(0, 1, version.number, 2, settled_digest(groups[2:]))
    assert reply.group_count == 2 and np.isfinite(reply.figures["loss"])


def _two_segments(trajectory):
    trajectory.branches[0].segments.add().CopyFrom(trajectory.segments[0])


def _greedy_number(trajectory):
    trajectory.branches[0].segments[0].policy_number = 0


def _ended(trajectory):
    trajectory.finish_reason = common_pb2.FINISH_REASON_TERMINATED


def _mask(trajectory):
    trajectory.branches[0].segments[0].actions.valid_mask.Clear()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_two_segments, "segments"),
        (_greedy_number, "policy_number"),
        (_ended, "finish_reason"),
        (_mask, "valid_mask"),
    ],
)
async def test_a_malformed_episode_is_refused_with_its_field(
    client, robot_config, robots, play, change, field
):
    config = robot_config(options=PPO)
    version = (await client.open(config)).version
    _, episodes = play(new_policy(config), version)
    await client.begin(0, 1, version.number, 2)
    with pytest.raises(Exception, match=field):
        await client.learn(0, 1, [robots.settled(0, episodes[:1], version, change=change)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("observation", {"state": np.zeros((24, 5), np.float32)}),
        ("observation", {"pixels": np.zeros((24, 6), np.float32)}),
        ("sampled", {"actions": np.zeros((24, 1, 3), np.float32)}),
        ("log_probs_TCA", np.zeros((24, 1, 3), np.float32)),
    ],
)
async def test_an_episode_of_another_policy_is_refused_with_its_field(
    client, robot_config, robots, play, field, value
):
    config = robot_config(options=PPO)
    version = (await client.open(config)).version
    _, episodes = play(new_policy(config), version)
    more = (
        {"final_observation": {name: each[0] for name, each in value.items()}}
        if field == "observation"
        else {}
    )
    other = replace(episodes[0], **{field: value}, **more)
    await client.begin(0, 1, version.number, 2)
    with pytest.raises(Exception, match=field.removesuffix("_TCA")) as refusal:
        await client.learn(0, 1, [robots.settled(0, [other], version)])
    assert reason_of(refusal.value) == "INVALID"


async def test_answers_are_refused_where_episodes_are_learned(client, robot_config, make_settled):
    version = (await client.open(robot_config(options=PPO))).version
    await client.begin(0, 1, version.number, 2)
    group = make_settled(0, version=version)
    with pytest.raises(Exception, match="finished episodes"):
        await client.learn(0, 1, [group])
    with pytest.raises(Exception, match="robot policy"):
        await client.infer([group.members[0].trajectory])


def test_the_facets_name_what_learns_from_episodes(client):
    facets = client.instance.capabilities
    assert facets["episode_algorithms"] == sorted(("grpo", "ppo", "sft", *OFF_POLICY))
    schemas = dict(text.split("=", 1) for text in facets["episode_algorithm_options"])
    assert "minibatch_size" in json.loads(schemas["ppo"])["properties"]
    assert "kl_loss_coef" not in json.loads(schemas["ppo"])["properties"]


def test_the_algorithms_correct_for_older_samples():
    for name in {*EPISODE_ALGORITHMS.names()} - {"sft"}:  # whose actions are the data's
        section = AlgorithmSection(name=name, group_size=2).model_copy(update={"max_staleness": 1})
        algorithm = build_episode_algorithm(section)
        assert "off_policy" in EPISODE_ALGORITHMS.find(name).features
        # Those that learn from the replay store have no ratio to correct.
        assert name in OFF_POLICY or algorithm.options.correction == "truncate"


def test_without_the_plugin_a_robot_policy_is_refused_by_its_key(robot_config, monkeypatch):
    monkeypatch.setattr(workloads, "WORKLOADS", Registry("headrace.none", "workload", "model", "model", {}))
    with pytest.raises(Refusal, match=r"model\.policy: no plug-in"):
        workloads.run_kind(TrainerConfig.model_validate(robot_config()))
