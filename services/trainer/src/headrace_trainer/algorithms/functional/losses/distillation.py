"""Learning from a teacher: on-policy distillation.

Shapes: B sequences, T tokens of a padded row, V vocabulary entries, M of them. Barrier: trajectory. All stream like the
policy losses.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.tensors import bool_mask, masked

__all__ = ["distillation_advantages", "distillation_terms", "top_distillation_terms"]

Direction = Literal["reverse", "forward", "jsd"]
# Of probability 0, and finite: logits of -inf (a padded vocabulary) would make 0 * inf.
LOG_PROB_FLOOR = -1e4
# Of the words that are not told: what is left of 1 in float32 where nothing is.
LEAST_REST = 1e-6


@torch.no_grad()
def distillation_advantages(
    student_log_probs_BT: Tensor, teacher_log_probs_BT: Tensor, mask_BT: Tensor | None = None
) -> Tensor:
    """On-policy distillation from sampled tokens: A_t = log p_teacher - log p_student, (B, T), detached.

    The negative reverse KL of each token as its advantage (Thinking Machines 2025, "On-policy distillation"; RLinf's
    `opd`), for `ppo_terms` or `reinforce_terms`. Not discounted: a token answers for its own divergence.
    """
    trained_BT = bool_mask(mask_BT, student_log_probs_BT)
    return masked(teacher_log_probs_BT, trained_BT) - masked(student_log_probs_BT, trained_BT)


def distillation_terms(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None = None,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Terms:
    """On-policy distillation over the whole vocabulary (GKD, arXiv 2306.13649, eq. 1; MiniLLM, arXiv 2306.08543).

    "reverse": KL(student || teacher); "forward": KL(teacher || student); "jsd": beta KL(teacher || m) +
    (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student, as TRL's GKD writes it (its beta 0 is
    forward, 1 is reverse). The teacher gets no gradient. Logits are divided by `temperature`; the loss is not
    multiplied by its square.

    Metrics: none.
    """
    student = (student_logits / temperature).log_softmax(-1).clamp(min=LOG_PROB_FLOOR)
    teacher = (teacher_logits.detach() / temperature).log_softmax(-1).clamp(min=LOG_PROB_FLOOR)
    if direction == "reverse":
        return Terms(_kl(student, teacher), {})
    if direction == "forward":
        return Terms(_kl(teacher, student), {})
    if direction != "jsd":
        raise ValueError(f"unknown direction {direction!r}: choose reverse, forward or jsd")
    if not 0 < beta < 1:
        raise ValueError(
            f"beta of jsd must lie between 0 and 1, not {beta}: for the ends choose forward or reverse"
        )
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return Terms(beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture), {})


def top_distillation_terms(
    student_log_probs: Tensor, teacher_log_probs: Tensor, *, direction: Literal["reverse", "forward"]
) -> Terms:
    """`distillation_terms` from the teacher's M likeliest words, (..., M) log-probs of the same ones on both sides.

    All other words count as one, whose probability is what is left on each side: so it is a KL, never negative, at most
    that over the whole vocabulary, and equal to it where M is V. What the teacher gives -inf is among them.

    Metrics: none.
    """
    told = teacher_log_probs > LOG_PROB_FLOOR
    student, teacher = _with_rest(student_log_probs, told), _with_rest(teacher_log_probs.detach(), told)
    return Terms(_kl(student, teacher) if direction == "reverse" else _kl(teacher, student), {})


def _with_rest(log_probs: Tensor, told: Tensor) -> Tensor:
    known = log_probs.where(told, -torch.inf)
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([known.clamp(min=LOG_PROB_FLOOR), rest], -1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
