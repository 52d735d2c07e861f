"""Losses of a critic, and entropy of the policy.

Shapes: B sequences, T tokens of a padded row, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import AggregationMode, Terms, aggregate
from headrace_trainer.algorithms.functional.tensors import bool_mask, masked

__all__ = ["entropy_bonus", "entropy_from_logits", "high_entropy_mask", "value_terms"]


def value_terms(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    clip: float | None = 0.2,
    huber_delta: float | None = None,
) -> Terms:
    """PPO's value loss with clipping (arXiv 2005.12729, section 3): max(h(V - R), h(V_clip - R)).

    V_clip = V_old + clip(V - V_old, -clip, clip). h(e) = e^2 / 2, or the Huber loss with `huber_delta` (RLinf). Without
    `clip` or old values h(V - R) alone. Barrier: that of the returns. Convention: the half is inside (verl, OpenRLHF
    multiply by 0.5 too); no further coefficient.

    Metrics: clip_fraction.
    """
    trained = bool_mask(mask, values)
    predicted, target = masked(values, trained), masked(returns.detach(), trained)
    plain = _half_square(predicted - target, huber_delta)
    if clip is None or old_values is None:
        return Terms(plain, {"clip_fraction": torch.zeros_like(plain)})
    old = masked(old_values.detach(), trained)
    clipped = _half_square(old + (predicted - old).clamp(-clip, clip) - target, huber_delta)
    return Terms(torch.maximum(plain, clipped), {"clip_fraction": (clipped > plain).float()})


def _half_square(error: Tensor, huber_delta: float | None) -> Tensor:
    square = 0.5 * error.square()
    if huber_delta is None:
        return square
    return torch.where(error.abs() < huber_delta, square, huber_delta * (error.abs() - 0.5 * huber_delta))


def entropy_from_logits(logits_BTV: Tensor) -> Tensor:
    """Entropy of each token's distribution in nats, (B, T), differentiable: -sum_v p log p."""
    log_probs_BTV = logits_BTV.log_softmax(-1)
    # An entry of probability 0 has log-prob -inf and adds 0.
    return -(log_probs_BTV.exp() * log_probs_BTV.clamp(min=torch.finfo(log_probs_BTV.dtype).min)).sum(-1)


def entropy_bonus(
    entropy_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    aggregation: AggregationMode = "token-mean",
    total: float | Tensor | None = None,
    norm_length: float | None = None,
) -> Tensor:
    """The aggregated entropy, scalar: subtract coefficient times this from a policy loss. Barrier: trajectory."""
    return aggregate(entropy_BT, mask_BT, aggregation, total=total, norm_length=norm_length)


@torch.no_grad()
def high_entropy_mask(entropy_BT: Tensor, mask_BT: Tensor | None = None, *, fraction: float = 0.2) -> Tensor:
    """Bool mask of the `fraction` of trained tokens of highest entropy (arXiv 2506.01939), (B, T). Barrier: batch.

    Convention: TRL's `top_entropy_quantile`: tokens at or above the (1 - fraction) quantile, linearly interpolated.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction}")
    trained_BT = bool_mask(mask_BT, entropy_BT)
    if not bool(trained_BT.any()):
        return trained_BT
    # torch.quantile refuses more than 2**24 values.
    ordered_K = entropy_BT[trained_BT].float().sort().values
    place = (1 - fraction) * (len(ordered_K) - 1)
    low, high = ordered_K[int(place)], ordered_K[min(int(place) + 1, len(ordered_K) - 1)]
    return trained_BT & (entropy_BT >= torch.lerp(low, high, place - int(place)))
