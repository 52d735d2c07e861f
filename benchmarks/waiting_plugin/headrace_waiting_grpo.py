"""GRPO that waits for the whole batch: what streaming is measured against. A third-party algorithm like any other."""

from __future__ import annotations

from headrace_trainer.algorithms import register
from headrace_trainer.algorithms._base import Barrier
from headrace_trainer.algorithms.grpo import Grpo


@register("grpo_waiting")
class WaitingGrpo(Grpo):
    """The same advantages, loss and gradient; only the barrier differs."""

    barrier = Barrier.BATCH
