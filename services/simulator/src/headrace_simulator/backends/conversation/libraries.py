"""Libraries of conversation environments that others wrote: each is an extra and a module of one class beside this one.

A task is LIBRARY:NAME, such as `textarena:GuessTheNumber-v0`. A module has `converse(name, options)`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from headrace_simulator.backends.base import BackendError, ConversationEnvironment

LIBRARIES: Mapping[str, str] = {
    "reasoning_gym": "reasoning-gym",
    "skyrl_gym": "skyrl-gym",
    "textarena": "textarena",
}
"""The extra of the simulator that brings a library, by its import name."""


def library_of(name: str) -> tuple[str, str] | None:
    """The library and the name in it that a task says; None where it says no library."""
    library, colon, rest = name.partition(":")
    return (library, rest) if colon and library in LIBRARIES else None


def converse(library: str, name: str, options: Mapping[str, Any]) -> ConversationEnvironment:
    """Makes an environment of a library.

    Raises:
        BackendError: the library is not installed, or the name or an option is wrong.
    """
    if importlib.util.find_spec(library) is None:
        fix = f"pip install 'headrace-simulator[{LIBRARIES[library]}]'"
        raise BackendError(
            "environment.name", f"{library}:{name} needs a package that is not installed: {fix}"
        )
    module = importlib.import_module(f"{__package__}.{library}")
    made: ConversationEnvironment = module.converse(name, options)
    return made
