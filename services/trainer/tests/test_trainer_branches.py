"""Branches of a session: they are read apart, share one reward, and weigh as the option says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from headrace.trainer.v1 import trainer_pb2
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import SamplingSection
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.figures import witnesses
from headrace_trainer.learning.intake import Intake
from headrace_trainer.learning.reading import read_group
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Image, Sample, Trajectory
from headrace_trainer.learning.step import StepState, Version
from trainer_calls import random_sequences, settled_trajectory

STATE = StepState(version=Version(0, 0, 0, ""), lineage={0: 0})
ALONE = Trajectory(0, 1, "alone", 1.0, (Sample([1, 2, 3], [1, 2], [-1.0, -2.0], versions=[0, 0]),))
BOTH = Trajectory(
    1,
    1,
    "both",
    0.0,
    (
        Sample([1, 2, 3], [1], [-1.0], versions=[0]),
        Sample([1, 5, 6, 7], [2, 3], [-2.0, -3.0], versions=[0] * 2),
    ),
)
"""[1, 2, 3] with 2 sampled, then [1, 5, 6, 7] with 6 and 7."""


def sequences(make_config, **options):
    given = {"normalize_std": False, **options}
    config = TrainerConfig.model_validate(make_config(algorithm={"group_size": 2, "options": given}))
    intake = Intake(config, build_algorithm(config.algorithm))
    group = Group(0, (ALONE, BOTH), "digest")
    found = [[1.0, 2.0], [3.0], [4.0, 5.0]]
    names = build_algorithm(config.algorithm).columns
    rounds = SimpleNamespace(infer=lambda *_: [[dict.fromkeys(names, own) for own in found]])
    (prepared,) = intake.prepare(STATE, intake.inferred([group], rounds))
    return intake, group, prepared


def test_the_lines_of_a_session_are_read_apart_and_share_what_it_is_worth(make_config):
    _, _, prepared = sequences(make_config)
    assert [(each.tokens, each.trained) for each in prepared.samples] == [
        ([1, 2, 3], [1, 2]),
        ([1, 2, 3], [1]),
        ([1, 5, 6, 7], [2, 3]),
    ]
    assert [each.engine_log_probs for each in prepared.samples] == [[-1.0, -2.0], [-1.0], [-2.0, -3.0]]
    assert [each.advantages for each in prepared.samples] == [[0.5, 0.5], [-0.5], [-0.5, -0.5]], (
        "the group is of two sessions, whatever they are made of"
    )
    assert prepared.record.sequences == 2 and prepared.record.tokens == 5


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1.0, 0.5, 0.5]),
        ({"branch_weights": "whole"}, [1.0, 1.0, 1.0]),
        ({"loss_aggregation": "seq-mean-token-mean"}, [0.5, 0.5, 0.25]),
    ],
)
def test_a_session_weighs_no_more_for_having_branches_unless_each_is_to_count(make_config, options, weights):
    _, _, prepared = sequences(make_config, **options)
    assert [each.weight for each in prepared.samples] == weights


def test_columns_are_inferred_line_by_line(make_config):
    intake, group, prepared = sequences(make_config, epochs=2)
    assert [each.tokens for each in intake.bare(group)] == [[1, 2, 3], [1, 2, 3], [1, 5, 6, 7]]
    assert [each.columns["old_log_probs"] for each in prepared.samples] == [[1.0, 2.0], [3.0], [4.0, 5.0]]

    class Rounds:
        def infer(self, bare, names):
            return [
                [{name: [float(sum(each.tokens))] * len(each.trained) for name in names} for each in bare[0]]
            ]

    (inferred,) = intake.inferred([group], Rounds())
    found = [each.columns["old_log_probs"] for each in inferred.members[1].samples]
    assert found == [[6.0], [19.0, 19.0]]


def test_witnesses_of_the_engines_log_probs_are_lines():
    record = GroupRecord(0, "digest", (), Disposition.ACCUMULATED)
    state = StepState(version=Version(0, 0, 0, ""), lineage={0: 0}, groups={0: record})
    found = witnesses(state, [Group(0, (BOTH,), "digest")])
    assert [each.tokens for each in found] == [[1, 2, 3], [1, 5, 6, 7]]
    pictured = msgspec.structs.replace(ALONE.samples[0], images=(Image("digest", b"file"),))
    (found,) = witnesses(state, [Group(0, (replace(ALONE, samples=(pictured,)),), "digest")])
    assert found.images == pictured.images, "the engine has seen them"


def test_branches_come_with_prompts_of_their_own():
    message = trainer_pb2.SettledGroup(prompt_ordinal=0)
    trajectory = settled_trajectory(0, 0, 1, random_sequences(3)[1], 1)
    other = trajectory.branches.add()
    given = other.segments.add()
    given.tokens.token_ids.extend([4, 5])
    own = other.segments.add(policy_number=1)
    own.tokens.CopyFrom(trajectory.branches[0].segments[1].tokens)

    def read():
        trajectory.body_digest = trajectory_digest(trajectory)
        message.ClearField("members")
        message.members.add(trajectory=trajectory, reward=1.0)
        (member,) = read_group(message, SamplingSection(), 32).members
        return member

    _, found = read().samples
    assert found.tokens[:2] == [4, 5] and found.trained[0] == 2
    del other.segments[0]
    with pytest.raises(Refusal, match="the first id is sampled"):
        read()
