"""From a forward to what losses take: of an algorithm, and of a supervised warm-up. Knows no model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, TokenBatch
from headrace_trainer.learning.packing import MicroBatch


class Forward(NamedTuple):
    """Of the trained tokens: log-probs, entropies, values, and log-probs of the M words that a teacher finds likeliest
    there.
    """

    log_probs_K: Tensor
    entropy_K: Tensor
    values_K: Tensor | None = None
    top_log_probs_KM: Tensor | None = None
    drafted: Tensor | None = None
    """What `drafting.draft_loss` gives, of a model with a head that drafts."""


def supervised(found_K: Forward, batch: MicroBatch) -> Tensor:
    """The negative log-likelihood of the trained tokens, weighted and not divided."""
    return -(found_K.log_probs_K * batch.weights_K).sum()


def token_batch(found_K: Forward, batch: MicroBatch) -> TokenBatch:
    """The trained tokens of a micro-batch as an algorithm's loss takes them."""
    log_probs_K, entropy_K, values_K, top_KM, _ = found_K
    own_K = log_probs_K.detach()
    old_K, teacher_UM = batch.columns_K.get(OLD_LOG_PROBS), batch.teacher_log_probs_UM
    return TokenBatch(
        log_probs_K=log_probs_K,
        old_log_probs_K=own_K if old_K is None else torch.where(old_K.isnan(), own_K, old_K),
        engine_log_probs_K=batch.engine_log_probs_K,
        advantages_K=batch.advantages_K,
        weights_K=batch.weights_K,
        sequences_K=batch.sequences_K,
        columns_K=batch.columns_K,
        entropy_K=entropy_K,
        values_K=values_K,
        top_log_probs_KM=top_KM,
        teacher_log_probs_KM=None if teacher_UM is None else teacher_UM[batch.index_K],
    )
