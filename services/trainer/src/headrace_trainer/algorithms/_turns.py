"""Credit by turn: each turn of a conversation is an answer of its own, worth what is earned from it on. Credit by role:
what each role said is one, worth what that role has earned.

Shapes: B samples, N turns of the one that has most, T trained tokens; U turns of all samples, P tokens of the longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes, Turns
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.algorithms.functional.advantages.turns import turn_returns

Computed = Tensor | Advantages


def by_turn(
    advantages: Callable[[Outcomes], Computed], outcomes: Outcomes, discount: float, least: int = 2
) -> Computed:
    """Advantages of each token, (B, T), made by an algorithm for whole answers, of rewards by turn.

    A turn's reward is its return, G_k = r_k + discount G_{k+1}: what was earned before it does not depend on it, and
    only adds variance (the policy gradient theorem's reward to come). It is compared with the k-th turns of its group's
    other samples, as rLLM (`per_step`) and MT-GRPO (arXiv 2505.11821) do: those have had as many answers. GiGPO
    (arXiv 2505.10978) compares turns that begin in equal states, and needs such to repeat. Turns that fewer
    samples have than `least` are compared together with the last turn that so many have. Each baseline is made of other
    samples' returns beside the turn's own, so it does not depend on what the turn says but through its own part.

    With one turn a sample, or as many in all samples of a group, discount 1 and all reward in the last one, these are
    the algorithm's advantages of whole answers.
    """
    turns = outcomes.turns
    assert turns is not None, "the algorithm asks for rewards by turn, so there are some"
    returns_BN = turn_returns(turns.rewards_BN, discount)
    there_BN = torch.arange(returns_BN.shape[1]) < turns.counts_B[:, None]
    sample_U, turn_U, group_U = _compared(there_BN, outcomes.groups_B, max(2, least))
    unit_BN = torch.zeros_like(there_BN, dtype=torch.long)
    unit_BN[sample_U, turn_U] = torch.arange(len(sample_U))
    sample_K, token_K = outcomes.mask_BT.nonzero(as_tuple=True)
    turn_K = turns.of_tokens(outcomes.mask_BT.shape[1])[sample_K, token_K]
    unit_K = unit_BN[sample_K, turn_K]
    place_K = token_K - turns.starts_BN[sample_K, turn_K]

    def cut(values_BT: Tensor) -> Tensor:
        """(U, P): a row for each turn."""
        longest = max(1, int(place_K.max()) + 1) if len(place_K) else 1
        values_UP = values_BT.new_zeros(len(sample_U), longest)
        values_UP[unit_K, place_K] = values_BT[sample_K, token_K]
        return values_UP

    def joined(values_UP: Tensor) -> Tensor:
        """(B, T): undoes `cut`."""
        values_BT = values_UP.new_zeros(outcomes.mask_BT.shape)
        values_BT[sample_K, token_K] = values_UP[unit_K, place_K]
        return values_BT

    found = advantages(
        replace(
            outcomes,
            rewards_B=returns_BN[sample_U, turn_U],
            groups_B=group_U,
            mask_BT=cut(outcomes.mask_BT),
            lengths_B=turns.tokens_BN[sample_U, turn_U],
            columns_BT={name: cut(column_BT) for name, column_BT in outcomes.columns_BT.items()},
            turns=None,
        )
    )
    if isinstance(found, Advantages):
        return Advantages(joined(found.advantages), joined(found.returns))
    return joined(found)


def by_role(
    compute: Callable[[Outcomes], Computed], outcomes: Outcomes, least: int = 2, *, credit: bool = False
) -> Computed:
    """Advantages of each token, (B, T), of samples in which several roles spoke.

    What a role said in a sample is a sample of its own. Its reward is the sum of its turns' rewards, and it is compared
    with what the same role came to in its group's other samples. A role that spoke in fewer of them than `least` has
    advantage 0. `credit`: `compute` gives credit by turn.
    """
    turns = outcomes.turns
    assert turns is not None and turns.roles_BN is not None
    units = _units(turns, outcomes.groups_B, least)
    mask_BT = outcomes.mask_BT

    def cut(values_BT: Tensor) -> Tensor:
        """(U, P): a row for each unit."""
        values_UP = values_BT.new_zeros(len(units), max(1, *(unit.tokens for unit in units)))
        for row, unit in enumerate(units):
            own = values_BT[unit.sample, unit.first : unit.first + unit.tokens]
            values_UP[row, : len(own)] = own
        return values_UP

    def joined(values_UP: Tensor) -> Tensor:
        """(B, T): undoes `cut`."""
        values_BT = values_UP.new_zeros(mask_BT.shape)
        for row, unit in enumerate(units):
            own = values_BT[unit.sample, unit.first : unit.first + unit.tokens]
            own[:] = values_UP[row, : len(own)]
        return values_BT

    if not units:
        return torch.zeros(mask_BT.shape, dtype=outcomes.rewards_B.dtype)
    samples_U = torch.tensor([unit.sample for unit in units])
    own_UN = torch.zeros(len(units), turns.rewards_BN.shape[1], dtype=torch.bool)
    counts_U = torch.tensor([unit.turns for unit in units])
    for row, unit in enumerate(units):
        own_UN[row, unit.turn : unit.turn + unit.turns] = True
    places_UN = torch.argsort((~own_UN).long(), dim=1, stable=True)
    rewards_UN = (turns.rewards_BN[samples_U] * own_UN).gather(1, places_UN)
    tokens_UN = (turns.tokens_BN[samples_U] * own_UN).gather(1, places_UN)
    last_U = torch.tensor([unit.last for unit in units])
    values_B = outcomes.bootstrap_values_B
    found = compute(
        replace(
            outcomes,
            rewards_B=rewards_UN.sum(1),
            groups_B=torch.tensor([unit.group for unit in units]),
            mask_BT=cut(mask_BT),
            lengths_B=tokens_UN.amax(1),
            columns_BT={name: cut(column_BT) for name, column_BT in outcomes.columns_BT.items()},
            bootstrap_values_B=None if values_B is None else values_B[samples_U] * last_U,
            turns=Turns(rewards_UN, tokens_UN, counts_U) if credit else None,
        )
    )
    if isinstance(found, Advantages):
        return Advantages(joined(found.advantages), joined(found.returns))
    return joined(found)


@dataclass(frozen=True)
class _Unit:
    """What a role said in a sample: `turns` from `turn` on, `tokens` from `first` on. `last`: none follows."""

    group: int
    sample: int
    turn: int
    turns: int
    first: int
    tokens: int
    last: bool


def _units(turns: Turns, groups_B: Tensor, least: int) -> list[_Unit]:
    """Those that are compared one behind the other, numbered by group and role."""
    assert turns.roles_BN is not None
    roles, tokens = turns.roles_BN.tolist(), turns.tokens_BN.tolist()
    spoke: dict[tuple[int, int], list[_Unit]] = defaultdict(list)
    for sample, group in enumerate(groups_B.tolist()):
        turn = first = 0
        there = [role for role in roles[sample] if role >= 0]
        for role, run in groupby(there):
            count = len(list(run))
            length = sum(tokens[sample][turn : turn + count])
            last = turn + count == len(there)
            spoke[group, role].append(_Unit(0, sample, turn, count, first, length, last))
            turn, first = turn + count, first + length
    compared = [several for _, several in sorted(spoke.items()) if len(several) >= least]
    return [replace(unit, group=number) for number, several in enumerate(compared) for unit in several]


def _compared(there_BN: Tensor, groups_B: Tensor, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample, turn and group of each turn there is, those that are compared one behind the other."""
    sample_U, turn_U = there_BN.nonzero(as_tuple=True)
    having_GN = torch.zeros(int(groups_B.max()) + 1, there_BN.shape[1], dtype=torch.long)
    having_GN.index_add_(0, groups_B, there_BN.long())
    last_G = ((having_GN >= least).sum(1) - 1).clamp(min=0)
    group_U = groups_B[sample_U]
    place_U = group_U * there_BN.shape[1] + torch.minimum(turn_U, last_G[group_U])
    order_U = torch.argsort(place_U, stable=True)
    _, numbers_U = torch.unique_consecutive(place_U[order_U], return_inverse=True)
    return sample_U[order_U], turn_U[order_U], numbers_U
