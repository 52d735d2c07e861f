"""The score stage: finished trajectories to reward instances, and their results back."""
