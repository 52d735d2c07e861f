"""The learning rates of a step."""

from __future__ import annotations

import math

from headrace_schema.sections.learning import OptimizerSection

from headrace_trainer.algorithms._base import CriticPlan


def step_rates(
    config: OptimizerSection, critic: CriticPlan | None, step: int, run_steps: int
) -> tuple[float, float]:
    """Rates of the policy and of the critic's own weights in step `step`, by one schedule. 0 for what stands still."""
    rate = learning_rate(config, step, run_steps)
    if critic is None:
        return rate, 0.0
    own = config.model_copy(update={"lr": critic.learning_rate or config.lr})
    return 0.0 if step < critic.warmup_steps else rate, learning_rate(own, step, run_steps)


def learning_rate(config: OptimizerSection, step: int, run_steps: int) -> float:
    """Rate of step `step` (from 0), as transformers' schedules: linear warm-up from 0, then the named decay.

    So the first step of a warm-up moves nothing, there as here. Decays to `final_fraction` of the peak at
    `total_steps` (default: the run's steps) and stays there.
    """
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    total = schedule.total_steps or run_steps
    done = (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps)
    left = {
        "constant": lambda: 1.0,
        "linear": lambda: 1.0 - min(1.0, done),
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))),
    }[schedule.name]()
    return config.lr * (schedule.final_fraction + (1.0 - schedule.final_fraction) * left)
