"""Steps in which features cross, drawn at random: the gradient of each optimizer step against one made token by token.

Roles or sessions of several lines, masked cut answers, KL in rewards and in the loss, corrections for the engine,
clips, epochs and minibatches, each aggregation, temperatures, staleness: the real intake, learners and algorithms on a
table of logits, and plain loops over the same formulas.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import Barrier
from headrace_trainer.learning.intake import Prepared
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.samples import Group, Sample, Trajectory, Turn
from headrace_trainer.learning.step import Begin, StepState, Version
from table_policy import TableRounds
from torch import Tensor

STATE = StepState(version=Version(2, 1, 1, ""), lineage={1: 0, 2: 1}, begun=Begin(1, 1, 2, 3))
RATE, SIZE, GROUPS = 0.5, 4, 3


@dataclass
class Unit:
    """What one role said in a sample, or the lines of a session: (line, position) of each token."""

    group: int
    sample: int
    role: str
    reward: float
    places: list[tuple[int, int]]
    trained: bool
    greedy: bool
    lines: int = 1


class Case:
    """A step drawn from a seed, and what plain loops make of it."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        names = [
            "reinforce",
            "rloo",
            "grpo",
            "dr_grpo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "remax",
            "ppo",
        ]
        self.name = names[seed % len(names)]
        self.roles = draw.random() < 0.5
        options: dict[str, Any] = {"epochs": draw.choice((1, 1, 2)), "minibatches": draw.choice((1, 2))}
        if options["epochs"] * options["minibatches"] > 1:
            options |= {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": draw.choice((None, 1.5))}
        if self.name != "dr_grpo":
            options["loss_aggregation"] = draw.choice(
                ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
            )
        if self.name not in ("grpo", "dr_grpo") and draw.random() < 0.4:
            options["kl_reward_coef"] = 0.2
        if draw.random() < 0.4:
            options["kl_loss_coef"] = 0.3
        if draw.random() < 0.3:
            options["entropy_coef"] = 0.1
        options["correction"] = draw.choice(("none", "truncate", "mask"))
        if options["correction"] != "none":
            options["correction_level"] = draw.choice(("token", "sequence", "geometric"))
        if not self.roles:
            options["branch_weights"] = draw.choice(("divide", "whole"))
        if self.name == "ppo":
            options |= {"gamma": 0.9, "lam": 0.8, "whiten": draw.random() < 0.5, "value_coefficient": 1e-9}
        if self.name == "reinforce_pp":
            options["gamma"] = 0.9
        self.options = options
        self.masks = draw.random() < 0.5
        self.groups = [self._group(ordinal) for ordinal in range(GROUPS)]

    def _group(self, ordinal: int) -> Group:
        return Group(
            ordinal, tuple(self._member(ordinal, index) for index in range(SIZE)), f"group {ordinal}"
        )

    def _member(self, ordinal: int, index: int) -> Trajectory:
        draw = self.draw
        names = draw.sample(["asker", "teller"], draw.choice((1, 2, 2)))
        branches = []
        for name in names:
            tokens, trained, turns = [draw.randrange(12)], [], []
            for place in range(draw.choice((1, 2))):
                count = draw.choice((1, 2, 3))
                trained += range(len(tokens), len(tokens) + count)
                tokens += [draw.randrange(12) for _ in range(count + 1)]
                turns.append(Turn(count, draw.choice((0.0, 0.5, 1.0)), name, place))
            told = [draw.choice((math.nan, draw.uniform(-4, -1))) for _ in trained]
            branches.append(Sample(tokens, trained, told, versions=[2] * len(trained), turns=tuple(turns)))
        reward = math.fsum(turn.reward for branch in branches for turn in branch.turns)
        if not self.roles:
            branches = [msgspec.structs.replace(branch, turns=()) for branch in branches]
        truncated = draw.random() < 0.25
        return Trajectory(index, 1, f"{ordinal} {index}", reward, tuple(branches), truncated=truncated)

    # What plain loops make of it

    def units(self) -> list[Unit]:
        found = []
        for group in self.groups:
            for member in group.members:
                greedy = self.name == "remax" and member.sample_index == 0
                trained = not (greedy or (self.masks and member.truncated))
                lines = [branch.trained for branch in member.samples]
                if not self.roles:
                    places = [(line, at) for line, own in enumerate(lines) for at in own]
                    found.append(Unit(group.prompt_ordinal, member.sample_index, "", member.reward, places, trained,
                                      greedy, len(lines)))  # fmt: skip
                    continue
                for line, branch in enumerate(member.samples):
                    role, reward = branch.role, math.fsum(turn.reward for turn in branch.turns)
                    places = [(line, at) for at in lines[line]]
                    found.append(
                        Unit(group.prompt_ordinal, member.sample_index, role, reward, places, trained, greedy)
                    )
        return found

    def member(self, unit: Unit) -> Trajectory:
        return self.groups[unit.group].members[unit.sample]

    def log_prob(self, unit: Unit, place: tuple[int, int], table: Tensor) -> Tensor:
        line, at = place
        tokens = self.member(unit).samples[line].tokens
        return table[tokens[at - 1]].log_softmax(-1)[tokens[at]]

    def advantages(self, units: list[Unit], rounds: TableRounds) -> dict[int, list[float]]:
        """Of each unit's tokens, by its number, under the weights at which the step began."""
        least = 1 if self.name in ("reinforce", "reinforce_pp", "ppo") else 2
        table = rounds.table.detach()
        coefficient = self.options.get("kl_reward_coef", 0.0)
        found: dict[int, list[float]] = {}
        for role in sorted({unit.role for unit in units}):
            own = {at: unit for at, unit in enumerate(units) if unit.role == role}
            raw: dict[int, list[float]] = {}
            for at, unit in own.items():
                others = [each for each in own.values() if each.group == unit.group]
                if len(others) < least:
                    continue
                kl = [
                    coefficient
                    * float(self.log_prob(unit, place, table) - self.log_prob(unit, place, rounds.reference))
                    for place in unit.places
                ]
                raw[at] = self._raw(unit, others, kl, rounds)
            whitened = self.name.startswith("reinforce_pp") or (self.name == "ppo" and self.options["whiten"])
            if whitened:
                flat = [v for at, values in raw.items() for v in values if units[at].trained]
                mean = statistics.fmean(flat) if flat else 0.0
                spread = math.sqrt((statistics.variance(flat) if len(flat) > 1 else 0.0) + 1e-8)
                raw = {at: [(v - mean) / spread for v in values] for at, values in raw.items()}
            found |= raw
        return found

    def _raw(self, unit: Unit, others: list[Unit], kl: list[float], rounds: TableRounds) -> list[float]:
        """Before whitening. `kl` of each of the unit's tokens, which count where it carries loss."""
        count = len(unit.places)
        rewards = [each.reward for each in others]
        if self.name == "rloo":
            penalised = [each.reward - self._penalty(each, rounds) for each in others]
            own = unit.reward - self._penalty(unit, rounds)
            return [own - (math.fsum(penalised) - own) / (len(others) - 1)] * count
        mean = statistics.fmean(rewards)
        if self.name in ("grpo", "dr_grpo"):
            spread = statistics.stdev(rewards) + 1e-6 if self.name == "grpo" else 1.0
            return [(unit.reward - mean) / spread if max(rewards) > min(rewards) else 0.0] * count
        if self.name == "ppo":
            return self._gae(unit, kl, rounds)
        greedy = [each.reward for each in others if each.greedy]
        if self.name == "remax" and not greedy:
            return [0.0] * count
        gamma = 0.9 if self.name == "reinforce_pp" else 1.0
        returns, following = [0.0] * count, 0.0
        for at in reversed(range(count)):
            last = at == count - 1
            centre = mean if self.name == "reinforce_pp_baseline" else 0.0
            following = (unit.reward - centre if last else 0.0) - kl[at] + gamma * following
            returns[at] = following
        return [value - (greedy[0] if self.name == "remax" else 0.0) for value in returns]

    def _penalty(self, unit: Unit, rounds: TableRounds) -> float:
        """What an answer's reward loses; nothing where it carries no loss."""
        coefficient = self.options.get("kl_reward_coef", 0.0)
        if not (coefficient and unit.trained):
            return 0.0
        table = rounds.table.detach()
        return coefficient * math.fsum(
            float(self.log_prob(unit, place, table) - self.log_prob(unit, place, rounds.reference))
            for place in unit.places
        )

    def _gae(self, unit: Unit, kl: list[float], rounds: TableRounds) -> list[float]:
        branches = self.member(unit).samples
        values = [float(rounds.values[branches[line].tokens[at - 1]]) for line, at in unit.places]
        found, advantage, following = [0.0] * len(kl), 0.0, 0.0
        for at in reversed(range(len(kl))):
            reward = (unit.reward if at == len(kl) - 1 else 0.0) - kl[at]
            advantage = reward + 0.9 * following - values[at] + 0.9 * 0.8 * advantage
            found[at], following = advantage, values[at]
        return found

    def loss(self, units: list[Unit], given: dict[int, list[float]], began: Tensor, rounds: TableRounds, table: Tensor,
             chosen: set[int]) -> tuple[Tensor, float]:  # fmt: skip
        """The numerator over the chosen groups, and what it is divided by."""
        aggregation = self.options.get("loss_aggregation", "seq-mean-token-sum")
        numerator, tokens, sequences = torch.zeros((), dtype=torch.float64), 0.0, 0
        for number, unit in enumerate(units):
            if unit.group not in chosen or not unit.trained:
                continue
            share = 1 / unit.lines if self.options.get("branch_weights") == "divide" else 1.0
            sequences += round(unit.lines * share)
            tokens += share * len(unit.places)
            values = dict(zip(unit.places, given.get(number, [0.0] * len(unit.places)), strict=True))
            for line in range(max(own for own, _ in unit.places) + 1):
                places = [place for place in unit.places if place[0] == line]
                if places:
                    weight = share / (len(places) if aggregation == "seq-mean-token-mean" else 1)
                    numerator = numerator + weight * self._line(
                        unit, places, [values[each] for each in places], began, rounds, table
                    )
        divisor = max(1.0, tokens if aggregation == "token-mean" else float(sequences))
        return numerator, divisor

    def _line(self, unit: Unit, places: list[tuple[int, int]], advantages: list[float], began: Tensor,
              rounds: TableRounds, table: Tensor) -> Tensor:  # fmt: skip
        """Sum of the losses of a line's tokens."""
        options, branch = self.options, self.member(unit).samples[places[0][0]]
        several = options["epochs"] * options["minibatches"] > 1
        told = [branch.engine_log_probs[branch.trained.index(at)] for _, at in places]
        new = [self.log_prob(unit, place, table) for place in places]
        base = (
            [self.log_prob(unit, place, began) for place in places]
            if several
            else [each.detach() for each in new]
        )
        ratios = [0.0 if math.isnan(t) else float(b) - t for b, t in zip(base, told, strict=True)]
        level = options.get("correction_level", "token")
        if level != "token":
            whole = math.fsum(ratios) / (1 if level == "sequence" else len(ratios))
            ratios = [whole] * len(ratios)
        total = torch.zeros((), dtype=torch.float64)
        for place, own, old, log_ratio, advantage in zip(places, new, base, ratios, advantages, strict=True):
            ratio, weight = (own - old).exp(), math.exp(max(-20.0, min(20.0, log_ratio)))
            low, high = 1 - options.get("clip_low", 0.2), 1 + options.get("clip_high", 0.2)
            term = torch.max(-advantage * ratio, -advantage * ratio.clamp(low, high))
            if options.get("dual_clip") and advantage < 0:
                term = torch.min(
                    term, torch.as_tensor(-advantage * options["dual_clip"], dtype=torch.float64)
                )
            if options["correction"] == "truncate":
                term = term * min(weight, 2.0)
            elif options["correction"] == "mask":
                term = term * (weight if 0.5 <= weight <= 5.0 else 0.0)
            if coefficient := options.get("kl_loss_coef"):
                off = self.log_prob(unit, place, rounds.reference) - own
                term = term + coefficient * (off.exp() - 1 - off).clamp(max=10.0)  # as verl bounds k3
            if coefficient := options.get("entropy_coef"):
                row = table[branch.tokens[place[1] - 1]].log_softmax(-1)
                term = term + coefficient * (row.exp() * row).sum()
            total = total + term
        return total


@pytest.mark.parametrize("seed", range(64))
def test_every_optimizer_step_is_that_of_plain_loops(make_config, seed):
    case = Case(seed)
    algorithm = {
        "name": case.name,
        "group_size": SIZE,
        "prompts_per_step": GROUPS,
        "truncated": "mask" if case.masks else "keep",
        "options": case.options,
    }
    config = TrainerConfig.model_validate(make_config(algorithm=algorithm))
    built = build_algorithm(config.algorithm)
    rounds = TableRounds(built, seed=seed)
    began = rounds.table.detach().clone()
    units = case.units()
    given = case.advantages(units, rounds)
    kind = BatchLearner if built.barrier is Barrier.BATCH else Learner
    learner = kind(config, built, rounds)
    minibatches: list[set[int]] = []
    if isinstance(learner, BatchLearner):
        accumulate = learner._accumulate

        def seen(part: list[Prepared]) -> bool:
            minibatches.append({each.record.prompt_ordinal for each in part})
            return accumulate(part)

        learner._accumulate = seen  # type: ignore[method-assign]
    finished = learner.finish(learner.learn(STATE, case.groups), RATE)
    assert finished.finite and len(rounds.steps) == case.options["epochs"] * case.options["minibatches"]
    table = began.clone()
    for step, (gradient, _) in enumerate(rounds.steps):
        leaf = table.clone().requires_grad_()
        chosen = minibatches[step] if minibatches else set(range(GROUPS))
        numerator, divisor = case.loss(units, given, began, rounds, leaf, chosen)
        (wanted,) = torch.autograd.grad(
            numerator / divisor, [leaf], allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(
            gradient, wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{text}\n{vars(case)}"
        )
        table = table - RATE * gradient
