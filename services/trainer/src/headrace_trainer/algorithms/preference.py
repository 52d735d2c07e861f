"""Learning from preferences: two given answers to a prompt, of which sample 0 is the better one.

A step is one optimizer step at the weights at which the batch was read, so the gradient of a loss f of whole answers
is that of the sum over tokens of -A log p with A = -∂f/∂(log p of the answer): no pair has to be computed together.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from headrace_servicekit.registry import Options
from torch import Tensor

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, GivenRewards, Outcomes
from headrace_trainer.algorithms.functional.losses import preference as losses
from headrace_trainer.algorithms.given import DpoOptions, KtoOptions, OrpoOptions, PairOptions, SimpoOptions
from headrace_trainer.algorithms.supervised import GivenAnswers

Compared = TypeVar("Compared", bound=Options)


class Pairwise(GivenAnswers[Compared]):
    """P pairs; subclasses give each one's loss, of what `columns` have: log-ratios, log-probs, or a head's values."""

    least_group = 2
    columns: tuple[str, ...] = (OLD_LOG_PROBS, REFERENCE_LOG_PROBS)
    by_token = False
    """Whether what is compared is an answer's mean over its tokens."""

    def __init__(self, options: Compared) -> None:
        super().__init__(options)
        self._scale = float(getattr(options, "beta", 1.0))
        self._figures: dict[str, float] = {}

    @property
    def given_rewards(self) -> GivenRewards:
        """Of its columns."""
        return GivenRewards(self.columns, self.by_token)

    @abstractmethod
    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """(P,) from the values of chosen and rejected answers; `rewards_P2` are the rows' labels."""

    def denominator(self, tokens: float, sequences: int) -> float:
        """The pairs."""
        return max(1.0, sequences / 2)

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """-∂f/∂log p of each answer at each of its tokens; 0 in a group without two answers."""
        columns, mask_BT = outcomes.columns_BT, outcomes.mask_BT
        read_BT, *others = (columns[name] for name in self.columns)
        for other_BT in others:
            read_BT = read_BT - other_BT
        counts_B = mask_BT.sum(1)
        scale_B = (1 / counts_B.clamp(min=1)).to(read_BT) if self.by_token else torch.ones_like(read_BT[:, 0])
        values_B = ((read_BT * mask_BT).sum(1) * scale_B).requires_grad_()
        first_P = _first_of_pairs(outcomes.groups_B, counts_B)
        pairs_P2 = torch.stack([first_P, first_P + 1], 1)
        found_P = self.pair_losses(values_B[pairs_P2], outcomes.rewards_B[pairs_P2])
        (gradient_B,) = torch.autograd.grad(found_P.sum(), values_B)
        self._figures = self._measured(values_B.detach()[pairs_P2], outcomes.rewards_B[pairs_P2])
        self._figures |= {"loss": float(found_P.detach().mean())} if len(found_P) else {}
        return -(gradient_B * scale_B)[:, None] * mask_BT

    def batch_figures(self) -> dict[str, float]:
        """The loss over pairs; rewards of both sides, their margin, and how often it is positive."""
        return self._figures

    def _measured(self, values_P2: Tensor, rewards_P2: Tensor) -> dict[str, float]:
        if not len(values_P2):
            return {}
        chosen_P, rejected_P = (self._scale * values_P2).unbind(1)
        margin_P = chosen_P - rejected_P
        return {
            "reward_chosen": float(chosen_P.mean()),
            "reward_rejected": float(rejected_P.mean()),
            "reward_margin": float(margin_P.mean()),
            "reward_accuracy": float((margin_P > 0).double().mean()),
        }


def _first_of_pairs(groups_B: Tensor, counts_B: Tensor) -> Tensor:
    """Places of the first answers of groups of two or more, both of which carry loss."""
    starts_B = torch.ones_like(groups_B, dtype=torch.bool)
    starts_B[1:] = groups_B[1:] != groups_B[:-1]
    paired_B = torch.zeros_like(starts_B)
    paired_B[:-1] = starts_B[:-1] & ~starts_B[1:] & (counts_B[:-1] > 0) & (counts_B[1:] > 0)
    return paired_B.nonzero()[:, 0]


class Dpo(Pairwise[DpoOptions]):
    """DPO, and with label smoothing cDPO."""

    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """By `beta` and `label_smoothing`."""
        options = self.options
        return losses.dpo_loss(
            *values_P2.unbind(1), beta=options.beta, label_smoothing=options.label_smoothing
        )


class Ipo(Pairwise[PairOptions]):
    """IPO, of log-ratios by token as TRL computes it."""

    by_token = True

    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """By `beta`."""
        return losses.ipo_loss(*values_P2.unbind(1), beta=self.options.beta)


class Simpo(Pairwise[SimpoOptions]):
    """SimPO."""

    columns = (OLD_LOG_PROBS,)
    by_token = True

    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """By `beta` and `gamma`."""
        return losses.simpo_loss(*values_P2.unbind(1), beta=self.options.beta, gamma=self.options.gamma)


class Orpo(Pairwise[OrpoOptions]):
    """ORPO."""

    columns = (OLD_LOG_PROBS,)
    by_token = True

    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """By `beta`."""
        return losses.orpo_loss(*values_P2.unbind(1), beta=self.options.beta)


class Kto(Pairwise[KtoOptions]):
    """KTO: sample 0 is the row's answer, which is good where its reward is positive; sample 1, another row's answer to
    the same prompt, has no gradient, and measures the distance to the reference.
    """

    def pair_losses(self, values_P2: Tensor, rewards_P2: Tensor) -> Tensor:
        """By `beta` and the weights."""
        own_P, others_P = values_P2.unbind(1)
        distance = others_P.detach().mean().clamp(min=0)
        weights = self.options.desirable_weight, self.options.undesirable_weight
        return losses.kto_loss(own_P, rewards_P2[:, 0] > 0, distance, beta=self.options.beta, weights=weights)

    def _measured(self, values_P2: Tensor, rewards_P2: Tensor) -> dict[str, float]:
        """The rewards of good and of bad answers, where the batch has such."""
        rewards_P, good_P = self.options.beta * values_P2[:, 0], rewards_P2[:, 0] > 0
        sides = {"reward_chosen": rewards_P[good_P], "reward_rejected": rewards_P[~good_P]}
        found = {name: float(side.mean()) for name, side in sides.items() if len(side)}
        if len(found) == 2:
            found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
        return found
