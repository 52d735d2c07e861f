"""Every algorithm on steps in which nobody spoke, or one sample carries loss, or two: all figures are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from headrace_schema.openings import TrainerConfig
from headrace_schema.rules.asked import COMPARING_TWO, IMITATING, JUDGING
from headrace_schema.workflow import SESSION
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm
from headrace_trainer.algorithms._base import Barrier
from headrace_trainer.learning.figures import step_figures
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.policies import Learning, finish, learn_parts
from headrace_trainer.learning.samples import Disposition, Group, Sample, Trajectory, Turn
from headrace_trainer.learning.step import Begin, StepState, Version
from table_policy import TableRounds

STATE = StepState(version=Version(1, 0, 0, ""), lineage={1: 0}, begun=Begin(0, 1, 1, 2))
OPTIONS: Mapping[str, dict[str, object]] = {"ppo": {"bootstrap_truncated": True}}
GIVEN = {*IMITATING, *COMPARING_TWO, *JUDGING, SESSION}
NAMES = [name for name in ALGORITHMS.names() if not name.startswith("test") and name not in GIVEN]


def member(
    index: int, roles: tuple[str, ...], *, masked: bool = False, truncated: bool = False
) -> Trajectory:
    """A conversation of one turn of two tokens for each role, on a line of its own."""
    taken = [(Turn(2, float(index % 2), role, place),) for place, role in enumerate(roles)] or [()]
    branches = tuple(
        Sample([1, 2, 3], [1, 2], [-1.0] * 2, versions=[1] * 2, turns=turns, cut=truncated and not line)
        for line, turns in enumerate(taken)
    )
    reward = float(index % 2) * len(branches)
    return Trajectory(index, 1, f"body {index} {roles}", reward, branches, truncated=truncated, masked=masked)


def config_of(make_config, name: str, epochs: int, **more: object) -> TrainerConfig:
    options = {
        **OPTIONS.get(name, {}),
        **({"epochs": epochs, "minibatches": epochs} if epochs > 1 else {}),
        **more,
    }
    return TrainerConfig.model_validate(
        make_config(algorithm={"name": name, "group_size": 4, "prompts_per_step": 2, "options": options})
    )


def groups_of(trained: int, roles: tuple[str, ...]) -> list[Group]:
    """Two groups, in which so many samples carry loss, the others are masked."""
    return [
        Group(ordinal, tuple(
            member(index, roles, masked=index - 1 not in range(trained), truncated=index == 2) for index in range(4)
        ), f"group {ordinal}")
        for ordinal in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("roles", [(), ("asker",), ("asker", "teller")], ids=["plain", "a role", "roles"])
@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_commits_whatever_few_samples_carry_loss(make_config, name, trained, roles, epochs):
    config = config_of(make_config, name, epochs)
    algorithm = build_algorithm(config.algorithm)
    rounds = TableRounds(algorithm)
    before = rounds.table.detach().clone()
    learner = (BatchLearner if algorithm.barrier is Barrier.BATCH else Learner)(config, algorithm, rounds)
    state = learner.learn(STATE, groups_of(trained, roles))
    assert [each.disposition for each in state.accumulated] == [Disposition.ACCUMULATED] * 2
    finished = learner.finish(state, 0.1)
    assert finished.finite and len(finished.steps) == epochs**2
    figures = step_figures(finished.steps, state.accumulated, rate=0.1)
    assert all(math.isfinite(value) for value in figures.values()), figures
    assert torch.isfinite(rounds.table).all()
    if not trained:
        assert torch.equal(rounds.table, before)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_nobody_spoke_to_makes_optimizer_steps_without_a_gradient(make_config, name, epochs):
    """Whatever the other policy learns with, and whichever of the two is the silent one."""
    for silent in ("", "tutor"):
        config = config_of(make_config, name, epochs)
        config = config.model_copy(update={"played": {"teller": "tutor"}})
        algorithm = build_algorithm(config.algorithm)
        rounds = TableRounds(algorithm)
        policies = []
        for policy in ("", "tutor"):
            own = TableRounds(algorithm)
            kind = BatchLearner if algorithm.barrier is Barrier.BATCH else Learner
            policies.append(Learning(policy, config, algorithm, kind(config, algorithm, own), own))
        before = [each.rounds.table.detach().clone() for each in policies]
        role = "asker" if silent else "teller"
        state = learn_parts(policies, config, STATE, groups_of(2, (role,)))
        finished, figures = finish(policies, rounds, state)
        assert finished.finite and len(finished.steps) == 2 * epochs**2 - (epochs - 1) * epochs
        assert all(math.isfinite(value) for value in figures.values())
        place = 1 if silent else 0
        assert torch.equal(policies[place].rounds.table, before[place])
        assert all(not gradient.any() for gradient, _ in policies[place].rounds.steps)
