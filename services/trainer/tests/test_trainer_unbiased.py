"""The expected gradient of credit by turn and by role, over all that can happen, against that of the reward.

The game: in turn k a policy goes on with probability p_k, or stops, so that conversations have different numbers of
turns. E[sum of A d log p] over all groups of three samples is three times the derivative of the expected reward.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, VALUES
from headrace_trainer.learning.intake import Intake
from headrace_trainer.learning.samples import Group, Sample, Trajectory, Turn
from headrace_trainer.learning.step import StepState, Version

STATE = StepState(version=Version(1, 0, 0, ""), lineage={1: 0})
GO = (0.7, 0.4, 0.6)
PATHS = ((0,), (1, 0), (1, 1, 0), (1, 1, 1))
"""What was chosen in each turn: 1 goes on."""
EARNS = {(0,): 0.5, (1,): 0.25, (1, 0): -1.0, (1, 1): 0.5, (1, 1, 0): -0.25, (1, 1, 1): 2.0}
EARNED = {path: tuple(EARNS[path[: turn + 1]] for turn in range(len(path))) for path in PATHS}
SIZE = 3


def chance(path: tuple[int, ...]) -> float:
    return math.prod(GO[turn] if go else 1 - GO[turn] for turn, go in enumerate(path))


def talk(index: int, path: tuple[int, ...], roles: tuple[str, ...] = ()) -> Trajectory:
    """Each turn samples one token; with roles, those that take turn after turn, each on a line of its own."""
    who = [roles[turn % len(roles)] if roles else "" for turn in range(len(path))]
    lines = {role: [turn for turn, each in enumerate(who) if each == role] for role in dict.fromkeys(who)}
    branches, earned = [], EARNED[path]
    for role, turns in lines.items():
        tokens = [1, *(token for turn in turns for token in (path[turn], 2))]
        taken = tuple(Turn(1, earned[turn], role, turn) for turn in turns)
        count = len(turns)
        branches.append(
            Sample(tokens, [*range(1, 2 * count, 2)], [-1.0] * count, versions=[1] * count, turns=taken)
        )
    return Trajectory(index, 1, f"{index} {path}", math.fsum(earned), tuple(branches))


def advantages(
    make_config, algorithm: dict[str, object], groups: list[list[Trajectory]]
) -> list[list[list[float]]]:
    """Of each sample's turns, in the order of its tokens."""
    config = TrainerConfig.model_validate(
        make_config(algorithm={"group_size": SIZE, "prompts_per_step": 2, **algorithm})
    )
    built = build_algorithm(config.algorithm)
    columns = {OLD_LOG_PROBS: -1.0, REFERENCE_LOG_PROBS: -1.0, VALUES: 0.75}
    batch = []
    for ordinal, members in enumerate(groups):
        batch.append(Group(ordinal, tuple(members), f"group {ordinal}"))
    found = []
    intake = Intake(config, built)
    rounds = SimpleNamespace(
        infer=lambda bare, names: [
            [{name: [columns[name]] * len(each.trained) for name in names} for each in group]
            for group in bare
        ]
    )
    for prepared, members in zip(intake.prepare(STATE, intake.inferred(batch, rounds)), groups, strict=True):
        lines = iter(prepared.samples)
        found.append(
            [
                [v for _ in each.samples for v in next(lines).advantages]
                if prepared.samples
                else [0.0] * each.sampled
                for each in members
            ]
        )
    return found


def expected(make_config, algorithm: dict[str, object], roles: tuple[str, ...] = ()) -> list[float]:
    """E[sum over a group's samples of A d log p / d logit of p_k], for each turn k."""
    gradient = [0.0] * len(GO)
    for paths in itertools.product(PATHS, repeat=SIZE):
        members = [talk(index, path, roles) for index, path in enumerate(paths)]
        (found,) = advantages(make_config, algorithm, [members])
        weight = math.prod(map(chance, paths))
        for path, values in zip(paths, found, strict=True):
            who = [turn % len(roles) if roles else 0 for turn in range(len(path))]
            order = [turn for role in dict.fromkeys(who) for turn in range(len(path)) if who[turn] == role]
            for turn, value in zip(order, values, strict=True):
                gradient[turn] += weight * value * (path[turn] - GO[turn])
    return gradient


def derivative(roles: int = 1, discount: float = 1.0) -> list[float]:
    """d E[reward of whoever takes turn k] / d logit of p_k, each later turn's reward discounted once more."""
    return [
        math.fsum(
            chance(path)
            * (path[turn] - GO[turn])
            * math.fsum(
                r * discount ** ((later - turn) // roles)
                for later, r in enumerate(EARNED[path])
                if later % roles == turn % roles and (discount == 1.0 or later >= turn)
            )
            for path in PATHS
            if turn < len(path)
        )
        for turn in range(len(GO))
    ]


EXACT = {
    "reinforce": {},
    "rloo": {},
    "ppo": {"whiten": False},
    "reinforce, credit by turn": {"credit": "turn"},
    "rloo, credit by turn": {"credit": "turn"},
    "rloo, discounted": {"credit": "turn", "turn_discount": 0.5},
    "ppo, credit by turn": {"whiten": False, "credit": "turn"},
}


@pytest.mark.parametrize("name", EXACT)
def test_the_expected_gradient_is_that_of_the_reward(make_config, name):
    options = EXACT[name]
    found = expected(make_config, {"name": name.partition(",")[0], "options": options})
    wanted = derivative(discount=options.get("turn_discount", 1.0))
    assert found == pytest.approx([SIZE * each for each in wanted], abs=1e-12)


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "cispo", "gpg"])
def test_a_baseline_that_holds_the_sample_itself_shrinks_a_turns_gradient_and_never_turns_it(
    make_config, name, credit
):
    options: dict[str, object] = {"credit": credit}
    options |= (
        {"normalize_std": False} if name in ("grpo", "cispo") else {"alpha": 1.0} if name == "gpg" else {}
    )
    found = expected(make_config, {"name": name, "options": options})
    shares = [one / (SIZE * other) for one, other in zip(found, derivative(), strict=True)]
    assert all(1 / SIZE < share <= 2 / 3 + 1e-12 for share in shares), shares


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_each_role_has_the_gradient_of_its_own_reward(make_config, name, credit):
    """Of rloo times the chance that another sample has something to compare it with."""
    found = expected(make_config, {"name": name, "options": {"credit": credit}}, ("asker", "teller"))
    silent = {"asker": 0.0, "teller": 1 - GO[0]}
    compared = [1 - silent[("asker", "teller")[turn % 2]] ** (SIZE - 1) for turn in range(len(GO))]
    shares = compared if name == "rloo" else [1.0] * len(GO)
    wanted = [SIZE * share * each for share, each in zip(shares, derivative(roles=2), strict=True)]
    assert found == pytest.approx(wanted, abs=1e-12)


def test_a_long_conversations_lone_turns_are_compared_with_the_others_and_not_with_itself(make_config):
    """One right conversation of 20 turns and seven wrong ones of 2: as whole conversations, 1 and -1/7."""

    def one(index: int, turns: int, reward: float) -> Trajectory:
        earned = [*[0.0] * (turns - 1), reward]
        taken = tuple(Turn(1, each, place=place) for place, each in enumerate(earned))
        trained = list(range(1, 2 * turns, 2))
        branch = Sample([1, *[3, 2] * turns], trained, [-1.0] * turns, versions=[1] * turns, turns=taken)
        return Trajectory(index, 1, f"{index}", reward, (branch,))

    members = [one(0, 20, 1.0), *(one(index, 2, 0.0) for index in range(1, 8))]
    for credit in ("trajectory", "turn"):
        (found,) = advantages(make_config, {"name": "rloo", "options": {"credit": credit}}, [members])
        assert found[0] == pytest.approx([1.0] * 20)
        assert all(each == pytest.approx([-1 / 7] * 2) for each in found[1:])
