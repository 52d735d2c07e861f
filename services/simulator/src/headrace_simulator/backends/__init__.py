"""The registry of backends: sibling files with a BACKEND, and entry points `headrace.simulator_backends`.

Loaded in child processes only, so that no simulator's import can harm the service.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points

from headrace_simulator.backends.base import Backend, BackendError

ENTRY_POINTS = "headrace.simulator_backends"
_NOT_BACKENDS = {"base", "user"}


def names() -> list[str]:
    """Names of all backends, installed or not; imports none of them."""
    own = {module.name for module in pkgutil.iter_modules(__path__)} - _NOT_BACKENDS
    return sorted(own | {point.name for point in entry_points(group=ENTRY_POINTS)})


def create(name: str) -> Backend:
    """Makes a backend.

    Raises:
        BackendError: there is none of that name, or its packages are missing.
    """
    factory: Callable[[], Backend]
    for point in entry_points(group=ENTRY_POINTS, name=name):
        factory = point.load()
        return factory()
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(names())
        raise BackendError("environment.backend", f"there is no backend {name!r}; {hint}known: {known}")
    try:
        factory = importlib.import_module(f"{__name__}.{name}").BACKEND
    except ImportError as error:
        fix = f"backend {name} needs its extra: pip install 'headrace-simulator[{name}]' ({error})"
        raise BackendError("environment.backend", fix) from error
    return factory()
