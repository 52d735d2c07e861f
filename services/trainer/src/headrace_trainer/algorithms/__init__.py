"""How rewards become a gradient: one file an algorithm, found by its file name."""

from headrace_trainer.algorithms._registry import algorithm_names, build_algorithm, register

__all__ = ["algorithm_names", "build_algorithm", "register"]
