"""Engines by name. An engine is imported only when a run asks for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from headrace_rollout.engines.base import Engine, EngineConfig

EngineFactory = Callable[[EngineConfig], Engine]

# name -> "module:function"; third parties add theirs as entry points of this group.
ENTRY_POINT_GROUP = "headrace.rollout.engines"
BUILT_IN = {"transformers": "headrace_rollout.engines.transformers:build"}


def engine_names() -> list[str]:
    """Names that `rollout.engine` may have."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def load_engine(name: str) -> EngineFactory:
    """The factory of an engine. Raises KeyError on an unknown name."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            found: EngineFactory = entry.load()
            return found
    module, _, function = BUILT_IN[name].partition(":")
    factory: EngineFactory = getattr(import_module(module), function)
    return factory
