"""What a head that drafts tokens learns from: the hidden states and the distributions of the policy's own forward.

Knows no sharding. Shapes: S sequences, T their tokens before the last trained one, U as in `packing`, N rows, W words
of the head, D hidden, F what the head reads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from headrace_modelkit.families.drafts import DraftHead
from headrace_modelkit.logprobs import Head, chunk_elements
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace_trainer.learning.packing import DraftPaths

DECAY = 0.8
"""Weight of a step of the unrolled head against the one before it, as SpecForge has it."""


def draft_loss(
    draft: DraftHead,
    head: Head,
    embedding: Any,
    features_NF: Tensor,
    hidden_UD: Tensor,
    paths: DraftPaths,
    steps: int,
) -> Tensor:
    """(4,): the loss, then of the first step the cross-entropies, the shares of probability that head and policy have
    in common, which sampled drafts are accepted by, and how many tokens these are sums over. Sums, not means.

    Only the first has a gradient, in the head alone. `features_NF` are of all nodes. The policy's distribution is that
    at temperature 1, of the head's words; where its likeliest word is none of these, nothing is learned.
    """
    with torch.no_grad():
        embeds_STD = embedding(paths.next_ST)
    features_STF = features_NF.detach()[paths.nodes_ST]
    hidden_UD = hidden_UD.detach()
    total = features_STF.new_zeros(4, dtype=torch.float32)
    for step, found_STD in enumerate(draft.unrolled(features_STF, embeds_STD, steps)):
        rows_ST = F.pad(paths.rows_ST[:, 1 + step :], (0, min(1 + step, paths.rows_ST.shape[1])), value=-1)
        learned_ST = rows_ST >= 0
        sums = _compared(draft, head, found_STD[learned_ST], hidden_UD[rows_ST[learned_ST]])
        weighed = sums[:1] * DECAY**step
        total = total + torch.cat([weighed, sums.detach() if step == 0 else torch.zeros_like(sums)])
    return total


def _compared(draft: DraftHead, head: Head, own_ND: Tensor, policy_ND: Tensor) -> Tensor:
    """(3,) cross-entropies, overlaps and rows, added up; of many rows their logits are made again in the backward."""
    size = max(1, chunk_elements(own_ND.device) // head.weight_VD.shape[0])
    total = own_ND.new_zeros(3, dtype=torch.float32)
    for first in range(0, len(own_ND), size):
        part = draft, head, own_ND[first : first + size], policy_ND[first : first + size]
        found: Any = _rows(*part) if len(own_ND) <= size else checkpoint(_rows, *part, use_reentrant=False)
        total = total + found
    return total


def _rows(draft: DraftHead, head: Head, own_ND: Tensor, policy_ND: Tensor) -> Tensor:
    with torch.no_grad():
        wanted_NV = head.logits(policy_ND)
        known_N, wanted_NW = wanted_NV.new_ones(len(wanted_NV)), wanted_NV
        if (words_W := draft.words()) is not None:
            known_N, wanted_NW = torch.isin(wanted_NV.argmax(-1), words_W).float(), wanted_NV[:, words_W]
        wanted_NW = wanted_NW.softmax(-1)
    log_probs_NW = draft.scores(own_ND, head).log_softmax(-1)
    off_N = -(wanted_NW * log_probs_NW).sum(-1)
    common_N = torch.minimum(wanted_NW, log_probs_NW.detach().exp()).sum(-1)
    return torch.stack([(off_N * known_N).sum(), (common_N * known_N).sum(), known_N.sum()])
