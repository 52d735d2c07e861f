"""From members to the turns that credit goes to: what each earned, whose it is. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import Turns
from headrace_trainer.learning.samples import Member


def padded(values: list[float], longest: int) -> list[float]:
    """With zeros behind them."""
    return values + [0.0] * (longest - len(values))


def turns_of(members: Many[Member], discount: float) -> Turns:
    """Of these members, in the order of their tokens; `discount` is of a reward from turn to turn."""
    most = max(len(member.turn_rewards) for member in members)
    tokens = [[*member.turn_tokens, *[0] * (most - len(member.turn_tokens))] for member in members]
    return Turns(
        rewards_BN=double([padded(_rewards(member, discount), most) for member in members]),
        tokens_BN=torch.tensor(tokens),
        counts_B=torch.tensor([len(member.turn_rewards) for member in members]),
        **_roles(members, most),
    )


def _rewards(member: Member, discount: float) -> list[float]:
    """Of each turn in the order of tokens, such that what is earned from a turn on is what is earned from then on.

    The lines of a session stand behind each other, whichever turn came when.
    """
    if not member.turn_places:
        return [*member.turn_rewards]
    following, returns = 0.0, [0.0] * len(member.turn_rewards)
    for turn in sorted(range(len(returns)), key=member.turn_places.__getitem__, reverse=True):
        following = returns[turn] = member.turn_rewards[turn] + discount * following
    return [now - discount * then for now, then in zip(returns, [*returns[1:], 0.0], strict=True)]


def _roles(members: Many[Member], most: int) -> dict[str, Tensor]:
    """Who took each turn, and whose line was cut; nothing where there are no roles."""
    names = {role: number for number, role in enumerate(sorted({r for m in members for r in m.turn_roles}))}
    if not names:
        return {}
    rows = [[names[role] for role in member.turn_roles] for member in members]
    cut = [[*dict.fromkeys(row), -1][member.cut_line] for member, row in zip(members, rows, strict=True)]
    return {
        "roles_BN": torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows]),
        "cut_roles_B": torch.tensor(cut),
    }


def double(values: list[float] | list[list[float]]) -> Tensor:
    """In float64."""
    return torch.tensor(values, dtype=torch.float64)
