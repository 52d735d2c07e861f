"""Policy losses in which each token stands alone: PPO and its kin, CISPO, SAPO, REINFORCE, decoupled PPO.

Shapes: B sequences, T tokens of a padded row. Log-probs are (B, T), of the sampled tokens; advantages (B, T) or (B,).
Barrier: that of the advantages; each loss may be summed over micro-batches (see `aggregation`).

The `x_terms` functions give each token's loss, of tensors of any equal shape, such as flat tokens; `token_loss` makes
them one number. `mask` is 1 at trained tokens (none: all). Old log-probs None means log_probs.detach(): the first
update on the policy's own samples, where the ratio is 1.
Log-ratios are clamped to [-20, 20] before the exponential, as verl does, with no gradient beyond; advantages and old
log-probs get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.tensors import bool_mask, masked, per_token

__all__ = [
    "behavior_mask",
    "cispo_terms",
    "decoupled_ppo_terms",
    "interpolated_log_probs",
    "log_ratio",
    "ppo_terms",
    "reinforce_terms",
    "sapo_terms",
]

LOG_RATIO_LIMIT = 20.0


def log_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    mask: Tensor | None = None,
    limit: float | None = LOG_RATIO_LIMIT,
) -> Tensor:
    """log(p / p_old), differentiable in `log_probs`, clamped to +-limit, 0 outside the mask."""
    old = log_probs if old_log_probs is None else old_log_probs
    trained = bool_mask(mask, log_probs)
    ratio = masked(log_probs, trained) - masked(old.detach(), trained)
    return ratio if limit is None else ratio.clamp(-limit, limit)


def ppo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Terms:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), clip-higher and dual clip; the loss of GRPO and DAPO too.

    L_t = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = p / p_old; where A < 0 and `dual_clip` c > 1 is
    given, min(L_t, -A c) (arXiv 1912.09729, eq. 5). Clip-higher (DAPO, arXiv 2503.14476, eq. 10) is
    clip_high > clip_low; clip_high None is clip_low.
    Convention: no dual clip unless asked for (OpenRLHF, RLinf); verl always clips at c = 3. TRL's `delta` is
    `dual_clip` for delta > 1 + clip_high.

    Metrics: clip_fraction, dual_clip_fraction, approx_kl, ratio.
    """
    log_ratios = log_ratio(log_probs, old_log_probs, mask)
    advantage = token_advantages(advantages, log_probs, mask)
    terms = clipped_terms(log_ratios.exp(), advantage, clip_low, clip_high, dual_clip)
    terms.metrics["approx_kl"] = -log_ratios.detach()
    return terms


def decoupled_ppo_terms(
    log_probs: Tensor,
    proximal_log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Terms:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641, eq. 2; AReaL, arXiv 2505.24298, eq. 5).

    L_t = (p_prox / p_behav) PPO(p / p_prox, A): the proximal policy is a recent one (the step's weights before its
    first update), the behavior policy the one that sampled. Barrier: that of the advantages.
    With `behavior_mask` as the mask, tokens whose p_prox / p_behav exceeds a cap leave numerator and denominator, as
    in RLinf.

    Metrics of `ppo_terms` against the proximal policy, behavior_weight.
    """
    weight = log_ratio(proximal_log_probs, behavior_log_probs, mask).detach().exp()
    terms = ppo_terms(
        log_probs,
        proximal_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return Terms(terms.loss * weight, {**terms.metrics, "behavior_weight": weight})


@torch.no_grad()
def behavior_mask(
    proximal_log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None = None, *, cap: float
) -> Tensor:
    """Bool mask of the trained tokens with p_prox / p_behav <= cap, of the tokens' shape."""
    weight = log_ratio(proximal_log_probs, behavior_log_probs, mask).exp()
    return bool_mask(mask, weight) & (weight <= cap)


@torch.no_grad()
def interpolated_log_probs(
    log_probs: Tensor, behavior_log_probs: Tensor, versions: Tensor, current_version: int
) -> Tensor:
    """An estimate of the proximal log-probs where they were not computed (RLinf's, of the tokens' shape).

    log p_behav + a (log p - log p_behav), a = (current - 1 - version) / (current - version) within [0, 1]: linear in
    the policy version between the one that sampled a token and the current. `versions` is an integer tensor of the
    tokens' shape, or per sequence; a token of the current version, or with a negative one, has a = 0.
    """
    behind = (current_version - versions).to(log_probs.dtype)
    share = torch.where(
        (behind > 0) & (versions >= 0), (behind - 1) / behind.clamp(min=1), torch.zeros_like(behind)
    )
    while share.dim() < log_probs.dim():
        share = share.unsqueeze(-1)
    return behavior_log_probs + share.clamp(0, 1) * (log_probs - behavior_log_probs)


def reinforce_terms(log_probs: Tensor, advantages: Tensor, mask: Tensor | None = None) -> Terms:
    """REINFORCE (Williams 1992), also GPG's loss (arXiv 2504.02546, eq. 6): L_t = -A log p."""
    advantage = token_advantages(advantages, log_probs, mask)
    return Terms(-advantage * masked(log_probs, bool_mask(mask, log_probs)), {})


def cispo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.2,
) -> Terms:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): L_t = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

    No token loses its gradient; its weight alone is clipped. Convention: no lower clip unless asked for (the paper,
    TRL); verl clips both sides. TRL's `epsilon_high` is the bound itself, here 1 + clip_high.

    Metrics: clip_fraction, approx_kl, ratio.
    """
    log_ratios = log_ratio(log_probs, old_log_probs, mask).detach()
    ratio = log_ratios.exp()
    clipped = ratio.clamp(min=None if clip_low is None else 1 - clip_low, max=1 + clip_high)
    advantage = token_advantages(advantages, log_probs, mask)
    loss = -clipped * advantage * masked(log_probs, bool_mask(mask, log_probs))
    return Terms(
        loss, {"clip_fraction": (clipped != ratio).float(), "approx_kl": -log_ratios, "ratio": ratio}
    )


def sapo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Terms:
    """SAPO (arXiv 2511.20347, eq. 5): L_t = -A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of the clip.

    tau is `tau_positive` where A > 0, else `tau_negative` (verl's and TRL's defaults).

    Metrics: approx_kl, ratio.
    """
    log_ratios = log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratios.exp()
    advantage = token_advantages(advantages, log_probs, mask)
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return Terms(-gate * advantage, {"approx_kl": -log_ratios.detach(), "ratio": ratio.detach()})


def token_advantages(advantages: Tensor, like: Tensor, mask: Tensor | None) -> Tensor:
    """Detached advantages of the tokens' shape, 0 outside the mask."""
    return masked(per_token_or_same(advantages, like).detach(), bool_mask(mask, like))


def per_token_or_same(values: Tensor, like: Tensor) -> Tensor:
    """Values of the tokens' own shape as they are; per-sequence values spread over (B, T)."""
    return values if values.shape == like.shape else per_token(values, like)


def clipped_terms(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float | None, dual_clip: float | None
) -> Terms:
    """The clipped surrogate of a ratio. Raises ValueError when `dual_clip` is not above 1."""
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip bounds the ratio from above and must exceed 1, not {dual_clip}")
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    loss = torch.maximum(plain, clipped)
    metrics = {"clip_fraction": (clipped > plain).float(), "ratio": ratio.detach()}
    if dual_clip is not None:
        bound = -advantage * dual_clip
        metrics["dual_clip_fraction"] = ((loss > bound) & (advantage < 0)).float()
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return Terms(loss, metrics)
