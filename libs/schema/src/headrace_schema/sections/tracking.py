"""Sections of what is recorded of a run beside its event log."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from headrace_schema.sections.base import FEW, Count, CountOrZero, Section


class TrackerSection(Section):
    """One experiment tracker."""

    name: str = Field(description="wandb, mlflow, trackio, notify, or one that a package publishes")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the tracker")


FIGURE = r"^(train|trainer|speed|slots|stage_seconds)/.+$"


class AlertSection(Section):
    """A bound on a figure of steps, that is told of while it is passed."""

    figure: str = Field(
        pattern=FIGURE,
        description="as TensorBoard has it: train/reward, trainer/grad_norm, speed/step_seconds, …",
    )
    above: float | None = Field(default=None, allow_inf_nan=False, description="it is told of above this")
    below: float | None = Field(default=None, allow_inf_nan=False, description="it is told of below this")
    steps: Count = Field(default=1, description="once it was passed in so many steps one after the other")

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError("an alert needs a bound: set above or below")
        return self

    def passed(self, value: float) -> str:
        """In words by which bound a value lies; empty: by none."""
        if self.above is not None and value > self.above:
            return f"above {self.above:g}"
        return f"below {self.below:g}" if self.below is not None and value < self.below else ""


class TrackingSection(Section):
    """What is recorded in the run's directory and sent elsewhere; metrics.jsonl and TensorBoard's files always are.

    A tracker runs in a process of its own and never holds the run up: when it fails, the run's events say so.
    """

    trackers: list[TrackerSection] = Field(
        default_factory=list, max_length=FEW, description="experiment trackers that get every figure"
    )
    alerts: list[AlertSection] = Field(
        default_factory=list,
        max_length=FEW,
        description="bounds on figures: a run that passes one warns of it; the tracker `notify` sends it to people",
    )
    trajectories_per_step: CountOrZero = Field(
        default=64, description="settled trajectories of a step that are stored, evenly spread; 0: none"
    )
    ratios: bool = Field(
        default=False,
        description="their tokens' log-probs under the version that the step made are stored too, which the trainer "
        "computes in a pass of its own; for tokens coloured by ratio",
    )
