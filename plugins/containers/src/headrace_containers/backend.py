"""The simulator's backend `container`: tasks whose environment is a container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError, ConversationEnvironment
from headrace_simulator.backends.options import parse, unknown

from headrace_containers.shell import Shell, ShellOptions
from headrace_containers.tasks.coding import Coding
from headrace_containers.tasks.options import CodingOptions

TASKS: Mapping[str, Callable[[Mapping[str, Any]], ConversationEnvironment]] = {
    "shell": lambda options: Shell(parse(ShellOptions, options)),
    "coding": lambda options: coding(parse(CodingOptions, options)),
    "openenv": lambda options: openenv(options),
}


def coding(options: CodingOptions) -> Coding:
    """A coding task, in containers of the broker."""
    return Coding(options, options.source.start)


def openenv(options: Mapping[str, Any]) -> ConversationEnvironment:
    """An environment of OpenEnv, whose server runs in a container of the broker."""
    try:
        from headrace_containers.openenv import Served, ServedOptions
    except ImportError as error:
        fix = f"install what speaks with servers of OpenEnv: pip install headrace-environments ({error})"
        raise BackendError("environment.name", fix) from error
    parsed = parse(ServedOptions, options)
    parsed.prepare()
    return Served(parsed, parsed.source().start)


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
