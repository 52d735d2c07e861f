"""Calls of a run's steps, kept as files: written where the coordinator calls, read by `headrace replay`."""
