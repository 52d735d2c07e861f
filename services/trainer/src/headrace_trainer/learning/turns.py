"""From members to the turns that credit goes to: what each earned, whose it is. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import Turns
from headrace_trainer.learning.samples import Member, Turn


def padded(values: list[float], longest: int) -> list[float]:
    """With zeros behind them."""
    return values + [0.0] * (longest - len(values))


def turns_of(members: Many[Member], discount: float) -> Turns:
    """Of these members, in the order of their tokens; `discount` is of a reward from turn to turn."""
    turns = [member.turns for member in members]
    most = max(map(len, turns))
    tokens = [[turn.tokens for turn in own] + [0] * (most - len(own)) for own in turns]
    return Turns(
        rewards_BN=double([padded(_rewards(own, discount), most) for own in turns]),
        tokens_BN=torch.tensor(tokens),
        counts_B=torch.tensor([len(own) for own in turns]),
        **_roles(members, most),
    )


def _rewards(turns: Many[Turn], discount: float) -> list[float]:
    """Of each turn in the order of tokens, such that what is earned from a turn on is what is earned from then on.

    Branches stand behind each other, whichever turn came when; a role's turns are compared with its own alone.
    """
    rewards, places = [turn.reward for turn in turns], [turn.place for turn in turns]
    if places == sorted(places) or turns[0].role:
        return rewards
    following, returns = 0.0, [0.0] * len(turns)
    for turn in sorted(range(len(turns)), key=places.__getitem__, reverse=True):
        following = returns[turn] = rewards[turn] + discount * following
    return [now - discount * then for now, then in zip(returns, [*returns[1:], 0.0], strict=True)]


def _roles(members: Many[Member], most: int) -> dict[str, Tensor]:
    """Who took each turn, and whose branch was cut; nothing where there are no roles."""
    rows = [[turn.role for turn in member.turns] for member in members]
    names = {role: number for number, role in enumerate(sorted({role for row in rows for role in row}))}
    if not any(names):
        return {}
    cut = [next((branch.role for branch in member.branches if branch.cut), None) for member in members]
    return {
        "roles_BN": torch.tensor([[*map(names.__getitem__, row), *[-1] * (most - len(row))] for row in rows]),
        "cut_roles_B": torch.tensor([-1 if role is None else names[role] for role in cut]),
    }


def double(values: list[float] | list[list[float]]) -> Tensor:
    """In float64."""
    return torch.tensor(values, dtype=torch.float64)
