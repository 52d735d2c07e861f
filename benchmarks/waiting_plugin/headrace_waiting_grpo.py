"""GRPO that waits for the whole batch: what streaming is measured against. A third-party algorithm like any other."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin
from headrace_trainer.algorithms._base import Barrier
from headrace_trainer.algorithms.group_relative import Grpo
from headrace_trainer.algorithms.plugins import GrpoOptions


class WaitingGrpo(Grpo):
    """The same advantages, loss and gradient; only the barrier differs."""

    barrier = Barrier.BATCH


GRPO_WAITING = Plugin(WaitingGrpo, GrpoOptions, "GRPO that waits for the whole batch")
