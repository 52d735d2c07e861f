"""Experiment trackers: a run's figures, sent to Weights & Biases, MLflow or Trackio by processes beside it."""

from headrace_coordinator.trackers.tracker import TRACKERS, TrackedRun, Tracker, tracker_problems

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "tracker_problems"]
