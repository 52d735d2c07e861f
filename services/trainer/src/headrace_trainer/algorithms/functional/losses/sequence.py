"""Policy losses whose ratio belongs to a whole sequence: GSPO, GMPO and VESPO.

Shapes: B sequences, T tokens of a padded row; arguments common to all losses as in `policy`. A micro-batch must hold
whole sequences: the ratio is a mean over all trained tokens of one (`pad_sequences` makes rows of flat tokens).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.policy import (
    LOG_RATIO_LIMIT,
    clipped_terms,
    log_ratio,
    token_advantages,
)
from headrace_trainer.algorithms.functional.tensors import (
    bool_mask,
    masked,
    per_token,
    sequence_lengths,
    sequence_mean,
)

__all__ = ["GspoLevel", "gmpo_terms", "gspo_terms", "vespo_terms"]

GspoLevel = Literal["sequence", "token", "product"]
# verl's bound on a sequence's log-ratio, from above.
SEQUENCE_LOG_RATIO_LIMIT = 10.0
# TRL's bound on the logarithm of VESPO's sequence weight, from below.
VESPO_LOG_FLOOR = math.log(1e-8)


def gspo_terms(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float | None = 4e-4,
    dual_clip: float | None = None,
    level: GspoLevel = "sequence",
) -> Terms:
    """GSPO (arXiv 2507.18071): PPO's clipped surrogate of the sequence ratio s = exp(mean_t log(p_t / p_old_t)).

    `level="sequence"` (eq. 5; OpenRLHF, TRL): every token's ratio is s, and the gradient passes through s.
    `level="token"` (GSPO-token, eq. 14; verl): s_t = sg(s) p_t / sg(p_t), of the same value. Both have the same
    gradient when the advantages of a sequence are equal. `level="product"` takes the sum in place of the mean: the
    plain ratio of the whole answer (TRL's RLOO). log s is clamped at 10 from above, as verl does.
    The default clip range is the paper's; give both bounds to change it (clip_high None is clip_low).
    Aggregation: the paper's is seq-mean-token-mean; TRL's LUSPO is seq-mean-token-sum.

    Metrics: clip_fraction, dual_clip_fraction, approx_kl, ratio.
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, trained_BT, limit=None)
    mean_B1 = sequence_mean(log_ratio_BT, trained_BT)[:, None]
    if level == "token":
        kept_BT = masked(log_probs_BT, trained_BT)
        power_BT = kept_BT - kept_BT.detach() + mean_B1.detach()
    elif level == "sequence":
        power_BT = mean_B1.expand_as(log_ratio_BT)
    elif level == "product":
        power_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    else:
        raise ValueError(f"unknown level {level!r}: choose sequence, token or product")
    ratio_BT = masked(power_BT.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp(), trained_BT)
    advantage_BT = token_advantages(advantages, log_probs_BT, trained_BT)
    terms = clipped_terms(ratio_BT, advantage_BT, clip_low, clip_high, dual_clip)
    terms.metrics["approx_kl"] = -log_ratio_BT.detach()
    return terms


def gmpo_terms(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float | None = None,
    weights: Tensor | None = None,
) -> Terms:
    """GMPO (arXiv 2507.20673, eq. 4): the geometric mean of a sequence's clipped token ratios, times its advantage.

    L_i = -A_i exp(mean_t log-clip(r_t)); where A > 0 log r is bounded by clip_high from above, where A < 0 by
    -clip_low from below: the clip range is in log space. A_i is the mean of the tokens' advantages.
    Aggregation: mean over sequences (`seq-mean-token-sum` of terms that add up to L_i); `total` is a number of
    sequences. Convention: verl's, but a sequence without trained tokens does not count (verl divides by B) and
    log-ratios are clamped to [-20, 20] first.

    Each sequence's loss is shared equally by its tokens, which add up to it. `weights` enter here, as a geometric mean
    over the sequence. Metrics: clip_fraction, approx_kl, ratio.
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, trained_BT)
    advantage_BT = token_advantages(advantages, log_probs_BT, trained_BT)
    sign_BT = advantage_BT.sign()
    clipped_BT = log_ratio_BT.clamp(-clip_low, clip_low if clip_high is None else clip_high)
    bounded_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * clipped_BT)
    ratio_B = sequence_mean(bounded_BT, trained_BT).exp()
    if weights is not None:
        log_weight_BT = masked(per_token(weights, log_probs_BT), trained_BT).clamp(min=1e-10).log()
        ratio_B = ratio_B * sequence_mean(log_weight_BT, trained_BT).exp()
    loss_B = -sequence_mean(advantage_BT, trained_BT) * ratio_B
    share_B1 = 1 / sequence_lengths(trained_BT).clamp(min=1)[:, None]
    metrics = {
        "clip_fraction": ((clipped_BT != log_ratio_BT) & (advantage_BT != 0)).float(),
        "approx_kl": -log_ratio_BT.detach(),
        "ratio": per_token(ratio_B.detach(), log_probs_BT),
    }
    return Terms(masked(loss_B[:, None] * share_B1.expand_as(log_probs_BT), trained_BT), metrics)


def vespo_terms(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    weights: Tensor | None = None,
) -> Terms:
    """VESPO (arXiv 2602.10693): L_t = -sg(phi(W)) A log p, phi(W) = W^k exp(lambda (1 - W)), W the sequence's ratio.

    k and lambda are those of the advantage's sign. Convention: TRL's; log W is clamped to [log 1e-8, 20], and
    importance `weights` multiply into W rather than into the loss.

    `weights` enter here, into W. Metrics: approx_kl, sequence_weight.
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, trained_BT).detach()
    advantage_BT = token_advantages(advantages, log_probs_BT, trained_BT)
    log_weight_B1 = log_ratio_BT.sum(-1, keepdim=True)
    if weights is not None:
        given_BT = masked(per_token(weights, log_probs_BT), trained_BT)
        log_given_BT = given_BT.log().clamp(VESPO_LOG_FLOOR, LOG_RATIO_LIMIT)
        log_weight_B1 = log_weight_B1 + masked(log_given_BT, trained_BT).sum(-1, keepdim=True)
    log_weight_B1 = log_weight_B1.clamp(VESPO_LOG_FLOOR, LOG_RATIO_LIMIT)
    helps_BT = advantage_BT >= 0
    k_BT = torch.where(helps_BT, k_positive, k_negative)
    lambda_BT = torch.where(helps_BT, lambda_positive, lambda_negative)
    phi_BT = (lambda_BT + k_BT * log_weight_B1 - lambda_BT * log_weight_B1.exp()).exp()
    loss_BT = -phi_BT.to(log_probs_BT.dtype) * advantage_BT * masked(log_probs_BT, trained_BT)
    return Terms(loss_BT, {"approx_kl": -log_ratio_BT, "sequence_weight": phi_BT})
