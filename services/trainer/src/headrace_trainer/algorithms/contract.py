"""What every algorithm must hold, as a check that its author runs in a test of the own package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from headrace_servicekit.contract import check_plugin, require
from torch import Tensor

from headrace_trainer.algorithms import ALGORITHMS
from headrace_trainer.algorithms._base import (
    RETURNS,
    VALUES,
    Algorithm,
    Barrier,
    Outcomes,
    Refill,
    TokenBatch,
    Turns,
    judge_of,
    turn_credit_of,
)
from headrace_trainer.algorithms._turns import by_turn
from headrace_trainer.algorithms.functional.advantages.returns import Advantages


def check_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm, built with these options. Raises AssertionError saying what does not hold.

    The loss must be an unnormalised sum: two micro-batches give what one of both gives, in loss and gradient.
    """
    algorithm = check_plugin(ALGORITHMS, name, options).build()
    require(isinstance(algorithm.barrier, Barrier), "barrier is no Barrier")
    require(isinstance(algorithm.refill, Refill), "refill is no Refill")
    several = algorithm.passes.several
    require(not several or algorithm.barrier is Barrier.BATCH, "several passes need Barrier.BATCH")
    outcomes = _outcomes()
    outcomes = replace(outcomes, columns_BT={name: _column(outcomes.mask_BT) for name in algorithm.columns})
    found = _advantages(algorithm, outcomes)
    advantages_BT, returns_BT = found if isinstance(found, Advantages) else (found, None)
    require(
        returns_BT is None or returns_BT.shape == advantages_BT.shape, "returns are not one a trained token"
    )
    require(
        VALUES not in algorithm.columns or algorithm.critic is not None, "there are values, and no critic"
    )
    require(advantages_BT.shape == outcomes.mask_BT.shape, "advantages are not one a trained token")
    require(bool(torch.isfinite(advantages_BT).all()), "advantages of finite rewards are not finite")
    require(not advantages_BT[~outcomes.mask_BT].any(), "there are advantages where no token is trained")
    require(algorithm.denominator(0, 0) > 0, "the denominator of an empty step is not positive")
    require(algorithm.token_weight(7) > 0, "a token's weight is not positive")
    _check_sum(algorithm)
    return algorithm


def _advantages(algorithm: Algorithm, outcomes: Outcomes) -> Tensor | Advantages:
    credit = turn_credit_of(algorithm)
    if credit is not None and credit.apart:
        return by_turn(algorithm.advantages, outcomes, credit.discount, algorithm.least_group)
    return algorithm.advantages(outcomes)


def _outcomes() -> Outcomes:
    """Two groups of three, some of two turns; one answer of the first carries no loss."""
    lengths_B = torch.tensor([4, 2, 5, 1, 3, 2])
    trained_B = torch.tensor([4, 0, 5, 1, 3, 2])
    return Outcomes(
        rewards_B=torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 1.0], dtype=torch.float64),
        groups_B=torch.tensor([0, 0, 0, 1, 1, 1]),
        mask_BT=torch.arange(5) < trained_B[:, None],
        lengths_B=lengths_B,
        longest=5,
        turns=Turns(
            rewards_BN=torch.tensor([[0.0, 0], [1, 0], [0.25, 0.25], [1, 0], [0, 1], [1, 0]]).double(),
            tokens_BN=torch.tensor([[2, 2], [2, 0], [1, 4], [1, 0], [1, 2], [2, 0]]),
            counts_B=torch.tensor([2, 1, 2, 1, 2, 1]),
        ),
    )


def _column(mask_BT: Tensor) -> Tensor:
    return torch.linspace(-1.0, -0.1, mask_BT.numel(), dtype=torch.float64).view(mask_BT.shape) * mask_BT


def _check_sum(algorithm: Algorithm) -> None:
    whole, whole_2K = _loss(algorithm, [slice(0, 6)])
    parts, parts_2K = _loss(algorithm, [slice(0, 2), slice(2, 6)])
    require(bool(torch.isfinite(whole_2K).all()), "the gradient is not finite")
    require(bool(judge_of(algorithm)) or bool(whole_2K[0].any()), "the loss does not depend on the log-probs")
    require(algorithm.critic is None or bool(whole_2K[1].any()), "the loss does not depend on the values")
    require(
        torch.allclose(whole, parts) and torch.allclose(whole_2K, parts_2K),
        "the loss is no unnormalised sum: two micro-batches give another loss or gradient than one of both",
    )


def _loss(algorithm: Algorithm, batches: list[slice]) -> tuple[Tensor, Tensor]:
    log_probs_K = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5], requires_grad=True)
    advantages_K = torch.tensor([1.0, 1.0, -0.5, -0.5, 2.0, 2.0])
    engine_K = log_probs_K.detach() + 0.01
    old_K = log_probs_K.detach() + torch.tensor([0.05, -0.05, 0.0, 0.1, -0.1, 0.02])
    sequences_K = torch.tensor([0, 0, 1, 1, 2, 2])
    weights_K = torch.full((6,), algorithm.token_weight(2))
    entropy_K = log_probs_K.square()
    values_K = torch.tensor([0.1, 0.2, -0.3, 0.4, 0.0, 0.6], requires_grad=True)
    columns = {name: torch.linspace(-1.0, -0.1, 6) for name in (*algorithm.columns, RETURNS)}
    total = torch.zeros(())
    for part in batches:
        batch = TokenBatch(
            log_probs_K=log_probs_K[part],
            old_log_probs_K=old_K[part],
            engine_log_probs_K=engine_K[part],
            advantages_K=advantages_K[part],
            weights_K=weights_K[part],
            sequences_K=sequences_K[part] - sequences_K[part][0],
            columns_K={name: column_K[part] for name, column_K in columns.items()},
            entropy_K=entropy_K[part],
            values_K=None if algorithm.critic is None else values_K[part],
        )
        total = total + algorithm.loss(batch).loss
    policy_K, critic_K = torch.autograd.grad(
        total, [log_probs_K, values_K], allow_unused=True, materialize_grads=True
    )
    return total.detach(), torch.stack([policy_K, critic_K])
