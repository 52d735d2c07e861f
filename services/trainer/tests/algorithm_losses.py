"""The aggregated losses that other packages' vectors are of: `token_loss` of our terms, as those packages aggregate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace_trainer.algorithms import functional as f
from headrace_trainer.algorithms.functional import LossResult, Terms
from torch import Tensor


def _loss(
    terms_of: Callable[..., Terms],
    count: int,
    *tensors: Tensor | None,
    mask_BT: Tensor | None = None,
    **given: Any,
) -> LossResult:
    """Of `count` tensors, behind which the mask may come."""
    mask_BT = tensors[count] if len(tensors) > count else mask_BT
    return f.token_loss(terms_of, *tensors[:count], mask_BT=mask_BT, **given)


ppo_loss = partial(_loss, f.ppo_terms, 3)
reinforce_loss = partial(_loss, f.reinforce_terms, 2)
cispo_loss = partial(_loss, f.cispo_terms, 3)
sapo_loss = partial(_loss, f.sapo_terms, 3, aggregation="seq-mean-token-mean")
gspo_loss = partial(_loss, f.gspo_terms, 3, aggregation="seq-mean-token-mean")
clip_cov_loss = partial(_loss, f.clip_cov_terms, 3)
kl_cov_loss = partial(_loss, f.kl_cov_terms, 3)
kl_loss = partial(_loss, f.kl_terms, 2)
value_loss = partial(_loss, f.value_terms, 3)
distillation_loss = partial(_loss, f.distillation_terms, 2)


def gmpo_loss(*tensors: Tensor | None, weights: Tensor | None = None, **given: Any) -> LossResult:
    """Weights enter the terms, which add up to a sequence's loss."""
    return _loss(
        partial(f.gmpo_terms, weights=weights), 3, *tensors, aggregation="seq-mean-token-sum", **given
    )


def vespo_loss(*tensors: Tensor | None, weights: Tensor | None = None, **given: Any) -> LossResult:
    """Weights enter the terms."""
    return _loss(partial(f.vespo_terms, weights=weights), 3, *tensors, **given)


def sft_loss(log_probs_BT: Tensor, mask_BT: Tensor | None = None, **given: Any) -> LossResult:
    """REINFORCE whose advantages are 1."""
    return reinforce_loss(log_probs_BT, log_probs_BT.detach().new_ones(log_probs_BT.shape), mask_BT, **given)


def decoupled_ppo_loss(
    new_BT: Tensor,
    proximal_BT: Tensor,
    behavior_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    behavior_weight_cap: float | None = None,
    **given: Any,
) -> LossResult:
    """RLinf's cap drops tokens from numerator and denominator."""
    if behavior_weight_cap is not None:
        mask_BT = f.behavior_mask(proximal_BT, behavior_BT, mask_BT, cap=behavior_weight_cap)
    return _loss(f.decoupled_ppo_terms, 4, new_BT, proximal_BT, behavior_BT, advantages, mask_BT, **given)
