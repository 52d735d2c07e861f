"""Fleets on clusters: an engine starts, places and restarts what `headrace join` runs on each node. Knows no run."""
