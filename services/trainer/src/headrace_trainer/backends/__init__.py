"""Training backends: one folder each, found by its name."""

from headrace_trainer.backends._registry import backend_names, build_backend

__all__ = ["backend_names", "build_backend"]
