"""From logits to tokens and their log-probs: the processed distribution, inverse CDF over given uniforms.

Shapes: N rows, V vocabulary. Knows no sequences and draws no randomness of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from headrace_modelkit.hidden import vocabulary_totals
from numpy.typing import NDArray
from torch import Tensor

from headrace_rollout.engines.samples import Distribution


@dataclass(frozen=True)
class RowDistributions:
    """The distributions of N rows; a field is None where no row uses it."""

    temperature_N: Tensor | None
    greedy_N: Tensor | None
    top_k_N: Tensor | None
    top_p_N: Tensor | None
    min_p_N: Tensor | None
    penalty_N: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[Distribution], device: torch.device) -> RowDistributions:
        """Collects the rows' distributions."""
        return cls(
            # Greedy rows report their log-probs at temperature 1.
            _column([row.temperature or 1.0 for row in rows], 1.0, device),
            _column([row.temperature == 0 for row in rows], False, device),
            _column([row.top_k for row in rows], 0, device),
            _column([row.top_p for row in rows], 1.0, device),
            _column([row.min_p for row in rows], 0.0, device),
            _column([row.repetition_penalty for row in rows], 1.0, device),
        )


def process(logits_NV: Tensor, rows: RowDistributions, seen_NV: Tensor | None = None) -> Tensor:
    """fp32 logits after penalty, temperature, top-k, min-p and top-p, in this order; dropped tokens are -inf.

    `seen_NV` marks the ids that the repetition penalty (Keskar et al. 2019, CTRL) bears on.
    """
    scores_NV = logits_NV
    if rows.penalty_N is not None and seen_NV is not None:
        penalised_NV = torch.where(
            scores_NV > 0, scores_NV / rows.penalty_N[:, None], scores_NV * rows.penalty_N[:, None]
        )
        scores_NV = torch.where(seen_NV, penalised_NV, scores_NV)
    if rows.temperature_N is not None:
        scores_NV = scores_NV / rows.temperature_N[:, None]
    if rows.top_k_N is not None:
        scores_NV = _keep_top_k(scores_NV, rows.top_k_N)
    if rows.min_p_N is not None:
        # p / p_max >= min_p, in logits.
        threshold_N = scores_NV.amax(-1) + rows.min_p_N.log()
        scores_NV = scores_NV.masked_fill(scores_NV < threshold_N[:, None], float("-inf"))
    if rows.top_p_N is not None:
        scores_NV = _keep_top_p(scores_NV, rows.top_p_N)
    return scores_NV


def draw(
    scores_NV: Tensor, rows: RowDistributions, uniform_N: Tensor, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """(tokens_N, fp32 log_probs_N): the first token whose cumulated probability exceeds the uniform.

    A token of probability 0 is never drawn. Greedy rows take the most likely token. `exact`: log-probs are rounded as
    a trainer's are, one that computes the same logits.
    """
    peak_N = scores_NV.amax(-1, keepdim=True)
    cumulated_NV = (scores_NV - peak_N).exp_().cumsum_(-1)
    total_N = cumulated_NV[:, -1:]
    # Rounding may lift uniform * total to the total itself, behind the last token.
    target_N = torch.minimum(
        uniform_N[:, None] * total_N, torch.nextafter(total_N, torch.zeros_like(total_N))
    )
    tokens_N = torch.searchsorted(cumulated_NV, target_N, right=True)
    if rows.greedy_N is not None:
        tokens_N = torch.where(rows.greedy_N[:, None], scores_NV.argmax(-1, keepdim=True), tokens_N)
    if exact:
        return tokens_N[:, 0], chosen_log_probs(scores_NV, tokens_N[:, 0])
    log_probs_N = scores_NV.gather(-1, tokens_N) - peak_N - total_N.log()
    return tokens_N[:, 0], log_probs_N[:, 0]


def chosen_log_probs(scores_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """fp32 (N,) log-probs of tokens under the softmax of their rows, rounded as a trainer's are."""
    return scores_NV.gather(-1, tokens_N[:, None])[:, 0] - vocabulary_totals(scores_NV)


def _column(values: Sequence[float], neutral: float, device: torch.device) -> Tensor | None:
    return None if all(value == neutral for value in values) else torch.tensor(values, device=device)


def _keep_top_k(scores_NV: Tensor, top_k_N: Tensor) -> Tensor:
    vocabulary = scores_NV.shape[-1]
    kept_N = torch.where(top_k_N > 0, top_k_N, vocabulary).clamp(max=vocabulary)
    largest = scores_NV.topk(int(kept_N.max()), dim=-1).values
    threshold_N = largest.gather(-1, (kept_N - 1)[:, None])
    return scores_NV.masked_fill(scores_NV < threshold_N, float("-inf"))


def _keep_top_p(scores_NV: Tensor, top_p_N: Tensor) -> Tensor:
    # The smallest set whose mass reaches top_p: a token stays while the mass before it is below top_p.
    ordered_NV, order_NV = scores_NV.sort(dim=-1, descending=True)
    mass_NV = ordered_NV.softmax(-1)
    dropped_NV = mass_NV.cumsum(-1) - mass_NV >= top_p_N[:, None]
    return scores_NV.masked_fill(dropped_NV.scatter(-1, order_NV, dropped_NV), float("-inf"))


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds on arrays of 32-bit words (held in uint64); returns four arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ k0,
            second & _LOW,
            (first >> _SHIFT) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seed: NDArray[np.int64],
    prompt_ordinal: NDArray[np.int64],
    sample_index: NDArray[np.int64],
    position: NDArray[np.int64],
) -> NDArray[np.float32]:
    """fp32 uniforms in [0, 1), one an element; `position` counts the sample's tokens from 0."""
    key, prompt = seed.astype(np.uint64), prompt_ordinal.astype(np.uint64)
    counter = (
        position.astype(np.uint64) & _LOW,
        sample_index.astype(np.uint64) & _LOW,
        prompt & _LOW,
        prompt >> _SHIFT,
    )
    word = philox4x32(counter, (key & _LOW, key >> _SHIFT))[0]
    # 24 bits are what an fp32 holds exactly, and never round up to 1.
    return ((word >> np.uint64(8)).astype(np.float64) * 2.0**-24).astype(np.float32)
