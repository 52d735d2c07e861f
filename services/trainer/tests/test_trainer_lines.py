"""Lines of sessions and roles, against plain Python: whose end bootstraps, whose baseline counts, what each weighs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Many

import pytest
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import SamplingSection
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, VALUES
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.intake import Intake, Prepared
from headrace_trainer.learning.passes import denominator
from headrace_trainer.learning.policies import part_of
from headrace_trainer.learning.reading import read_group
from headrace_trainer.learning.samples import Sample
from headrace_trainer.learning.step import StepState, Version

STATE = StepState(version=Version(1, 0, 0, ""), lineage={1: 0})
ONE = common_pb2.SamplingDistribution(temperature=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED)
SAMPLED = {"asker": 20, "teller": 30, "judge": 25}
"""Ids of each role, or of lines of a session, from here on, so that a value says whose it is."""
Turn = tuple[str, int, float]
"""Role, sampled tokens, reward."""


def talk(
    index: int, turns: Many[Turn], *, cut: int | None = None, plain: bool = False, temperature: float = 1.0
) -> trainer_pb2.SettledTrajectory:
    """A conversation of these turns in time; `plain`: of branches that are no roles. `cut` names one, -1 none here."""
    order = [*dict.fromkeys(role for role, _, _ in turns)]
    reason = common_pb2.FINISH_REASON_TERMINATED if cut is None else common_pb2.FINISH_REASON_LENGTH
    made = common_pb2.Trajectory(
        sample=common_pb2.SlotKey(sample_index=index), attempt=1, finish_reason=reason
    )
    for line, role in enumerate(order):
        branch = made.branches.add(cut=line == cut)
        branch.segments.add(tokens=common_pb2.TokenSegment(token_ids=[5, index]))
        for who, count, _ in turns:
            if who == role:
                tokens = common_pb2.TokenSegment(token_ids=[SAMPLED[role] + at for at in range(count)])
                tokens.log_probs.extend([-1.0] * count)
                tokens.distribution.CopyFrom(ONE)
                if role == order[-1]:
                    tokens.distribution.temperature = temperature
                branch.segments.add(policy_number=1, tokens=tokens)
                branch.segments.add(tokens=common_pb2.TokenSegment(token_ids=[6]))
    for role, count, _ in turns:
        place = len(made.conversation.messages)
        made.conversation.turns.add(message=place, branch=order.index(role), tokens=count)
        made.conversation.messages.add(role="assistant", party="" if plain else role)
    made.body_digest = trajectory_digest(made)
    rewards = [reward for _, _, reward in turns]
    return trainer_pb2.SettledTrajectory(trajectory=made, reward=math.fsum(rewards), turn_rewards=rewards)


class Values:
    """Infers the last read id as value, and log-probs of -1."""

    def infer(self, groups: Many[list[Sample]], names: Many[str]) -> list[list[dict[str, list[float]]]]:
        def of(each: Sample, name: str) -> list[float]:
            return [float(each.tokens[at - 1]) if name == VALUES else -1.0 for at in each.trained]

        return [[{name: of(each, name) for name in names} for each in group] for group in groups]


def learned(
    make_config,
    name: str,
    members: Many[trainer_pb2.SettledTrajectory],
    policy: str | None = None,
    **options: object,
) -> Prepared:
    """What becomes of a group; `policy`: of its part of it, the teller's being the tutor's."""
    given = {"name": name, "group_size": max(2, len(members)), "options": options}
    config = TrainerConfig.model_validate(make_config(algorithm=given))
    algorithm = build_algorithm(config.algorithm)
    message = trainer_pb2.SettledGroup(members=members)
    group = read_group(message, SamplingSection(), 64, by_turn=options.get("credit") == "turn")
    if policy is not None:
        group = part_of(group, policy, {"teller": "tutor"})
    intake = Intake(config, algorithm)
    (prepared,) = intake.prepare(STATE, [*intake.inferred([group], Values())])
    return prepared


def by_line(prepared: Prepared, sample: int) -> dict[int, list[float]]:
    """Advantages of a sample's lines, by the first id that was sampled in each."""
    return {
        each.tokens[each.trained[0]]: each.advantages
        for each in prepared.samples
        if each.tokens[each.trained[0] - 1] == sample or sample in each.tokens[:2]
    }


PPO = {"whiten": False, "bootstrap_truncated": True, "gamma": 1.0, "lam": 1.0}


@pytest.mark.parametrize(("cut", "told"), [("asker", 0), ("teller", 1), ("", -1)])
def test_a_cut_conversation_goes_on_by_the_value_at_the_end_of_the_line_that_was_cut(make_config, cut, told):
    """Of the role that was cut; the other role has ended."""
    turns: list[Turn] = [("asker", 2, 0.5), ("teller", 3, 0.25)]
    turns += [("asker", 1, 0.0)] if cut == "asker" else [("teller", 2, 0.0)]
    found = by_line(learned(make_config, "ppo", [talk(0, turns, cut=told)], **PPO), 0)
    # Behind the last sampled id of a line stands a given 6: the value of the end is what is read there.
    for role, reward in (("asker", 0.5), ("teller", 0.25)):
        worth = reward + (6.0 if role == cut else 0.0)
        first = SAMPLED[role]
        ends = [count for who, count, _ in turns if who == role]
        expected, place = [], 0
        for count in ends:
            expected += [worth - _value(first, at, place) for at in range(count)]
            place += count
        assert found[first] == pytest.approx(expected), role


def _value(first: int, at: int, before: int) -> float:
    """What is read before a turn's `at`-th id: the id before it, or what was given."""
    if at:
        return float(first + at - 1)
    return 6.0 if before else 0.0


@pytest.mark.parametrize(("line", "end"), [(0, 6.0), (1, 6.0), (-1, 0.0)])
def test_a_session_that_was_cut_bootstraps_from_the_line_that_it_says(make_config, line, end):
    """All its lines share its reward, and what would have followed the cut one."""
    asked: list[list[Sample]] = []

    class Seen(Values):
        def infer(self, groups, names):
            asked.extend(groups)
            return super().infer(groups, names)

    turns: list[Turn] = [("asker", 2, 1.0), ("teller", 1, 0.0)]
    message = trainer_pb2.SettledGroup(
        members=[talk(0, turns, plain=True, cut=line), talk(1, turns, plain=True)]
    )
    config = TrainerConfig.model_validate(make_config(algorithm={"name": "ppo", "options": PPO}))
    intake = Intake(config, build_algorithm(config.algorithm))
    group = read_group(message, SamplingSection(), 64)
    (inferred,) = intake.inferred([group], Seen())
    read = [len(each.trained) for each in asked[0]]
    assert read == [2 + (line == 0), 1 + (line == 1), 2, 1]
    assert [each.following for each in inferred.members] == [end, 0.0]
    (prepared,) = intake.prepare(STATE, [inferred])
    first, second = prepared.samples[:2]
    assert first.advantages == pytest.approx([1.0 + end - 0.0, 1.0 + end - 20.0])
    assert second.advantages == pytest.approx([1.0 + end - 0.0])


def test_a_role_that_the_greedy_sample_has_not_heard_has_no_baseline_and_learns_nothing(make_config):
    """As a role of the run's policy, and as one that another policy plays: then the greedy sample is not there."""
    asker, teller = ("asker", 1, 0.25), ("teller", 2, 0.5)
    members = [talk(0, [asker]), talk(1, [("asker", 1, 1.0), teller]), talk(2, [asker, ("teller", 1, -1.0)])]
    found = learned(make_config, "remax", members)
    assert by_line(found, 1) == {20: [0.75], 30: [0.0, 0.0]} and by_line(found, 2) == {20: [0.0], 30: [0.0]}
    assert not learned(make_config, "remax", members, "tutor").samples
    asked = learned(make_config, "remax", members, "")
    assert by_line(asked, 1) == {20: [0.75]}


def test_a_role_has_the_reward_of_its_own_greedy_answers_for_a_baseline(make_config):
    members = [
        talk(0, [("asker", 1, 0.25), ("teller", 1, 0.5), ("asker", 1, 0.25)]),
        talk(1, [("asker", 1, 1.0), ("teller", 2, 0.0)]),
    ]
    for policy, wanted in (
        (None, {20: [0.5], 30: [-0.5, -0.5]}),
        ("", {20: [0.5]}),
        ("tutor", {30: [-0.5, -0.5]}),
    ):
        assert by_line(learned(make_config, "remax", members, policy), 1) == wanted


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "ppo"])
def test_a_batch_is_whitened_within_each_role(make_config, name):
    """Roles that earn on scales of their own: a judge hundreds, an asker ones."""
    spoken = [[(1, 1.0), (2, 300.0)], [(2, 0.0), (1, 100.0)], [(1, 2.0), (1, 500.0)]]
    members = [talk(index, [("asker", *one), ("judge", *other)]) for index, (one, other) in enumerate(spoken)]
    found = learned(make_config, name, members)
    for role, place in (("asker", 0), ("judge", 1)):
        first, raw = SAMPLED[role], []
        rewards = [each[place][1] for each in spoken]
        centre = statistics.fmean(rewards) if name == "reinforce_pp_baseline" else 0.0
        for index, each in enumerate(spoken):
            read = [float(index), *(float(first + at) for at in range(each[place][0] - 1))]
            raw += [rewards[index] - centre - (value if name == "ppo" else 0.0) for value in read]
        mean, spread = statistics.fmean(raw), math.sqrt(statistics.variance(raw) + 1e-8)
        whitened = [(each - mean) / spread for each in raw]
        for index, each in enumerate(spoken):
            count = each[place][0]
            assert by_line(found, index)[first] == pytest.approx(whitened[:count])
            whitened = whitened[count:]


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


@pytest.mark.parametrize("weights", ["divide", "whole"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_branches_are_a_mean(make_config, aggregation, weights):
    """Over a step they add up to 1; of token sums, to the mean length of what counts as a sequence."""
    sessions: list[list[Turn]] = [
        [("asker", 3, 1.0), ("teller", 1, 0.0), ("judge", 2, 0.0)],
        [("asker", 2, 0.0)],
        [("asker", 1, 0.5), ("judge", 4, 0.0)],
    ]
    members = [talk(index, turns, plain=True) for index, turns in enumerate(sessions)]
    options = {"loss_aggregation": aggregation, "branch_weights": weights}
    prepared = learned(make_config, "rloo", members, **options)
    algorithm = build_algorithm(TrainerConfig.model_validate(
        make_config(algorithm={"name": "rloo", "options": options})
    ).algorithm)  # fmt: skip
    divisor = denominator(algorithm, [prepared.record])
    total = math.fsum(each.weight * len(each.trained) for each in prepared.samples) / divisor
    shares = [1 / len(turns) if weights == "divide" else 1.0 for turns in sessions for _ in turns]
    lengths = [count for turns in sessions for _, count, _ in turns]
    tokens = math.fsum(share * length for share, length in zip(shares, lengths, strict=True))
    wanted = tokens / math.fsum(shares) if aggregation == "seq-mean-token-sum" else 1.0
    assert total == pytest.approx(wanted)
    by_session = [
        [each.weight for each in prepared.samples[start:end]] for start, end in ((0, 3), (3, 4), (4, 6))
    ]
    if aggregation == "token-mean":
        assert [set(own) for own in by_session] == [{share} for share in (
            (1 / 3, 1.0, 0.5) if weights == "divide" else (1.0, 1.0, 1.0)
        )]  # fmt: skip


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("name", ["reinforce", "rloo", "ppo"])
def test_credit_by_turn_follows_time_over_the_lines_of_a_session(make_config, name, discount):
    """A session asks once, its helper answers on a line of its own, and what the session then says earns 1."""
    members = []
    for index, reward in enumerate((1.0, 0.0)):
        turns: list[Turn] = [("asker", 1, 0.0), ("teller", 1, 0.25), ("asker", 1, reward)]
        members.append(talk(index, turns, plain=True))
    options: dict[str, object] = {"credit": "turn", "turn_discount": discount}
    if name == "ppo":
        options |= {"whiten": False, "gamma": 1.0, "lam": 1.0}
    found = learned(make_config, name, members, **options)
    last, helper = 1.0, 0.25 + discount
    wanted = {20: [discount * helper, last], 30: [helper]}
    if name == "ppo":  # what is read before each of these ids is its value
        wanted = {20: [discount * helper, last - 6.0], 30: [helper]}
    if name == "rloo":  # the other session has earned 0.25 by its helper alone
        wanted = {20: [discount * (helper - 0.25), last], 30: [helper - 0.25]}
    assert {key: pytest.approx(value) for key, value in wanted.items()} == by_line(found, 0)
    members[0].trajectory.conversation.turns[1].branch = 2
    members[0].trajectory.body_digest = trajectory_digest(members[0].trajectory)
    with pytest.raises(Refusal, match="turn 1 is in branch 2, and there are 2"):
        learned(make_config, name, members, **options)


def test_the_part_of_a_policy_keeps_the_temperature_of_each_of_its_tokens(make_config):
    members = [talk(index, [("asker", 2, 1.0), ("teller", 1, 1.0)], temperature=0.5) for index in range(2)]
    for policy, wanted in (("", []), ("tutor", [0.5])):  # none: all at the run's
        prepared = learned(make_config, "reinforce", members, policy, credit="trajectory")
        assert [each.temperatures for each in prepared.samples] == [wanted, wanted]


def test_columns_that_are_given_go_to_their_own_lines(make_config):
    """The infer pass reads one id further in the cut line alone, and every column keeps its line."""
    turns: list[Turn] = [("asker", 2, 1.0), ("teller", 3, 0.0), ("asker", 1, 0.0)]
    prepared = learned(make_config, "ppo", [talk(0, turns, cut=0)], **PPO, epochs=2)
    found = {each.tokens[each.trained[0]]: each.columns for each in prepared.samples}
    assert found[20][VALUES] == [0.0, 20.0, 6.0] and found[30][VALUES] == [0.0, 30.0, 31.0]
    assert found[20][OLD_LOG_PROBS] == [-1.0] * 3 and REFERENCE_LOG_PROBS not in found[20]
