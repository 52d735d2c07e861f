"""Reward models: a scalar head on the policy's body, which learns from pairs of answers or from labels of steps.

The one trained token of an answer, or of the beginning of one, stands behind it, so its value is of all that is judged.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace_trainer.algorithms._base import (
    VALUES,
    CriticPlan,
    GivenRewards,
    LossSums,
    Outcomes,
    TokenBatch,
    TurnCredit,
)
from headrace_trainer.algorithms.functional.losses.preference import step_losses
from headrace_trainer.algorithms.given import BradleyTerryOptions, JudgeOptions, PrmOptions
from headrace_trainer.algorithms.preference import Pairwise
from headrace_trainer.algorithms.supervised import GivenAnswers

Judging = TypeVar("Judging", bound=JudgeOptions)


class Judge(GivenAnswers[Judging]):
    """What learns by its head's values; `advantages` are -∂f/∂value."""

    columns: tuple[str, ...] = (VALUES,)
    bias = True
    """Whether its head has one."""

    def __init__(self, options: Judging) -> None:
        super().__init__(options)
        self.critic = CriticPlan(learning_rate=options.head_lr, bias=self.bias)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Weighted sum."""
        assert batch.values_K is not None
        return LossSums(-(batch.advantages_K * batch.values_K * batch.weights_K).sum())


class BradleyTerry(Judge[BradleyTerryOptions], Pairwise[BradleyTerryOptions]):
    """-log sigmoid of the difference of two rewards. A bias of the head would change nothing."""

    judge = "answers"
    bias = False

    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """By `center_coef`."""
        chosen_P, rejected_P = values_P2.unbind(1)
        centered_P = self.options.center_coef * (chosen_P + rejected_P) ** 2
        return -logsigmoid(chosen_P - rejected_P) + centered_P


class Prm(Judge[PrmOptions]):
    """The cross entropy of each step's label, of which the value is the logit; a step is a turn with its label for
    reward.
    """

    judge = "steps"
    branch_weights = "whole"
    turn_credit = TurnCredit(apart=False)
    given_rewards = GivenRewards((VALUES,))

    def __init__(self, options: PrmOptions) -> None:
        super().__init__(options)
        self._figures: dict[str, float] = {}

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """The label less the probability."""
        turns, mask_BT = outcomes.turns, outcomes.mask_BT
        assert turns is not None
        ended_BN = torch.cat([turns.rewards_BN, torch.zeros_like(turns.rewards_BN[:, :1])], 1)
        labels_K = ended_BN.gather(1, turns.of_tokens(mask_BT.shape[1]))[mask_BT]
        values_K = outcomes.columns_BT[VALUES][mask_BT].requires_grad_()
        losses_K = step_losses(values_K, labels_K)
        found_BT = torch.zeros_like(outcomes.columns_BT[VALUES])
        found_BT[mask_BT] = -torch.autograd.grad(losses_K.sum(), values_K)[0]
        self._figures = _measured(losses_K.detach(), values_K.detach(), labels_K) if len(values_K) else {}
        return found_BT

    def batch_figures(self) -> dict[str, float]:
        """The loss over steps, the mean values of good and of bad ones, and how often a value has its label's sign."""
        return self._figures


def _measured(losses_K: Tensor, values_K: Tensor, labels_K: Tensor) -> dict[str, float]:
    good_K = labels_K > 0.5
    sides = {"reward_chosen": values_K[good_K], "reward_rejected": values_K[~good_K]}
    return {
        "loss": float(losses_K.mean()),
        "reward_accuracy": float(((values_K > 0) == good_K).double().mean()),
        **{name: float(side.mean()) for name, side in sides.items() if len(side)},
    }
