"""Which scalars of a step and of an evaluation TensorBoard shows, and under which tags."""

from __future__ import annotations

from headrace_schema.resources.views import EvaluationView, StepView


def step_scalars(view: StepView) -> dict[str, float]:
    """Tags grouped by their first part: train, speed, stage_seconds, slots, trainer."""
    return {
        "train/reward": view.reward_mean,
        "train/max_staleness": float(view.max_staleness),
        "speed/step_seconds": view.wall_s,
        "speed/tokens_per_second": view.tokens_per_s,
        "speed/tokens": float(view.tokens),
        "slots/trained": float(view.trained),
        "slots/dropped": float(view.dropped),
        "slots/filtered": float(view.filtered),
        "slots/refilled_groups": float(view.refilled),
        **{f"stage_seconds/{stage}": seconds for stage, seconds in view.stage_s.items()},
        **{f"trainer/{name}": value for name, value in view.figures.items()},
    }


def evaluation_scalars(view: EvaluationView) -> dict[str, float]:
    """The score and each scorer's mean, by kind of evaluation."""
    parts = {f"evaluation/{view.kind}/{name}": value for name, value in view.parts.items()}
    return {f"evaluation/{view.kind}": view.score, **parts}
