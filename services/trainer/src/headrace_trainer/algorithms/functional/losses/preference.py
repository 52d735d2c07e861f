"""Losses of preferences, each a function of what is known of whole answers; gradients by autograd.

P pairs. A log-ratio is the sum over an answer's tokens of log p - log p_reference. Names and signs are TRL's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid


def dpo_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-log sigmoid of the margin of two log-ratios (arXiv 2305.18290); with label smoothing cDPO. (P,)."""
    margin_P = beta * (chosen_P - rejected_P)
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def ipo_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """Squared distance of the margin from 1 / (2 beta) (arXiv 2310.12036), of log-ratios by token. (P,)."""
    return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2


def simpo_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log sigmoid of the margin of two mean log-probs less `gamma` (arXiv 2405.14734). (P,)."""
    return -logsigmoid(beta * (chosen_P - rejected_P) - gamma)


def log_odds(mean_log_probs_P: Tensor) -> Tensor:
    """log(p / (1 - p)) of mean log-probs; 1 - p is at least the smallest step of their type. (P,)."""
    rest_P = -torch.expm1(mean_log_probs_P)
    return mean_log_probs_P - torch.log(rest_P.clamp(min=torch.finfo(rest_P.dtype).eps))


def orpo_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float) -> Tensor:
    """The chosen answer's negative mean log-prob, and the odds ratio of two (arXiv 2403.07691). (P,)."""
    return -chosen_P - beta * logsigmoid(log_odds(chosen_P) - log_odds(rejected_P))


def kto_loss(
    ratios_P: Tensor, good_P: Tensor, distance: Tensor, *, beta: float, weights: tuple[float, float]
) -> Tensor:
    """Value of single answers by their log-ratio against `distance`, the batch's KL from the reference, which has no
    gradient (arXiv 2402.01306); `weights` of good and of bad ones. (P,).
    """
    sign_P = torch.where(good_P, 1.0, -1.0).to(ratios_P.dtype)
    weight_P = torch.where(good_P, *weights).to(ratios_P.dtype)
    return weight_P * (1 - torch.sigmoid(beta * sign_P * (ratios_P - distance)))


def step_losses(values_K: Tensor, labels_K: Tensor) -> Tensor:
    """Cross entropy of labels in [0, 1], of which values are the logits (arXiv 2305.20050). (K,)."""
    return binary_cross_entropy_with_logits(values_K, labels_K.to(values_K.dtype), reduction="none")
