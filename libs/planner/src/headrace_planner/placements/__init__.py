"""The choice between a run's placements from steps that it has made."""
