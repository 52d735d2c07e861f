"""Backends by name. Loaded in child processes only, so that no simulator's import can harm the service."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin, PluginError, Registry

from headrace_simulator.backends.base import AnyBackend, BackendError

KEY = "environment.backend"
_HERE = "headrace_simulator.backends"
GYMNASIUM = Plugin(f"{_HERE}.gymnasium:build", description="environments of Gymnasium, and a user's own")
CONVERSATION = Plugin(
    f"{_HERE}.conversation.backend:build",
    description="conversations: with tools, and with a user's own class",
)
WAITS = "waits"
"""Feature of a backend whose environments wait for others than this host's cores, such as for programs that they have
started: each has a child process of its own.
"""
AGENT = Plugin(
    f"{_HERE}.agent:build",
    description="agents: programs that speak with the policy through an endpoint",
    features=(WAITS,),
)
BACKENDS: Registry[AnyBackend] = Registry(
    "headrace.simulator_backends",
    "backend",
    KEY,
    "environment.backend_options",
    {name: f"{_HERE}:{name.upper()}" for name in ("gymnasium", "conversation", "agent")},
)


def create(name: str) -> AnyBackend:
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
