"""KL estimates from the log-probs of sampled tokens, as a reward or a loss, and controllers of its coefficient.

Shapes: B sequences, T tokens of a padded row.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.policy import LOG_RATIO_LIMIT
from headrace_trainer.algorithms.functional.tensors import bool_mask, masked, token_rewards

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "KLEstimator",
    "kl_estimate",
    "kl_penalised_rewards",
    "kl_terms",
]

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: KLEstimator = "k3",
    mask: Tensor | None = None,
    *,
    limit: float | None = 10.0,
    limit_all: bool = False,
) -> Tensor:
    """Estimate of KL(p || ref) at each token that p sampled (Schulman, joschu.net/blog/kl-approx.html).

    With d = log p - log ref: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; abs = |d|. A name with "+" has that value
    and k2's gradient (straight-through), whose expectation is the gradient of the KL. Any shape; differentiable in
    `log_probs`; 0 outside the mask. Barrier: trajectory.
    Convention (verl, RLinf): only k3 is bounded, d to [-20, 20] first and the result to [-limit, limit]; beyond a
    bound the gradient is 0. `limit_all` bounds every estimate (OpenRLHF, 10); TRL bounds none: with `limit=None` k3
    keeps only the bound on d, so that it stays finite.
    """
    if estimator not in get_args(KLEstimator):
        raise ValueError(
            f"unknown KL estimator {estimator!r}: choose one of {', '.join(get_args(KLEstimator))}"
        )
    trained = bool_mask(mask, log_probs)
    difference = masked(log_probs, trained) - masked(ref_log_probs.detach(), trained)
    value = _forward(difference, estimator.removesuffix("+"))
    if limit is not None and (limit_all or estimator.startswith("k3")):
        value = value.clamp(-limit, limit)
    if estimator.endswith("+"):
        k2 = 0.5 * difference.square()
        value = value.detach() + k2 - k2.detach()
    return value


def _forward(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-bounded).exp() - 1 + bounded


def kl_terms(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: KLEstimator = "k3",
    limit: float | None = 10.0,
    limit_all: bool = False,
) -> Terms:
    """The KL estimate as a loss, to be added to a policy loss times a coefficient. Metrics: kl.

    `weights` of `token_loss` may carry a gradient: the ratio p / p_old makes the off-policy correction of DeepSeek-V3.2
    (TRL's `use_bias_correction_kl`).
    """
    value = kl_estimate(log_probs, ref_log_probs, estimator, mask, limit=limit, limit_all=limit_all)
    return Terms(value, {"kl": value.detach()})


@torch.no_grad()
def kl_penalised_rewards(
    rewards: Tensor, kl_BT: Tensor, coefficient: float, mask_BT: Tensor | None = None
) -> Tensor:
    """Token rewards r_t - coefficient * kl_t, (B, T), 0 outside the mask (RLHF, arXiv 1909.08593, eq. 2).

    (B,) outcomes go to each sequence's last trained token, (B, T) rewards stay where they are. Convention: OpenRLHF's
    `compute_reward`, verl's `apply_kl_penalty`. A sequence without a trained token keeps no reward.
    """
    trained_BT = bool_mask(mask_BT, kl_BT)
    return token_rewards(rewards, trained_BT) - coefficient * masked(kl_BT, trained_BT)


class FixedKLController:
    """A coefficient that does not change."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, current_kl: float, samples: int) -> float:
        """The coefficient, as it was."""
        return self.value


class AdaptiveKLController:
    """A coefficient that steers the KL to a target (arXiv 1909.08593, section 2.2). `value` is its whole state.

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon, as verl, OpenRLHF and TRL.
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target ({target}) and horizon ({horizon}) of an adaptive KL must be above 0")
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, samples: int) -> float:
        """The coefficient for the next step, after a mean KL over `samples` sequences."""
        error = min(0.2, max(-0.2, current_kl / self.target - 1))
        self.value *= 1 + error * samples / self.horizon
        return self.value
