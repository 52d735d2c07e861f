"""Several policies that learn from the same conversations: each as a run of its own would, and all as one version."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.adapters import merged
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.weights import below as name_below
from headrace_modelkit.weights import own_name
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.weights.versions import base_name
from headrace_trainer.export import export_checkpoint
from headrace_trainer.ranks.policy_rounds import PolicyRounds
from headrace_trainer.versions.publishing import published_tensors
from trainer_calls import Engine, TrainerClient, digest_of, refusal

ONE = common_pb2.SamplingDistribution(temperature=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED)
TURNS = ("asker", "teller", "asker")
OWN_LR, OTHER_LR = 1e-3, 5e-3


def talk_of(seed: int, index: int, number: int, roles: tuple[str, ...]) -> trainer_pb2.SettledTrajectory:
    """A conversation of three turns, as those of `roles` read it: a line each, in the order in which they speak."""
    rng = random.Random(f"{seed}/{index}")
    lines: dict[str, list[tuple[int, list[int]]]] = {"asker": [], "teller": []}
    beginning = {"asker": [20 + seed, 5], "teller": [21 + seed]}  # the same in all samples of a group
    for role in TURNS:
        read = [rng.randrange(3, 20)] if lines[role] else beginning[role]
        said = [rng.randrange(3, 20) for _ in range(rng.randint(1, 3))]
        lines[role] += [(0, read), (number, said)]
    rewards = {turn: rng.choice((0.0, 0.5, 1.0)) for turn in range(len(TURNS))}
    trajectory = common_pb2.Trajectory(
        sample=common_pb2.SlotKey(prompt_ordinal=seed, sample_index=index),
        attempt=1,
        finish_reason=common_pb2.FINISH_REASON_TERMINATED,
    )
    for role in roles:
        branch = trajectory.branches.add()
        for version, ids in lines[role]:
            tokens = common_pb2.TokenSegment(token_ids=ids)
            if version:
                tokens.log_probs.extend([-float(each) / 9 for each in ids] if Engine.tells else [])
                tokens.distribution.CopyFrom(ONE)
            branch.segments.add(policy_number=version, tokens=tokens)
    talk, spoken = trajectory.conversation, dict.fromkeys(lines, 0)
    found = []
    for turn, role in enumerate(TURNS):
        spoken[role] += 1
        if role in roles:
            tokens = len(lines[role][2 * spoken[role] - 1][1])
            talk.turns.add(message=len(talk.messages), branch=roles.index(role), tokens=tokens)
            talk.messages.add(role="assistant", party=role)
            found.append(rewards[turn])
    trajectory.body_digest = trajectory_digest(trajectory)
    return trainer_pb2.SettledTrajectory(trajectory=trajectory, reward=sum(found), turn_rewards=found)


async def learned(client: TrainerClient, version: Any, roles: tuple[str, ...] = ("asker", "teller")) -> Any:
    """A committed and recorded step of three games of four samples."""
    number, groups = version.number + 1, []
    for prompt in range(3 * version.ordinal, 3 * version.ordinal + 3):
        groups.append(trainer_pb2.SettledGroup(prompt_ordinal=prompt))
        for index in range(4):
            settled = talk_of(prompt, index, version.number, roles)
            settled.oldest_version.CopyFrom(version)
            groups[-1].members.append(settled)
    await client.begin(version.ordinal, 1, version.number, number)
    await client.learn(version.ordinal, 1, groups)
    reply = await client.commit(version.ordinal, 1, version.number, number, digest_of(groups))
    assert reply.version.number == number, reply
    await client.record(version.ordinal, 1, number)
    return reply


@pytest.fixture
def other_model(tmp_path) -> Path:
    write_tiny(tmp_path / "other", seed=5)
    return tmp_path / "other"


@pytest.fixture
def several(make_config, other_model):
    """Builds the JSON of OpenRun in which the policy `tutor` plays the teller."""

    def make(own: dict[str, Any] | None = None, other: dict[str, Any] | None = None, **more: Any) -> Any:
        policy = {"model": {"path": str(other_model), "dtype": "float32"}, "optimizer": {"lr": OTHER_LR}}
        policies = {"tutor": policy | ({"algorithm": other} if other else {})}
        more |= {"algorithm": own} if own else {}
        return make_config(optimizer={"lr": OWN_LR}, policies=policies, played={"teller": "tutor"}, **more)

    return make


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (None, None),
        (None, {"name": "ppo", "options": {"critic": "head", "epochs": 2}}),
        ({"options": {"kl_loss_coef": 0.1}}, {"name": "rloo", "options": {"epochs": 2, "minibatches": 3}}),
    ],
    ids=["streams", "one waits", "passes"],
)
async def test_each_policy_learns_as_it_would_alone_from_what_its_roles_said(
    client: TrainerClient, several, make_config, other_model, own, other
):
    fixed = {"deterministic": True}  # groups are packed alone: Adam makes steps of what sums differ by
    version = (await client.open(several(own, other, **fixed))).version
    for _ in range(2):
        reply = await learned(client, version)
        version = reply.version
    both = await client.weights(version.number)
    figures, tokens = reply.figures, reply.token_count
    await client.close_run()
    alone: dict[str, dict[str, torch.Tensor]] = {}
    for policy, role, algorithm, section in (
        ("policy", "asker", own, {"optimizer": {"lr": OWN_LR}}),
        ("tutor", "teller", other, {"optimizer": {"lr": OTHER_LR}, "model": {"path": str(other_model)}}),
    ):
        config = make_config(**section, **fixed, **({"algorithm": algorithm} if algorithm else {}))
        version = (await client.open(config, number=10 * (1 + len(alone)))).version
        for _ in range(2):
            reply = await learned(client, version, (role,))
            version = reply.version
        alone[policy] = await client.weights(version.number)
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "reward_mean",
            "learning_rate",
            "log_prob_mismatch_mean",
        ):
            assert figures[f"{policy}/{name}"] == pytest.approx(reply.figures[name], rel=1e-4, abs=1e-7), name
        assert figures[f"{policy}/tokens"] == reply.token_count
        await client.close_run()
    assert figures["policy/tokens"] + figures["tutor/tokens"] == tokens
    assert both.keys() == {*alone["policy"], *(f"tutor/{name}" for name in alone["tutor"])}
    for name, tensor in both.items():
        where, _, own_name = name.rpartition("/")
        torch.testing.assert_close(tensor, alone[where or "policy"][own_name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("role", ["asker", "teller"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo", "options": {"critic": "head", "epochs": 2, "bootstrap_truncated": True}},
        {"name": "reinforce_pp", "options": {"kl_reward_coef": 0.1}},
        {"name": "grpo", "options": {"epochs": 2, "minibatches": 3}},
        {"name": "rloo"},
    ],
    ids=lambda algorithm: algorithm["name"],
)
async def test_a_policy_that_nobody_spoke_to_stays_as_it_is_and_the_step_commits(
    client: TrainerClient, several, role, algorithm
):
    version = (await client.open(several(algorithm, algorithm))).version
    before = await client.weights(version.number)
    reply = await learned(client, version, (role,))
    after = await client.weights(reply.version.number)
    spoke = "tutor" if role == "teller" else ""
    moved = {own_name(name)[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {spoke} and all(map(math.isfinite, reply.figures.values()))
    assert {name.partition("/")[0] for name in reply.figures if "/" in name} == {spoke or "policy"}


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["whole", "adapters"])
async def test_a_checkpoint_holds_both_policies_and_a_resume_goes_on_to_the_same_bits(
    client: TrainerClient, several, tmp_path, lora
):
    config = several(other={"name": "ppo", "options": {"critic": "head", "epochs": 2}}, deterministic=True)
    if lora:
        config["policies"]["tutor"] |= {"trainer": {"lora": lora}, "algorithm": {"name": "rloo"}}
    first = (await learned(client, (await client.open(config)).version)).version
    saved = (await client.save(first.number)).checkpoint
    await client.export("whole")
    exported = export_checkpoint(client.directory, lambda _: tmp_path / "out")
    for policy in ("", "tutor"):
        names = [Path(policy, each) for each in ("model.safetensors", "config.json")]
        assert [(exported.directory / each).read_bytes() for each in names] == [
            (client.directory / "whole" / each).read_bytes() for each in names
        ]
    assert (exported.directory / "tutor" / "adapter").is_dir() == bool(lora)
    straight = (await learned(client, first)).version
    await client.close_run()
    again = (await client.open(config, checkpoint=saved.name, number=40)).version
    assert again.digest == first.digest
    again.ordinal = first.ordinal
    assert (await learned(client, again)).version.digest == straight.digest


async def test_adapters_of_both_policies_are_published_alone_on_the_base_that_is_theirs(
    client: TrainerClient, make_config
):
    """Merged they are what is published whole; with another base each, all weights are."""
    policies: dict[str, Any] = {"tutor": {"trainer": {"lora": {"rank": 2, "alpha": 8.0}}}}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for lora in ("merged", "adapter"):
        more = {"weights": {"lora": lora}, "trainer": {"lora": {"rank": 4, "alpha": 8.0}}}
        config = make_config(optimizer={"lr": 1e-2}, policies=policies, played={"teller": "tutor"}, **more)
        version = (await learned(client, (await client.open(config)).version)).version
        published = await client.publish(version.number)
        body = memoryview(bytearray(await client.body(version.number)))
        found[lora] = published_tensors(published.manifest, body)
        if lora == "merged":
            await client.close_run()
    below = published.manifest.adapter
    assert dict(below.scales) == {"": 2.0, "tutor": 4.0}
    described = await weights_pb2_grpc.WeightServiceStub(client.channel).GetManifest(
        weights_pb2.GetManifestRequest(run=base_name(client.run), number=1)
    )
    assert described.version.digest == below.digest
    with open(described.source.shm_path, "rb") as file:  # noqa: ASYNC230
        base = published_tensors(described.manifest, memoryview(bytearray(file.read())))
    for policy, scale in below.scales.items():
        own = {
            own_name(name)[1]: tensor
            for name, tensor in found["adapter"].items()
            if own_name(name)[0] == policy
        }
        for name, tensor in merged(base.items(), own, scale):
            assert torch.equal(tensor, found["merged"][name_below(policy, name)]), (policy, name)
    await client.close_run()
    policies["tutor"]["model"] = {"path": "elsewhere", "dtype": "float32"}
    assert TrainerConfig.model_validate(config).adapter_scales() == {}


async def test_a_group_that_one_policy_refuses_costs_the_attempt_and_the_next_one_goes_without_it(
    client: TrainerClient, several, monkeypatch
):
    """The tutor finds the loss of the second group not finite, after the run's own policy has learned from it."""
    micro = PolicyRounds.micro

    def failing(rounds: PolicyRounds, work: Any) -> list[bool]:
        bad = [any(22 in each.tokens[:1] for rows in part for row in rows for each in row) for part in work]
        if rounds._policy and any(bad):
            return [not each for each in bad]
        return micro(rounds, work)

    version = (await client.open(several())).version
    before = await client.weights(version.number)
    groups = [trainer_pb2.SettledGroup(prompt_ordinal=prompt) for prompt in (0, 1)]
    for group in groups:
        for index in range(4):
            settled = talk_of(group.prompt_ordinal, index, version.number, ("asker", "teller"))
            settled.oldest_version.CopyFrom(version)
            group.members.append(settled)
    monkeypatch.setattr(PolicyRounds, "micro", failing)
    for attempt, result in (
        (1, trainer_pb2.COMMIT_RESULT_NONFINITE),
        (2, trainer_pb2.COMMIT_RESULT_COMMITTED),
    ):
        await client.begin(0, attempt, version.number, 1 + attempt)
        told = [each for reply in await client.learn(0, attempt, groups) for each in reply.outcomes]
        assert [each.disposition for each in told] == [
            trainer_pb2.GROUP_DISPOSITION_ACCUMULATED,
            trainer_pb2.GROUP_DISPOSITION_NONFINITE,
        ]
        reply = await client.commit(0, attempt, version.number, 1 + attempt, digest_of(groups[:1]))
        assert reply.result == result
    await client.record(0, 2, 3)
    after = await client.weights(3)
    assert reply.group_count == 1 and all(
        any(not torch.equal(before[name], after[name]) for name in names)
        for names in ([each for each in before if "/" in each], [each for each in before if "/" not in each])
    )


async def test_what_is_wrong_with_a_policy_is_named_by_its_key(client: TrainerClient, several, tmp_path):
    config = several(other={"name": "ppo", "options": {"critic": "head", "epochs": 0}})
    reason, message = await refusal(client.open_run(config))
    assert reason == "INVALID" and message.startswith("policies.tutor.algorithm.options.epochs"), message
    config = several()
    config["policies"]["tutor"]["model"]["path"] = str(tmp_path / "nowhere")
    reason, message = await refusal(client.open_run(config))
    assert reason == "MODEL_NOT_READABLE" and message.startswith("policies.tutor.model.path"), message
