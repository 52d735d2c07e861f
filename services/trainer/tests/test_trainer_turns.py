"""Credit by turn, against hand computations in plain Python, and against credit of whole conversations."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import SamplingSection
from headrace_schema.sections.learning import AlgorithmSection
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import VALUES, Outcomes, Turns, turn_credit_of
from headrace_trainer.algorithms._turns import by_role, by_turn
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.intake import Intake
from headrace_trainer.learning.reading import read_group
from headrace_trainer.learning.samples import Group, Sample, Trajectory, Turn
from headrace_trainer.learning.step import StepState, Version
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_calls import random_sequences, settled_trajectory

GROUPED = ("grpo", "dr_grpo", "rloo", "dapo", "cispo", "sapo", "gpg", "opo", "reinforce_pp_baseline")
Talk = tuple[list[float], list[int]]
"""Rewards and tokens by turn of one conversation."""


def build(name: str = "grpo", **options: object):
    return build_algorithm(AlgorithmSection(name=name, options={"credit": "turn", **options}))


def outcomes_of(groups: list[list[Talk]], *, masked: tuple[int, ...] = (), columns: bool = False) -> Outcomes:
    talks = [talk for group in groups for talk in group]
    turns, longest = max(len(rewards) for rewards, _ in talks), max(sum(tokens) for _, tokens in talks)

    def padded(values: list[float] | list[int]) -> list[float]:
        return [*values, *[0] * (turns - len(values))]

    lengths_B = torch.tensor([0 if at in masked else sum(tokens) for at, (_, tokens) in enumerate(talks)])
    mask_BT = torch.arange(longest) < lengths_B[:, None]
    generator = torch.Generator().manual_seed(len(talks))
    values_BT = torch.rand(mask_BT.shape, generator=generator, dtype=torch.float64) * mask_BT
    return Outcomes(
        rewards_B=torch.tensor([math.fsum(rewards) for rewards, _ in talks], dtype=torch.float64),
        groups_B=torch.tensor([number for number, group in enumerate(groups) for _ in group]),
        mask_BT=mask_BT,
        lengths_B=torch.tensor([max(tokens) for _, tokens in talks]),
        longest=9,
        columns_BT={VALUES: values_BT} if columns else {},
        turns=Turns(
            rewards_BN=torch.tensor([padded(rewards) for rewards, _ in talks], dtype=torch.float64),
            tokens_BN=torch.tensor([padded(tokens) for _, tokens in talks], dtype=torch.long),
            counts_B=torch.tensor([len(rewards) for rewards, _ in talks]),
        ),
    )


def credited(algorithm, outcomes: Outcomes) -> torch.Tensor:
    """Advantages as the trainer makes them."""
    credit = turn_credit_of(algorithm)
    if credit is None or not credit.apart:
        found = algorithm.advantages(outcomes)
    else:
        found = by_turn(algorithm.advantages, outcomes, credit.discount)
    return found.advantages if isinstance(found, Advantages) else found


TALKS: list[list[Talk]] = [
    [([0.25, 1.0], [2, 1]), ([0.0, -0.5], [1, 3]), ([1.0], [2]), ([0.0, 0.5, 2.0], [1, 1, 2])],
    [([1.0, 0.0], [1, 1]), ([0.0, 1.0], [2, 2])],
]


def test_a_turn_is_worth_what_follows_against_the_same_turns_of_its_group():
    """By hand, discount 0.5. A third turn, which one alone has, is compared with the others' second ones."""
    found_BT = credited(build(turn_discount=0.5), outcomes_of(TALKS))
    first = [0.25 + 0.5 * 1.0, 0.5 * -0.5, 1.0, 0.5 * (0.5 + 0.5 * 2.0)]
    second, third = [1.0, -0.5, 0.5 + 0.5 * 2.0], [1.0, -0.5, 2.0]

    def normalised(values: list[float]) -> list[float]:
        return [(v - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6) for v in values]

    f, s, t = normalised(first), normalised(second), normalised(third)
    g, h = normalised([1.0, 0.5]), normalised([0.0, 1.0])
    expected = [
        [f[0], f[0], s[0], 0.0],
        [f[1], s[1], s[1], s[1]],
        [f[2], f[2], 0.0, 0.0],
        [f[3], s[2], t[2], t[2]],
        [g[0], h[0], 0.0, 0.0],
        [g[1], g[1], h[1], h[1]],
    ]
    torch.testing.assert_close(found_BT, torch.tensor(expected, dtype=torch.float64))
    # Totals cannot tell the two of the second group apart, turns can.
    plain = build_algorithm(AlgorithmSection()).advantages(outcomes_of(TALKS))
    assert not plain[4:].any() and found_BT[4, 1] < 0 < found_BT[4, 0]


def test_turns_that_too_few_have_for_an_algorithm_are_compared_with_the_others_before_them():
    """With groups of three at least, second turns of two and the third turn of one go with the others' first turns."""
    groups: list[list[Talk]] = [[([1.0], [1]), ([0.0, 2.0], [1, 1]), ([0.0, 0.0, 4.0], [1, 1, 1])]]
    algorithm = build("dr_grpo")
    found_BT = by_turn(algorithm.advantages, outcomes_of(groups), 1.0, least=3)
    mean = statistics.fmean([1.0, 2.0, 4.0])
    expected = [[1 - mean, 0, 0], [2 - mean, 2 - mean, 0], [4 - mean, 4 - mean, 4 - mean]]
    torch.testing.assert_close(found_BT, torch.tensor(expected, dtype=torch.float64))


def test_a_masked_conversation_counts_in_baselines_and_carries_none():
    found_BT = credited(build("dr_grpo"), outcomes_of(TALKS, masked=(1,)))
    assert not found_BT[1].any()
    firsts = [1.25, -0.5, 1.0, 2.5]
    assert found_BT[0, 0] == pytest.approx(1.25 - statistics.fmean(firsts))


def test_a_turn_without_a_token_passes_its_reward_to_those_before_it():
    talks: list[list[Talk]] = [[([0.0, 1.0], [2, 0]), ([0.0, 0.0], [1, 1])]]
    found_BT = credited(build("dr_grpo", turn_discount=0.5), outcomes_of(talks))
    torch.testing.assert_close(found_BT, torch.tensor([[0.25, 0.25], [-0.25, -0.5]], dtype=torch.float64))
    ppo = credited(build("ppo", whiten=False, turn_discount=0.5), outcomes_of(talks, columns=True))
    values_BT = outcomes_of(talks, columns=True).columns_BT[VALUES]
    torch.testing.assert_close(ppo[0], 0.5 - values_BT[0])


@pytest.mark.parametrize("name", [*GROUPED, "reinforce", "reinforce_pp"])
@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_with_all_reward_at_the_end_of_as_many_turns_it_is_credit_of_the_conversation(name, data):
    """Discount 1, and in each group the same number of turns; one turn with any discount and reward."""
    single = data.draw(st.booleans())
    groups: list[list[Talk]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        turns = 1 if single else data.draw(st.integers(1, 4))
        # A baseline by length weighs turns, and whitening weighs tokens: equal where all turns are as long.
        even = [data.draw(st.integers(1, 3))] * turns
        lengths = (
            st.just(even) if name == "opo" else st.lists(st.integers(1, 3), min_size=turns, max_size=turns)
        )
        rewards = st.integers(-3, 3).map(lambda value: value / 2)
        size = data.draw(st.integers(2, 4))
        groups.append([([0.0] * (turns - 1) + [data.draw(rewards)], data.draw(lengths)) for _ in range(size)])
    options: dict[str, object] = {"alpha": 1.0} if name == "gpg" else {}
    discount = 0.5 if single else 1.0
    outcomes = outcomes_of(groups)
    plain = build_algorithm(AlgorithmSection(name=name, options=options))
    expected = plain.advantages(replace(outcomes, turns=None))
    found_BT = credited(build(name, turn_discount=discount, **options), outcomes)
    torch.testing.assert_close(found_BT, expected, rtol=1e-12, atol=1e-12)
    values_of = {VALUES: torch.linspace(0, 1, outcomes.mask_BT.numel()).double().view(outcomes.mask_BT.shape)}
    with_values = replace(outcomes, columns_BT={VALUES: values_of[VALUES] * outcomes.mask_BT})
    critic = build_algorithm(AlgorithmSection(name="ppo")).advantages(replace(with_values, turns=None))
    torch.testing.assert_close(credited(build("ppo", turn_discount=discount), with_values), critic.advantages)


def test_ppo_earns_each_turns_reward_at_its_last_token():
    """GAE by hand over the tokens of each conversation; behind a turn what follows is worth turn_discount of it."""
    gamma, lam, discount = 0.9, 0.8, 0.5
    outcomes = outcomes_of(TALKS, columns=True)
    found = build("ppo", gamma=gamma, lam=lam, turn_discount=discount, whiten=False).advantages(outcomes)
    for row, (rewards, tokens) in enumerate(talk for group in TALKS for talk in group):
        values = outcomes.columns_BT[VALUES][row].tolist()
        ends = {sum(tokens[: turn + 1]) - 1: turn for turn in range(len(tokens))}
        advantage, value = 0.0, 0.0
        for place in reversed(range(sum(tokens))):
            reward = rewards[ends[place]] if place in ends else 0.0
            step = gamma * (discount if place in ends else 1.0)
            advantage = reward + step * value - values[place] + step * lam * advantage
            value = values[place]
            assert found.advantages[row, place] == pytest.approx(advantage)
            assert found.returns[row, place] == pytest.approx(advantage + value)


def test_the_trainer_learns_each_turns_tokens_with_its_own_advantage(make_config):
    options = {"credit": "turn", "normalize_std": False}
    config = TrainerConfig.model_validate(make_config(algorithm={"group_size": 2, "options": options}))
    algorithm = build_algorithm(config.algorithm)
    members = tuple(
        Trajectory(index, 1, f"body {index}", 1.0, (
            Sample([1, 2, 3, 4, 5], [1, 2, 4], [-1.0] * 3, versions=[0] * 3,
                   turns=(Turn(2, one), Turn(1, two, place=1))),
        ))
        for index, (one, two) in enumerate([(1.0, 0.0), (0.0, 1.0)])
    )  # fmt: skip
    group = Group(0, members, "digest")
    intake = Intake(config, algorithm)
    (prepared,) = intake.prepare(StepState(version=Version(0, 0, 0, ""), lineage={0: 0}), [group])
    assert [each.advantages for each in prepared.samples] == [[0.0, 0.0, -0.5], [0.0, 0.0, 0.5]]
    assert not prepared.record.all_equal and prepared.record.rewards == (1.0, 1.0)
    assert prepared.record.advantages == pytest.approx((-1 / 6, 1 / 6))


def settled(turn_tokens: list[int], turn_rewards: list[float]) -> trainer_pb2.SettledGroup:
    message = trainer_pb2.SettledGroup(prompt_ordinal=0)
    sequence = random_sequences(3)[1]
    trajectory = settled_trajectory(0, 0, 1, sequence, 1)
    for tokens in turn_tokens:
        trajectory.conversation.turns.add(tokens=tokens)
    trajectory.body_digest = trajectory_digest(trajectory)
    message.members.add(trajectory=trajectory, reward=1.0, turn_rewards=turn_rewards)
    return message


def test_turns_come_with_their_tokens_and_rewards_or_are_refused():
    count = len(random_sequences(3)[1].trained)
    assert count > 1
    whole = settled([count - 1, 1], [0.25, 0.75])
    (member,) = read_group(whole, SamplingSection(), 32, by_turn=True).members
    assert member.turns == [Turn(count - 1, 0.25), Turn(1, 0.75, place=1)]
    (member,) = read_group(whole, SamplingSection(), 32).members
    assert not member.turns, "credit goes to the whole"
    for tokens, rewards in (
        ([], []),
        ([count], [0.5, 0.5]),
        ([count + 1], [1.0]),
        ([-1, count + 1], [0.0, 1.0]),
    ):
        with pytest.raises(Refusal, match="turns"):
            read_group(settled(tokens, rewards), SamplingSection(), 32, by_turn=True)
    (member,) = read_group(settled([count], [math.nan]), SamplingSection(), 32, by_turn=True).members
    assert "rewards by turn are [nan]" in member.problem()


@pytest.mark.parametrize("name", ["gspo", "gmpo", "passk_grpo", "remax", "distill"])
def test_what_is_made_for_whole_answers_is_refused_by_key(name):
    with pytest.raises(Refusal, match=r"algorithm\.options\.credit: .* cannot tell turns apart"):
        build(name)


def test_options_that_would_have_no_effect_are_refused_by_key():
    with pytest.raises(Refusal, match="turn_discount: has no effect without credit: turn"):
        build_algorithm(AlgorithmSection(options={"turn_discount": 0.9}))
    with pytest.raises(Refusal, match="kl_reward_coef: with credit: turn"):
        build("rloo", kl_reward_coef=0.1)
    assert turn_credit_of(build("ppo", kl_reward_coef=0.1)) is not None


def test_a_role_is_worth_its_own_rewards_against_the_same_role_of_its_group():
    """Two samples of speaker and guesser, and one in which the guesser has not come to a turn."""
    talks: list[list[Talk]] = [
        [([0.0, 1.0, -1.0], [2, 1, 1]), ([0.0, 0.5, 1.0], [1, 1, 2]), ([0.25, 0.25], [1, 1])],
        [([1.0, 0.0], [1, 1]), ([3.0], [2])],
    ]
    outcomes = outcomes_of(talks)
    roles_BN = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, -1], [0, 1, -1], [0, -1, -1]])
    assert outcomes.turns is not None
    outcomes = replace(outcomes, turns=replace(outcomes.turns, roles_BN=roles_BN))
    speakers, guessers, others = [1.0, 0.0, 0.5], [-1.0, 1.5], [1.0, 3.0]
    plain = build_algorithm(AlgorithmSection(name="dr_grpo"))
    found_BT = by_role(plain.advantages, outcomes)
    speaker = [each - statistics.fmean(speakers) for each in speakers]
    guesser = [each - statistics.fmean(guessers) for each in guessers]
    first = [each - statistics.fmean(others) for each in others]
    expected = [
        [speaker[0], speaker[0], speaker[0], guesser[0]],
        [speaker[1], guesser[1], guesser[1], guesser[1]],
        [speaker[2], speaker[2], 0.0, 0.0],
        [first[0], 0.0, 0.0, 0.0],  # only one guesser spoke: nothing to compare
        [first[1], first[1], 0.0, 0.0],
    ]
    torch.testing.assert_close(found_BT, torch.tensor(expected, dtype=torch.float64))

    credit = partial(by_turn, build("dr_grpo").advantages, discount=1.0)
    both_BT = by_role(credit, outcomes, credit=True)
    # The guesser's second turn has one sample: it is compared with the other's last one.
    first, second = statistics.fmean([-1.0, 1.5]), statistics.fmean([-1.0, 1.0])
    assert both_BT[0, 3] == pytest.approx(-1.0 - first)
    assert both_BT[1, 1:].tolist() == pytest.approx([1.5 - first, 1.0 - second, 1.0 - second])


def in_roles(rewards: list[float]) -> trainer_pb2.SettledTrajectory:
    """Turns of one, two and one token: asker, teller, asker; the teller's line is behind the asker's."""
    one = common_pb2.SamplingDistribution(temperature=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED)
    trajectory = common_pb2.Trajectory(
        sample=common_pb2.SlotKey(), attempt=1, finish_reason=common_pb2.FINISH_REASON_TERMINATED
    )
    for parts in ([(0, [5]), (1, [6]), (0, [7]), (1, [8])], [(0, [9, 10]), (1, [11, 12])]):
        branch = trajectory.branches.add()
        for number, ids in parts:
            tokens = common_pb2.TokenSegment(token_ids=ids)
            if number:
                tokens.log_probs.extend([-float(each) for each in ids])
                tokens.distribution.CopyFrom(one)
            branch.segments.add(policy_number=number, tokens=tokens)
    talk = trajectory.conversation
    for role, party in (("user", "asker"), *(("assistant", each) for each in ("asker", "teller", "asker"))):
        talk.messages.add(role=role, party=party)
    for place, branch, tokens in ((1, 0, 1), (2, 1, 2), (3, 0, 1)):
        talk.turns.add(message=place, branch=branch, tokens=tokens)
    trajectory.body_digest = trajectory_digest(trajectory)
    return trainer_pb2.SettledTrajectory(trajectory=trajectory, reward=sum(rewards), turn_rewards=rewards)


def test_each_role_is_learned_as_a_sequence_of_its_own_with_its_own_advantage(make_config):
    message = trainer_pb2.SettledGroup(prompt_ordinal=0)
    for index, rewards in enumerate(([0.5, 1.0, 0.0], [0.0, 0.0, 1.5])):
        each = in_roles(rewards)
        each.trajectory.sample.sample_index = index
        each.trajectory.body_digest = trajectory_digest(each.trajectory)
        message.members.append(each)
    group = read_group(message, SamplingSection(), 32)
    assert [[*branch.turns] for branch in group.members[0].samples] == [
        [Turn(1, 0.5, "asker", 0), Turn(1, 0.0, "asker", 2)],
        [Turn(2, 1.0, "teller", 1)],
    ]
    config = TrainerConfig.model_validate(
        make_config(algorithm={"group_size": 2, "options": {"normalize_std": False}})
    )
    state = StepState(version=Version(0, 0, 0, ""), lineage={0: 0, 1: 0})
    (prepared,) = Intake(config, build_algorithm(config.algorithm)).prepare(state, [group])
    assert [(each.tokens, each.trained, each.engine_log_probs) for each in prepared.samples[:2]] == [
        ([5, 6, 7, 8], [1, 3], [-6.0, -8.0]),
        ([9, 10, 11, 12], [2, 3], [-11.0, -12.0]),
    ]
    advantages = [each.advantages for each in prepared.samples]
    assert advantages == [[-0.5, -0.5], [0.5, 0.5], [0.5, 0.5], [-0.5, -0.5]]
    record = prepared.record
    assert (record.sequences, record.trained_sequences, record.tokens) == (2, 4, 8) and not record.all_equal
    assert record.rewards == (1.5, 1.5) and record.advantages == pytest.approx((0.0, 0.0))
