"""Sections of what is recorded of a run beside its event log."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace_schema.sections.base import FEW, CountOrZero, Section


class TrackerSection(Section):
    """One experiment tracker."""

    name: str = Field(description="wandb, mlflow, trackio, or one that a package publishes")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the tracker")


class TrackingSection(Section):
    """What is recorded in the run's directory and sent elsewhere; metrics.jsonl and TensorBoard's files always are.

    A tracker runs in a process of its own and never holds the run up: when it fails, the run's events say so.
    """

    trackers: list[TrackerSection] = Field(
        default_factory=list, max_length=FEW, description="experiment trackers that get every figure"
    )
    trajectories_per_step: CountOrZero = Field(
        default=64, description="settled trajectories of a step that are stored, evenly spread; 0: none"
    )
