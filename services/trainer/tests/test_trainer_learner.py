"""What becomes of groups: stale, not finite, masked, all equal, larger than a micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms.group_relative import Grpo
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.learner import Learner
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Disposition, Sample


class FakeRounds:
    """A trainer group without a model: micro rounds go to a function, gradients always hold."""

    shares_prefixes = True
    costs = Costs()

    def __init__(self, micro, replicas, config):
        self._micro = micro
        self.replicas, self.micro_batch_tokens = replicas, config.trainer.micro_batch_tokens

    def micro(self, work):
        return [self._micro(each) for each in work]

    def holds(self):
        return True


@pytest.fixture
def opened():
    state = steps.restored(steps.StepState(), steps.Version(1, 0, 0), {})
    state = steps.restored(state, steps.Version(5, 1, 1), {1: 0})
    return steps.begin(state, steps.Begin(1, 1, 5, 6))[0]


@pytest.fixture
def make_learner(make_config):
    def make(finite=lambda work: True, replicas=1, **sections):
        config = TrainerConfig.model_validate(make_config(**sections))
        rounds = []

        def run_round(work):
            rounds.append(work)
            return finite(work)

        learner = Learner(config, build_algorithm(config.algorithm), FakeRounds(run_round, replicas, config))
        return learner, rounds

    return make


def dispositions(state):
    return {prompt: record.disposition for prompt, record in state.groups.items()}


def test_stale_and_foreign_versions_stay_outside(opened, make_learner, make_group):
    learner, rounds = make_learner()
    state = learner.learn(
        opened, [make_group(0, version=5), make_group(1, version=1), make_group(2, version=3)]
    )
    assert dispositions(state) == {0: Disposition.ACCUMULATED, 1: Disposition.STALE, 2: Disposition.STALE}
    assert "lags 1 steps" in state.groups[1].detail and "no live ancestor" in state.groups[2].detail
    assert len(rounds) == 1 and len(rounds[0][0]) == 1


def test_non_finite_values_stay_outside(opened, make_learner, make_group):
    learner, rounds = make_learner()
    rewards = [1.0, float("nan"), 0.0, 0.0]
    state = learner.learn(opened, [make_group(0, version=5, rewards=rewards)])
    assert dispositions(state) == {0: Disposition.NONFINITE} and not rounds


def test_a_non_finite_round_is_split_until_the_culprit_is_alone(opened, make_learner, make_group):
    groups = [make_group(prompt, version=5) for prompt in range(3)]
    bad = groups[1].members[0].samples[0].tokens

    def finite(work):
        return all(s.tokens[:9] != bad[:9] for rows in work for row in rows for s in row)

    learner, rounds = make_learner(finite)
    state = learner.learn(opened, groups)
    assert dispositions(state)[1] is Disposition.NONFINITE
    assert [record.prompt_ordinal for record in state.accumulated] == [0, 2]
    assert len(rounds) == 4 and not state.tainted


def test_a_part_inside_the_accumulators_taints_the_attempt(opened, make_learner, make_group):
    calls = iter([True, False, True, True, True])
    learner, _ = make_learner(lambda work: next(calls), trainer={"micro_batch_tokens": 12})
    state = learner.learn(opened, [make_group(0, version=5)])
    assert dispositions(state) == {0: Disposition.NONFINITE}
    assert "part of it" in state.tainted


def test_equal_rewards_count_and_are_not_computed(opened, make_learner, make_group):
    learner, rounds = make_learner()
    state = learner.learn(opened, [make_group(0, version=5, rewards=[1.0] * 4)])
    record = state.groups[0]
    assert record.all_equal and record.tokens > 0 and record.disposition is Disposition.ACCUMULATED
    assert not rounds


def test_a_loss_with_other_terms_computes_tokens_without_an_advantage(
    opened, make_learner, make_group, monkeypatch
):
    monkeypatch.setattr(Grpo, "every_token", True)
    learner, rounds = make_learner()
    learner.learn(opened, [make_group(0, version=5, rewards=[1.0] * 4)])
    assert [s.advantages for s in rounds[0][0][0]] == [[0.0] * len(s.trained) for s in rounds[0][0][0]]


def test_masked_and_truncated_answers_carry_no_loss(opened, make_learner, make_group):
    group = make_group(0, version=5)
    members = (
        replace(group.members[0], masked=True),
        replace(group.members[1], truncated=True),
        *group.members[2:],
    )
    learner, rounds = make_learner(algorithm={"truncated": "mask"})
    record = learner.learn(opened, [replace(group, members=members)]).groups[0]
    assert (record.sequences, record.trained_sequences) == (4, 2)
    assert record.tokens == sum(member.sampled for member in members[2:])
    assert sum(record.tokens_by_version.values()) == record.tokens
    assert len(rounds[0][0][0]) == 2
    keeping, _ = make_learner(algorithm={"truncated": "keep"})
    assert keeping.learn(opened, [replace(group, members=members)]).groups[0].trained_sequences == 3


def test_the_greedy_first_answer_is_a_baseline_and_no_sample(opened, make_learner, make_group):
    learner, rounds = make_learner(algorithm={"name": "remax"})
    group = make_group(0, version=5, rewards=[0.25, 1.0, 0.25, 0.0])
    record = learner.learn(opened, [group]).groups[0]
    assert (record.sequences, record.trained_sequences) == (4, 3)
    assert record.rewards == (1.0, 0.25, 0.0)
    assert record.answer_lengths == tuple(member.sampled for member in group.members[1:])
    learned = [(s.tokens, set(s.advantages)) for s in rounds[0][0][0]]
    expected = zip(group.members[1:], ({0.75}, {0.0}, {-0.25}), strict=True)
    assert sorted(learned, key=str) == sorted([(m.samples[0].tokens, own) for m, own in expected], key=str)


def test_an_exchange_is_shaped_by_its_longest_turn(opened, make_learner, make_group):
    """The limit of an answer's tokens is each turn's: two turns of three are no answer of six."""
    group = make_group(0, version=5, rewards=[1.0, 0.0, 1.0, 0.0])
    members = []
    for member in group.members:
        trained = [3, 4, 5] if member.sample_index else [3, 4, 5, 8, 9, 10]
        told = [-1.0] * len(trained)
        branch = Sample(list(range(3, 15)), trained, told, versions=[5] * len(told))
        members.append(replace(member, samples=(branch,)))
    found = []
    for options in ({}, {"overlong_buffer": 2}):
        algorithm = {"name": "dapo", "options": options}
        learner, rounds = make_learner(algorithm=algorithm, sampling={"max_new_tokens": 5})
        learner.learn(opened, [replace(group, members=tuple(members))])
        found.append([s.advantages for work in rounds for rows in work for row in rows for s in row])
    assert found[0] == found[1]


def test_an_answer_is_long_by_the_limit_of_its_step_s_stage(opened, make_learner, make_group):
    """Of 6 tokens at a limit of 6 in a stage that has not ended, and of one that has: then 60."""
    found = []
    for until in (opened.begun.step, opened.begun.step + 1):
        stages = [{"until_step": until, "max_new_tokens": 6}] if until else []
        sampling = {"max_new_tokens": 60, "stages": stages}
        learner, rounds = make_learner(
            algorithm={"name": "dapo", "options": {"overlong_buffer": 6}}, sampling=sampling, steps=99
        )
        learner.learn(opened, [make_group(0, version=5, rewards=[1.0, 0.0, 1.0, 0.0])])
        found.append([s.advantages for work in rounds for rows in work for row in rows for s in row])
    assert found[0] != found[1]


def test_ranks_share_the_micro_batches_of_a_round(opened, make_learner, make_group):
    learner, rounds = make_learner(replicas=2, trainer={"micro_batch_tokens": 32})
    learner.learn(opened, [make_group(prompt, version=5) for prompt in range(3)])
    assert all(len(work) == 2 for work in rounds)
    sequences = [s for work in rounds for rows in work for row in rows for s in row]
    assert len(sequences) == 12


def test_deterministic_packs_one_group_at_a_time_in_order(opened, make_learner, make_group):
    learner, rounds = make_learner(deterministic=True)
    groups = [make_group(prompt, version=5) for prompt in (2, 0, 1)]
    learner.learn(opened, groups)
    starts = [work[0][0][0].tokens[:9] for work in rounds]
    assert starts == [groups[index].members[0].samples[0].tokens[:9] for index in (1, 2, 0)]


def test_columns_are_inferred_once_for_each_group_and_reach_advantages_and_loss(
    opened, make_learner, make_group, monkeypatch
):
    monkeypatch.setattr(Grpo, "columns", ("old_log_probs", "reference_log_probs"))
    learner, rounds = make_learner()
    asked, seen = [], []

    def infer(groups, columns):
        asked.append(([len(group) for group in groups], tuple(columns)))
        return [[{name: [float(len(name))] * len(s.trained) for name in columns} for s in g] for g in groups]

    def advantages(self, outcomes):
        seen.append(outcomes)
        return outcomes.mask_BT.double()

    learner._rounds.infer = infer
    monkeypatch.setattr(Grpo, "advantages", advantages)
    masked = make_group(0, version=5)
    masked = replace(masked, members=(replace(masked.members[0], masked=True), *masked.members[1:]))
    state = learner.learn(opened, [masked, make_group(1, version=5)])
    learner.learn(state, [masked])
    assert asked == [([3, 4], ("old_log_probs", "reference_log_probs"))]
    reference_BT = seen[0].columns_BT["reference_log_probs"]
    assert reference_BT.equal(19.0 * seen[0].mask_BT) and not reference_BT[0].any()
    sequences = [s for work in rounds for rows in work for row in rows for s in row]
    assert len(sequences) == 7
    for sequence in sequences:
        # One pass: the old log-probs are the forward's own, so that the ratio is exactly 1.
        assert sequence.columns == {"reference_log_probs": [19.0] * len(sequence.trained)}


def test_a_column_that_is_not_finite_keeps_its_group_alone_outside(
    opened, make_learner, make_group, monkeypatch
):
    monkeypatch.setattr(Grpo, "columns", ("reference_log_probs",))
    learner, rounds = make_learner()
    bad = make_group(0, version=5)
    learner._rounds.infer = lambda groups, _: [
        [
            {
                "reference_log_probs": [float("inf" if s.tokens == bad.members[2].samples[0].tokens else 1)]
                * len(s.trained)
            }
            for s in group
        ]
        for group in groups
    ]
    state = learner.learn(opened, [bad, make_group(1, version=5)])
    assert dispositions(state) == {0: Disposition.NONFINITE, 1: Disposition.ACCUMULATED} and not state.tainted
    assert len([s for work in rounds for rows in work for row in rows for s in row]) == 4
