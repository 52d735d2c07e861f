"""Learning from the whole batch: several passes, their order, what they leave behind when something is not finite."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import Barrier
from headrace_trainer.algorithms.group_relative import Grpo
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.errors import Quiesced, Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.learner import BatchLearner
from headrace_trainer.learning.passes import Finished, OptimizerStep
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.policies import Learning, finish
from headrace_trainer.learning.samples import Disposition

PASSES = {"epochs": 2, "minibatches": 2}


class RecordedRounds:
    """A trainer group without a model, which keeps the rounds: ("micro", prompts) and so on."""

    shares_prefixes = True
    costs, micro_batch_tokens = Costs(), 512
    replicas = 1

    def __init__(self, bad=(), kl=0.0, lapse_at=0):
        self.rounds = []
        self._bad, self._kl, self._lapse_at = bad, kl, lapse_at

    def _see(self, kind, *what):
        self.rounds.append((kind, *what))
        if len(self.rounds) == self._lapse_at:
            raise Quiesced("the lease lapsed")

    def micro(self, work):
        return [self._micro(each) for each in work]

    def _micro(self, work):
        self._see("micro", work)
        return not any(s.tokens in self._bad for rows in work for row in rows for s in row)

    def holds(self):
        return True

    def infer(self, groups, columns):
        self._see("infer", len(groups))
        return [[{name: [-1.0] * len(s.trained) for name in columns} for s in group] for group in groups]

    def apply(self, denominator, rate, critic_rate):
        self._see("apply", denominator)
        sums = {"tokens": 10.0, "own.approx_kl": 10.0 * self._kl, "loss": 2.0, "entropy": 5.0}
        sums |= {"engine_tokens": 10.0, "mismatch": 1.0, "own.clip_fraction": 5.0}
        return CommitReport(True, 1.0, sums, {"mismatch": 0.5})

    def hold(self):
        self._see("hold")

    def end_hold(self, *, back):
        self._see("release", back)

    def drop(self):
        self._see("drop")

    def kinds(self):
        return [kind for kind, *_ in self.rounds]

    def minibatches(self):
        """The prompts' first tokens of each optimizer step, in order."""
        found, open_ = [], set()
        for kind, *what in self.rounds:
            if kind == "micro":
                open_ |= {tuple(s.tokens[:9]) for rows in what[0] for row in rows for s in row}
            if kind == "apply":
                found.append(frozenset(open_))
                open_ = set()
        return found


class Alone(Learning):
    """The only policy of its run."""

    def learn(self, state, groups):
        return self.learner.learn(state, groups)

    def finish(self, state):
        finished, self.made = finish([self], self.rounds, state)
        return finished


@pytest.fixture
def make_learner(make_config):
    def make(rounds, options=None, **sections):
        sections["algorithm"] = {"options": PASSES if options is None else options, "prompts_per_step": 4}
        config = TrainerConfig.model_validate(make_config(**sections))
        algorithm = build_algorithm(config.algorithm)
        return Alone("", config, algorithm, BatchLearner(config, algorithm, rounds), rounds)

    return make


def begun(step=1):
    state = steps.restored(steps.StepState(), steps.Version(5, 1, step), {1: 0})
    return steps.begin(state, steps.Begin(step, 1, 5, 6))[0]


def start(group):
    return tuple(group.members[0].samples[0].tokens[:9])


def test_every_epoch_learns_from_every_group_once_in_minibatches(make_learner, make_group):
    rounds = RecordedRounds()
    learner = make_learner(rounds)
    groups = [make_group(prompt, version=5) for prompt in range(4)]
    state = learner.learn(begun(), groups)
    assert rounds.kinds() == ["infer"], "nothing moves before the commit"
    finished = learner.finish(state)
    assert finished.finite and [step.epoch for step in finished.steps] == [0, 0, 1, 1]
    minibatches = rounds.minibatches()
    assert [len(each) for each in minibatches] == [2, 2, 2, 2]
    every = {start(group) for group in groups}
    assert minibatches[0] | minibatches[1] == every and minibatches[2] | minibatches[3] == every
    assert rounds.rounds[1] == ("hold",) and rounds.rounds[-1] == ("release", False)
    sequences = [s for kind, *what in rounds.rounds if kind == "micro" for row in what[0][0] for s in row]
    assert all(s.columns["old_log_probs"] == [-1.0] * len(s.trained) for s in sequences)


def test_an_optimizer_step_is_divided_by_its_minibatch(make_learner, make_group):
    rounds = RecordedRounds()
    learner = make_learner(rounds)
    groups = [make_group(prompt, version=5) for prompt in range(4)]
    learner.finish(learner.learn(begun(), groups))
    tokens = {start(group): sum(m.sampled for m in group.members) for group in groups}
    divisors = [what[0] for kind, *what in rounds.rounds if kind == "apply"]
    assert divisors == [sum(tokens[each] for each in minibatch) for minibatch in rounds.minibatches()]


def test_the_order_follows_seed_step_and_epoch_and_not_the_arrival(make_learner, make_group):
    def order(prompts, step=1, seed=1):
        rounds = RecordedRounds()
        learner = make_learner(rounds, {"epochs": 4, "minibatches": 2}, seed=seed)
        state = begun(step)
        for prompt in prompts:
            state = learner.learn(state, [make_group(prompt, version=5)])
        learner.finish(state)
        return rounds.minibatches()

    first = order([0, 1, 2, 3])
    assert order([3, 1, 0, 2]) == first
    assert order([0, 1, 2, 3], step=2) != first != order([0, 1, 2, 3], seed=2)
    assert len(set(first[::2])) > 1, "epochs differ"


def test_fewer_groups_than_minibatches_make_no_empty_steps(make_learner, make_group):
    rounds = RecordedRounds()
    learner = make_learner(rounds, {"minibatches": 3})
    learner.finish(learner.learn(begun(), [make_group(0, version=5)]))
    assert rounds.kinds().count("apply") == 1


@pytest.mark.parametrize(("kl", "applied"), [(0.05, 6), (0.2, 2)])
def test_target_kl_ends_the_passes_after_a_whole_epoch(make_learner, make_group, kl, applied):
    rounds = RecordedRounds(kl=kl)
    learner = make_learner(rounds, {"epochs": 3, "minibatches": 2, "target_kl": 0.1})
    groups = [make_group(prompt, version=5) for prompt in range(4)]
    finished = learner.finish(learner.learn(begun(), groups))
    assert finished.finite and len(finished.steps) == applied
    assert rounds.kinds()[-1] == "release"


def test_a_loss_that_is_not_finite_gives_the_base_back_and_names_its_groups(make_learner, make_group):
    groups = [make_group(prompt, version=5) for prompt in range(4)]
    rounds = RecordedRounds(bad=[groups[2].members[0].samples[0].tokens])
    learner = make_learner(rounds)
    state = learner.learn(begun(), groups)
    finished = learner.finish(state)
    assert not finished.finite and list(finished.suspects) == [groups[2].digest]
    assert rounds.rounds[-1] == ("release", True)
    command = steps.Commit(1, 1, 5, 6, "", "")
    reply = steps.CommitReply(steps.Result.NONFINITE)
    learner.learner.reset()
    again, _ = steps.begin(steps.refused(state, command, reply, finished.suspects), steps.Begin(1, 2, 5, 7))
    again = learner.learn(again, groups)
    assert again.groups[2].disposition is Disposition.NONFINITE and not again.tainted
    assert [record.prompt_ordinal for record in again.accumulated] == [0, 1, 3]
    assert learner.finish(again).finite


def test_a_log_prob_that_is_not_finite_keeps_its_group_outside(make_learner, make_group):
    rounds = RecordedRounds()
    rounds.infer = lambda groups, _: [
        [{"old_log_probs": [float("nan")] * len(s.trained)} for s in group] for group in groups
    ]
    state = make_learner(rounds).learn(begun(), [make_group(0, version=5)])
    assert state.groups[0].disposition is Disposition.NONFINITE
    assert "the old_log_probs column is not finite" in state.groups[0].detail


@pytest.mark.parametrize("lapse_at", [3, 5])
def test_a_lapsed_lease_between_passes_gives_the_base_back_for_another_try(
    make_learner, make_group, lapse_at
):
    rounds = RecordedRounds(lapse_at=lapse_at)
    learner = make_learner(rounds)
    state = learner.learn(begun(), [make_group(prompt, version=5) for prompt in range(4)])
    with pytest.raises(Quiesced):
        learner.finish(state)
    assert rounds.rounds[-1] == ("release", True)
    assert learner.finish(state).finite


def test_a_batch_barrier_gives_advantages_the_whole_batch(make_learner, make_group, monkeypatch):
    seen = []

    def advantages(self, outcomes):
        seen.append(outcomes)
        whitened_B = (outcomes.rewards_B - outcomes.rewards_B.mean()) / outcomes.rewards_B.std()
        return whitened_B[:, None] * outcomes.mask_BT

    monkeypatch.setattr(Grpo, "compares", Barrier.BATCH)
    monkeypatch.setattr(Grpo, "advantages", advantages)
    rounds = RecordedRounds()
    learner = make_learner(rounds, {}, sampling={"max_new_tokens": 9})
    groups = [make_group(0, version=5), make_group(1, version=5, rewards=[1.0] * 4)]
    masked = replace(groups[0].members[1], masked=True)
    groups[0] = replace(groups[0], members=(groups[0].members[0], masked, *groups[0].members[2:]))
    state = learner.learn(begun(), groups[1:])
    state = learner.learn(state, groups[:1])
    assert learner.finish(state).finite
    [outcomes] = seen
    assert outcomes.groups_B.tolist() == [0] * 4 + [1] * 4 and outcomes.longest == 9
    assert outcomes.rewards_B.tolist() == [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0]
    answers = [member.sampled for group in groups for member in group.members]
    assert outcomes.lengths_B.tolist() == answers
    assert outcomes.mask_BT.sum(1).tolist() == [n if i != 1 else 0 for i, n in enumerate(answers)]
    [work] = [what[0] for kind, *what in rounds.rounds if kind == "micro"]
    lengths = Counter(len(s.trained) for row in work[0] for s in row)
    assert sum(lengths.values()) == 7, "equal rewards of one group are worth something in the batch"
    assert rounds.kinds() == ["micro", "apply"], (
        "one optimizer step needs no old log-probs and nothing to go back to"
    )


def test_figures_add_up_over_passes_and_compare_the_base_with_the_engine_once(make_learner, make_group):
    rounds = RecordedRounds()
    learner = make_learner(rounds)
    state = learner.learn(begun(), [make_group(prompt, version=5) for prompt in range(4)])
    assert learner.finish(state).finite
    figures = learner.made
    assert figures["optimizer_steps"] == 4 and figures["clip_fraction"] == 0.5 and figures["entropy"] == 0.5
    assert figures["log_prob_compared_tokens"] == 20 and figures["log_prob_mismatch_mean"] == pytest.approx(
        0.1
    )


def test_a_step_is_torn_only_where_a_policy_has_moved_and_another_cannot(make_config):
    config = TrainerConfig.model_validate(make_config())

    def policy(name, finite):
        done = Finished([OptimizerStep(CommitReport(finite, 1.0), 1.0)], finite)
        learner = SimpleNamespace(finish=lambda *_: done)
        return Learning(name, config, build_algorithm(config.algorithm), learner, RecordedRounds())

    finished, _ = finish([policy("", False), policy("tutor", True)], RecordedRounds(), begun())
    assert not finished.finite
    with pytest.raises(Refusal, match="its norm is not"):
        finish([policy("", True), policy("tutor", False)], RecordedRounds(), begun())
