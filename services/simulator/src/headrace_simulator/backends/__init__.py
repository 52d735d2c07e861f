"""Backends by name. Loaded in child processes only, so that no simulator's import can harm the service."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin, PluginError, Registry

from headrace_simulator.backends.base import Backend, BackendError

KEY = "environment.backend"
GYMNASIUM = Plugin(
    "headrace_simulator.backends.gymnasium:build", description="environments of Gymnasium, and a user's own"
)
BACKENDS: Registry[Backend] = Registry(
    "headrace.simulator_backends",
    "backend",
    KEY,
    "environment.backend_options",
    {"gymnasium": "headrace_simulator.backends:GYMNASIUM"},
)


def create(name: str) -> Backend:
    """Makes a backend.

    Raises:
        BackendError: there is none of that name, or its packages are missing.
    """
    try:
        return BACKENDS.choose(name, {}).build()
    except PluginError as error:
        first = error.problems[0]
        raise BackendError(first.key, f"{first.problem}; {first.fix}") from error
    except ImportError as error:
        fix = f"backend {name} needs its extra: pip install 'headrace-simulator[{name}]' ({error})"
        raise BackendError(KEY, fix) from error
