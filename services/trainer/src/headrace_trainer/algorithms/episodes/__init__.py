"""Algorithms that learn from episodes of robot policies: what they are, and the registry that finds them by name."""

from headrace_trainer.algorithms.episodes._registry import EPISODE_ALGORITHMS, build_episode_algorithm

__all__ = ["EPISODE_ALGORITHMS", "build_episode_algorithm"]
