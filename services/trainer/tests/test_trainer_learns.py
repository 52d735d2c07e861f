"""Every algorithm moves a policy toward reward: a table of logits under the real learners, from groups to steps.

The task: each prompt wants a token of its own at every place of an answer, whose length is drawn; an answer's reward is
the share of such tokens. A wrong sign anywhere between the reward and the optimizer lets the policy forget instead.
"""

from __future__ import annotations

import random

import pytest
import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import _BUILT_IN, build_algorithm
from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    VALUES,
    Advantages,
    Barrier,
    TokenBatch,
)
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Group, Sample, Trajectory

PROMPTS, PLACES, WORDS, SAMPLES = 4, 4, 5, 8
START = 1 / WORDS
PASSES = {"epochs": 2, "minibatches": 2}
OPTIONS = {
    "dr_grpo": {"norm_length": PLACES},
    "clip_cov": {"cov_fraction": 0.05, "cov_low": 0.1},
    "kl_cov": {"cov_fraction": 0.05},
    "ppo": {"critic_lr": 0.2},
}
"""Options beside the passes; every built-in algorithm is tried, with these or without any."""


class Table:
    """Logits of each prompt's places, values of the same, and a frozen reference: see `StepRounds`."""

    shares_prefixes, replicas = False, 1
    costs, micro_batch_tokens = Costs(), 512

    def __init__(self, algorithm, lr=0.1):
        self.logits = torch.zeros(PROMPTS, PLACES, WORDS, requires_grad=True)
        self.values = torch.zeros(PROMPTS, PLACES, requires_grad=True)
        self.reference = torch.zeros(PROMPTS, PLACES, WORDS)
        self.steps = 0
        self._algorithm = algorithm
        self._adam = torch.optim.Adam(
            [{"params": [self.logits], "lr": lr}, {"params": [self.values], "lr": 2 * lr}]
        )

    def log_probs(self, logits, sequence):
        prompt, answer = sequence.tokens[0], sequence.tokens[1:]
        return logits.log_softmax(-1)[prompt, range(len(answer)), answer]

    def columns(self, sequence):
        prompt, length = sequence.tokens[0], len(sequence.trained)
        return {
            OLD_LOG_PROBS: self.log_probs(self.logits, sequence).tolist(),
            REFERENCE_LOG_PROBS: self.log_probs(self.reference, sequence).tolist(),
            VALUES: self.values[prompt, :length].tolist(),
        }

    def infer(self, groups, names):
        return [[{name: self.columns(s)[name] for name in names} for s in group] for group in groups]

    def micro(self, work):
        for each in work:
            sequences = [s for rows in each for row in rows for s in row]
            if sequences:
                self._algorithm.loss(self._batch(sequences)).loss.backward()
        return [True] * len(work)

    def _batch(self, sequences):
        log_probs_K = torch.cat([self.log_probs(self.logits, s) for s in sequences])
        columns_K = {
            name: torch.tensor([value for s in sequences for value in s.columns[name]])
            for name in (*self._algorithm.columns, RETURNS)
            if all(name in s.columns for s in sequences)
        }
        lengths = [len(s.trained) for s in sequences]
        chances = [self.logits.softmax(-1)[s.tokens[0], : len(s.trained)] for s in sequences]
        return TokenBatch(
            log_probs_K=log_probs_K,
            old_log_probs_K=columns_K.get(OLD_LOG_PROBS, log_probs_K.detach()),
            engine_log_probs_K=torch.tensor([value for s in sequences for value in s.engine_log_probs]),
            advantages_K=torch.tensor([value for s in sequences for value in s.advantages]),
            weights_K=torch.tensor([s.weight for s in sequences for _ in s.trained]),
            sequences_K=torch.repeat_interleave(torch.tensor(lengths)),
            columns_K=columns_K,
            entropy_K=-torch.cat([(each * each.log()).sum(-1) for each in chances]),
            values_K=torch.cat([self.values[s.tokens[0], : len(s.trained)] for s in sequences]),
        )

    def holds(self):
        return True

    def apply(self, denominator, rate, critic_rate):
        for parameter in (self.logits, self.values):
            if parameter.grad is not None:
                parameter.grad /= denominator
        self._adam.step()
        self._adam.zero_grad()
        self.steps += 1
        return CommitReport(True, 1.0, {"tokens": 1.0}, {})

    def hold(self):
        pass

    def end_hold(self, *, back):
        assert not back, "everything is finite here"

    def drop(self):
        self._adam.zero_grad()

    def reward(self):
        """The reward to expect of an answer."""
        chance = self.logits.detach().softmax(-1)
        return float(sum(chance[prompt, :, target(prompt)].mean() for prompt in range(PROMPTS)) / PROMPTS)

    def entropy(self):
        chance = self.logits.detach().softmax(-1)
        return float(-(chance * chance.log()).sum(-1).mean())


def target(prompt):
    return (2 * prompt + 1) % WORDS


def sampled(table, algorithm, rng, rewarded):
    """A step's groups, drawn from the table as it is; the first answer of a group is greedy where that is asked for."""
    groups = []
    for prompt in range(PROMPTS):
        chances = table.logits.detach().softmax(-1)[prompt]
        members = []
        for index in range(SAMPLES + algorithm.greedy_first):
            length = rng.randint(2, PLACES)
            greedy = algorithm.greedy_first and index == 0
            answer = [
                int(chances[place].argmax())
                if greedy
                else rng.choices(range(WORDS), chances[place].tolist())[0]
                for place in range(length)
            ]
            reward = sum(word == target(prompt) for word in answer) / length if rewarded else 1.0
            log_probs = [float(chances[place, word].log()) for place, word in enumerate(answer)]
            trained = list(range(1, length + 1))
            body = f"{prompt}/{index}"
            members.append(
                Trajectory(
                    index,
                    1,
                    body,
                    reward,
                    (Sample([prompt, *answer], trained, log_probs, versions=[5] * length),),
                )
            )
        groups.append(Group(prompt, tuple(members), f"group {prompt}"))
    return groups


def learn(name, options, *, commits=25, wrapped=lambda algorithm: algorithm, rewarded=True, table=None):
    """The table after so many commits of `name`."""
    config = TrainerConfig.model_validate(
        {
            "model": {"path": "none"},
            "algorithm": {
                "name": name,
                "options": options,
                "group_size": SAMPLES,
                "prompts_per_step": PROMPTS,
            },
            "trainer": {
                "micro_batch_tokens": 64,
                "reference": {"path": "teacher"} if name == "distill" else None,
            },
            "sampling": {"max_new_tokens": PLACES},
        }
    )
    algorithm = wrapped(build_algorithm(config.algorithm))
    found = Table(algorithm)
    if name == "distill":
        for prompt in range(PROMPTS):
            found.reference[prompt, :, target(prompt)] = 3.0
    if table is not None:
        table(found)
    kind = BatchLearner if algorithm.barrier is Barrier.BATCH else Learner
    learner = kind(config, algorithm, found)
    rng = random.Random(7)
    for step in range(commits):
        state = steps.restored(steps.StepState(), steps.Version(5, 1, 1), {1: 0})
        state = steps.begin(state, steps.Begin(step + 1, 1, 5, 6))[0]
        state = learner.learn(state, sampled(found, algorithm, rng, rewarded))
        assert len(state.accumulated) == PROMPTS
        assert learner.finish(state, 0.1).finite
    return found, kind


def negated(algorithm):
    """The same algorithm with the wrong sign in its advantages."""
    advantages = algorithm.advantages

    def wrong(outcomes):
        made = advantages(outcomes)
        return Advantages(-made.advantages, made.returns) if isinstance(made, Advantages) else -made

    algorithm.advantages = wrong
    return algorithm


@pytest.mark.parametrize("name", sorted(_BUILT_IN))
def test_each_algorithm_learns_in_two_epochs_of_two_minibatches(name):
    table, kind = learn(name, {**PASSES, **OPTIONS.get(name, {})})
    assert kind is BatchLearner and table.steps == 25 * 4
    assert table.reward() > 0.6


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce", "remax", "distill"])
def test_groups_that_are_learned_from_as_they_come_teach_too(name):
    table, kind = learn(name, OPTIONS.get(name, {}), commits=40)
    assert kind is Learner and table.steps == 40
    assert table.reward() > 0.6


@pytest.mark.parametrize("name", sorted(_BUILT_IN))
def test_a_wrong_sign_would_be_noticed(name):
    table, _ = learn(name, {**PASSES, **OPTIONS.get(name, {})}, commits=8, wrapped=negated)
    assert table.reward() < START


def skewed(table):
    """A policy that prefers a word, and a reference that prefers another."""
    with torch.no_grad():
        table.logits[..., 0] = 2.0
        table.reference[..., 3] = 2.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"kl_loss_coef": 0.5}),
        ("grpo", {"kl_loss_coef": 0.5, "kl_estimator": "k2"}),
        ("rloo", {"kl_reward_coef": 0.5}),
        ("reinforce_pp", {"kl_reward_coef": 0.5}),
        ("ppo", {"kl_reward_coef": 0.5, "critic_lr": 0.2}),
        ("ppo", {"kl_loss_coef": 0.5}),
    ],
)
def test_kl_terms_lead_to_the_reference_where_rewards_say_nothing(name, options):
    table, _ = learn(name, {**PASSES, **options}, rewarded=False, table=skewed)
    chance = table.logits.detach().softmax(-1).mean(dim=(0, 1))
    assert chance[3] > 0.4 > chance[0]


def test_an_entropy_bonus_spreads_the_policy_where_rewards_say_nothing():
    before, _ = learn("grpo", {**PASSES}, rewarded=False, table=skewed)
    after, _ = learn("grpo", {**PASSES, "entropy_coef": 0.1}, rewarded=False, table=skewed)
    assert after.entropy() > before.entropy() + 0.2


def test_the_critic_of_ppo_learns_what_an_answer_is_worth():
    table, _ = learn("ppo", {**PASSES, "critic_lr": 0.2}, commits=40)
    assert table.values.detach().mean() == pytest.approx(table.reward(), abs=0.15)
