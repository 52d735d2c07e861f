"""Files that are derived from a run's events, for people and notebooks. Nothing reads them back as truth."""

from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.projections.reading import read_trajectories
from headrace_coordinator.projections.timeline import read_timeline

__all__ = ["RunProjection", "read_timeline", "read_trajectories"]
