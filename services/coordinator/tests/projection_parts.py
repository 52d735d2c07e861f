"""A view of a step, for tests of what is written of it."""

from headrace_schema.resources.views import StepView


def step_view(step: int, version: int | None = None, **values) -> StepView:
    given = {
        "step": step,
        "version": step + 1 if version is None else version,
        "wall_s": 2.0,
        "reward_mean": 0.25,
        "tokens": 100,
        "tokens_per_s": 50.0,
        "stage_s": {"generate": 1.0, "learn": 0.5},
        "devices": {"h/cpu:0": {"generate": 1.0}},
        "trained": 32,
        "dropped": 0,
        "max_staleness": 0,
        "figures": {"loss": 0.5},
    }
    return StepView(**{**given, **values})
