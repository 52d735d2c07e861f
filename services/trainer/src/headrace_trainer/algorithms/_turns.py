"""Credit by turn: each turn of a conversation is an answer of its own, worth what is earned from it on. Credit by role:
what each role said is one, worth what that role has earned.

Shapes: B samples, N turns of the one that has most, T trained tokens; U units of all samples, P tokens of the longest,
K tokens of all units.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes, Turns
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.algorithms.functional.advantages.turns import turn_returns

Computed = Tensor | Advantages
Compute = Callable[[Outcomes], Computed]


def by_turn(advantages: Compute, outcomes: Outcomes, discount: float, least: int = 2) -> Computed:
    """Advantages of each token, (B, T), made by an algorithm for whole answers, of rewards by turn.

    A turn's reward is its return, G_k = r_k + discount G_{k+1}: what was earned before it does not depend on it, and
    only adds variance (the policy gradient theorem's reward to come). It is compared with the k-th turns of its group's
    other samples, as rLLM (`per_step`) and MT-GRPO (arXiv 2505.11821) do: those have had as many answers. GiGPO
    (arXiv 2505.10978) compares turns that begin in equal states, and needs such to repeat. A turn that fewer samples
    have than `least` is compared with the other samples' turns at the last place that so many have, and never with
    turns of its own sample: how many of these there are, and what they earned, depends on what it says. So each
    baseline is made of other samples' returns beside the turn's own.

    With one turn a sample, or as many in all samples of a group, discount 1 and all reward in the last one, these are
    the algorithm's advantages of whole answers.
    """
    turns = outcomes.turns
    assert turns is not None, "the algorithm asks for rewards by turn, so there are some"
    returns_BN = turn_returns(turns.rewards_BN, discount)
    units = _compared(turns.counts_B.tolist(), outcomes.groups_B.tolist(), max(2, least))
    rewards_U = torch.stack([returns_BN[unit.sample, unit.turn] for unit in units])
    return _apart(advantages, outcomes, units, rewards_U)


def by_role(compute: Compute, outcomes: Outcomes, least: int = 2, *, credit: bool = False) -> Computed:
    """Advantages of each token, (B, T), of samples in which several roles spoke.

    What a role said in a sample is a sample of its own. Its reward is the sum of its turns' rewards, and it is compared
    with what the same role came to in its group's other samples. A role that spoke in fewer of them than `least` has
    advantage 0. What an algorithm computes of a whole batch, such as the spread that it whitens by, is each role's
    own: roles earn on scales of their own. `credit`: `compute` gives credit by turn.
    """
    turns = outcomes.turns
    assert turns is not None and turns.roles_BN is not None
    advantages_BT = torch.zeros(outcomes.mask_BT.shape, dtype=outcomes.rewards_B.dtype)
    returns_BT: Tensor | None = None
    for role, units in sorted(_spoken(turns, outcomes.groups_B.tolist(), least).items()):
        own_UN = torch.zeros(len(units), turns.rewards_BN.shape[1], dtype=torch.bool)
        for row, unit in enumerate(units):
            own_UN[row, unit.turn : unit.turn + unit.turns] = True
        places_UN = torch.argsort((~own_UN).long(), dim=1, stable=True)
        samples_U = torch.tensor([unit.sample for unit in units])
        rewards_UN = (turns.rewards_BN[samples_U] * own_UN).gather(1, places_UN)
        tokens_UN = (turns.tokens_BN[samples_U] * own_UN).gather(1, places_UN)
        counts_U = torch.tensor([unit.turns for unit in units])
        values_B, cut_B = outcomes.bootstrap_values_B, turns.cut_roles_B
        if values_B is not None and cut_B is not None:
            values_B = values_B * (cut_B == role)
        own = replace(outcomes, bootstrap_values_B=values_B)
        spoke = Turns(rewards_UN, tokens_UN, counts_U) if credit else None
        found = _apart(compute, own, units, rewards_UN.sum(1), spoke)
        if isinstance(found, Advantages):
            returns_BT = found.returns + (0 if returns_BT is None else returns_BT)
        advantages_BT += found.advantages if isinstance(found, Advantages) else found
    return advantages_BT if returns_BT is None else Advantages(advantages_BT, returns_BT)


@dataclass(frozen=True)
class _Unit:
    """What is an answer of its own: `turns` of a sample from `turn` on. `learned`: else it is there to compare with."""

    group: int
    sample: int
    turn: int
    turns: int = 1
    learned: bool = True


def _apart(
    compute: Compute,
    outcomes: Outcomes,
    units: Sequence[_Unit],
    rewards_U: Tensor,
    spoke: Turns | None = None,
) -> Computed:
    """Advantages of each token, (B, T), of units as answers; those that are compared follow each other."""
    turns, mask_BT = outcomes.turns, outcomes.mask_BT
    assert turns is not None
    sample_U = torch.tensor([unit.sample for unit in units])
    of_BN = [turns.tokens_BN[unit.sample, unit.turn : unit.turn + unit.turns] for unit in units]
    first_U = torch.stack([turns.starts_BN[unit.sample, unit.turn] for unit in units])
    tokens_U = torch.tensor(
        [int(own.sum()) if unit.learned else 0 for own, unit in zip(of_BN, units, strict=True)]
    )
    # A sample that carries no loss has fewer places than tokens, maybe none.
    tokens_U = torch.minimum(tokens_U, (mask_BT.shape[1] - first_U).clamp(min=0))
    unit_K = torch.repeat_interleave(torch.arange(len(units)), tokens_U)
    place_K = torch.arange(len(unit_K)) - (tokens_U.cumsum(0) - tokens_U)[unit_K]
    there = (sample_U[unit_K], first_U[unit_K] + place_K)

    def cut(values_BT: Tensor) -> Tensor:
        """(U, P): a row for each unit."""
        values_UP = values_BT.new_zeros(len(units), max(1, int(tokens_U.max())))
        values_UP[unit_K, place_K] = values_BT[there]
        return values_UP

    def joined(values_UP: Tensor) -> Tensor:
        """(B, T): undoes `cut`."""
        values_BT = values_UP.new_zeros(mask_BT.shape)
        values_BT[there] = values_UP[unit_K, place_K]
        return values_BT

    values_B, greedy_B = outcomes.bootstrap_values_B, outcomes.greedy_B
    found = compute(
        replace(
            outcomes,
            rewards_B=rewards_U,
            groups_B=torch.tensor([unit.group for unit in units]),
            mask_BT=cut(mask_BT),
            lengths_B=torch.stack([own.max() for own in of_BN]),
            columns_BT={name: cut(column_BT) for name, column_BT in outcomes.columns_BT.items()},
            bootstrap_values_B=None if values_B is None else values_B[sample_U],
            greedy_B=None if greedy_B is None else greedy_B[sample_U],
            turns=spoke,
        )
    )
    if isinstance(found, Advantages):
        return Advantages(joined(found.advantages), joined(found.returns))
    return joined(found)


def _spoken(turns: Turns, groups: list[int], least: int) -> dict[int, list[_Unit]]:
    """What each role said, by role; in the samples of a group where so many have it, one behind the other."""
    assert turns.roles_BN is not None
    spoke: dict[tuple[int, int], list[_Unit]] = defaultdict(list)
    for sample, (group, roles) in enumerate(zip(groups, turns.roles_BN.tolist(), strict=True)):
        turn = 0
        for role, run in groupby(each for each in roles if each >= 0):
            count = len(list(run))
            spoke[role, group].append(_Unit(group, sample, turn, count))
            turn += count
    found: dict[int, list[_Unit]] = defaultdict(list)
    for (role, _), units in sorted(spoke.items()):
        if len(units) >= least:
            found[role] += units
    return found


def _compared(counts: list[int], groups: list[int], least: int) -> list[_Unit]:
    """All turns, those that are compared one behind the other."""
    found: list[_Unit] = []
    number = 0
    for _, run in groupby(range(len(groups)), groups.__getitem__):
        samples, last = list(run), 0
        for turn in range(max(counts[sample] for sample in samples)):
            having = [sample for sample in samples if counts[sample] > turn]
            if len(having) >= least or not turn:
                found += [_Unit(number, sample, turn) for sample in having]
                last, number = turn, number + 1
                continue
            for sample in having:
                others = [each for each in samples if each != sample and counts[each] > last]
                found.append(_Unit(number, sample, turn))
                found += [_Unit(number, each, last, learned=False) for each in others]
                number += 1
    return found
