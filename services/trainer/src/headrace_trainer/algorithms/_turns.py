"""Credit by turn: each turn of a conversation is an answer of its own, worth what is earned from it on.

Shapes: B samples, N turns of the one that has most, T trained tokens; U turns of all samples, P tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
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
