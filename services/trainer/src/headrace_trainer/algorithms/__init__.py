"""How rewards become a gradient: one file an algorithm, and the registry that finds them by name."""

from headrace_trainer.algorithms._registry import ALGORITHMS, build_algorithm

__all__ = ["ALGORITHMS", "build_algorithm"]
