"""The Headrace rollout service: engines that generate trajectories."""
