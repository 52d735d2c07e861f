"""Training backends: one folder each, and the registry that finds them by name."""

from headrace_trainer.backends._registry import BACKENDS, build_backend, choose_backend

__all__ = ["BACKENDS", "build_backend", "choose_backend"]
