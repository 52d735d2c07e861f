"""Scoring inside a step: finished trajectories to reward instances, and their rewards back."""
