"""How token losses become one number, exactly, even when the totals are known only at the end of a step.

Shapes: B sequences, T tokens of a padded row.

A step's loss is numerator / total. Over micro-batches whose total is not known yet, add up
`aggregate(..., total=1)` and `aggregation_total(mask, mode)` apart, and divide once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from headrace_trainer.algorithms.functional.tensors import bool_mask, masked, per_token, sequence_lengths

__all__ = [
    "AggregationMode",
    "LossResult",
    "Terms",
    "aggregate",
    "aggregation_total",
    "masked_mean",
    "token_loss",
]

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class Terms(NamedTuple):
    """What each token adds to a loss, before aggregation: (B, T) tensors (token-wise losses take any shape)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class LossResult(NamedTuple):
    """A loss (scalar, differentiable) and its metrics: detached means over the trained tokens that were given."""

    loss: Tensor
    metrics: dict[str, Tensor]


def aggregate(
    values_BT: Tensor,
    mask_BT: Tensor | None = None,
    mode: AggregationMode = "token-mean",
    *,
    total: float | Tensor | None = None,
    norm_length: float | None = None,
) -> Tensor:
    """Token values as one scalar: a numerator divided by `total`.

    | mode | numerator | total if none is given |
    | --- | --- | --- |
    | token-mean (DAPO, arXiv 2503.14476, eq. 8) | sum over tokens | trained tokens |
    | seq-mean-token-sum | sum over tokens | sequences with a trained token |
    | seq-mean-token-mean (GRPO, arXiv 2402.03300, eq. 3) | sum of each sequence's token mean | the same |
    | seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783) | sum over tokens / norm_length | the same |

    `norm_length` is a constant such as the generation budget in tokens; T if None, as verl 0.9 and TRL. Give `total`
    to divide by the whole step's total (or by 1 for a bare numerator); a total taken from the mask is at least 1, so
    that an empty mask gives 0. Fully masked sequences do not count (as verl and OpenRLHF; TRL counts them: give
    `total=B` for that). Values outside the mask do not matter, NaN included.
    Raises ValueError for an unknown mode, or for `norm_length` with a mode that does not use it.
    """
    if norm_length is not None and mode != "seq-mean-token-sum-norm":
        raise ValueError(
            f"norm_length has no effect on {mode!r}: use 'seq-mean-token-sum-norm' or leave it out"
        )
    trained_BT = bool_mask(mask_BT, values_BT)
    sums_B = masked(values_BT, trained_BT).sum(-1)
    if mode == "seq-mean-token-mean":
        sums_B = sums_B / sequence_lengths(trained_BT).clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        sums_B = sums_B / (values_BT.shape[-1] if norm_length is None else norm_length)
    if total is None:
        total = aggregation_total(trained_BT, mode).clamp(min=1)
    return sums_B.sum() / total


def aggregation_total(mask_BT: Tensor, mode: AggregationMode = "token-mean") -> Tensor:
    """What `aggregate` divides by: trained tokens for token-mean, else sequences that have any. Scalar, int64.

    The totals of a step's micro-batches add up to that of the step.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(
            f"unknown aggregation {mode!r}: choose one of {', '.join(get_args(AggregationMode))}"
        )
    if mode == "token-mean":
        return (mask_BT != 0).sum()
    return (sequence_lengths(mask_BT) > 0).sum()


def masked_mean(values_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Mean over the trained tokens, scalar; 0 for an empty mask."""
    return aggregate(values_BT, mask_BT, "token-mean")


def token_loss(
    terms_of: Callable[..., Terms],
    *tensors: Tensor | None,
    mask_BT: Tensor | None = None,
    aggregation: AggregationMode = "token-mean",
    total: float | Tensor | None = None,
    norm_length: float | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> LossResult:
    """The loss of a `..._terms` function, which takes `tensors`, the mask and `options`.

    `mask_BT` is 1 at trained tokens (none: all). `weights`, (B, T) or (B,), multiply tokens (see `correction`).
    Metrics are means over the mask whatever `total` is.
    """
    terms = terms_of(*tensors, mask_BT, **options)
    loss_BT = terms.loss
    if weights is not None:
        loss_BT = loss_BT * masked(per_token(weights, loss_BT), bool_mask(mask_BT, loss_BT))
    loss = aggregate(loss_BT, mask_BT, aggregation, total=total, norm_length=norm_length)
    metrics = {name: masked_mean(values_BT.detach(), mask_BT) for name, values_BT in terms.metrics.items()}
    return LossResult(loss, metrics)
