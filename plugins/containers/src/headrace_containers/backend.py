"""The simulator's backend `container`: tasks whose environment is a container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import ConversationEnvironment
from headrace_simulator.backends.options import parse, unknown

from headrace_containers.shell import Shell, ShellOptions

TASKS: Mapping[str, Callable[[Mapping[str, Any]], ConversationEnvironment]] = {
    "shell": lambda options: Shell(parse(ShellOptions, options)),
}


class Containers:
    """Tasks in containers by name."""

    def environments(self) -> list[str]:
        """Names that `converse` knows."""
        return sorted(TASKS)

    def converse(self, name: str, options: Mapping[str, Any]) -> ConversationEnvironment:
        """Makes an environment; see `ConversationBackend`."""
        if name not in TASKS:
            raise unknown("task in a container", name, TASKS)
        return TASKS[name](options)


def build(options: Options) -> Containers:
    """The backend."""
    return Containers()
