"""The backend of conversations: a user's own class by PATH.py:NAME, built-in ones, and those of LIBRARY:NAME.

A library that others wrote is an extra, and a module of one class beside this one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from headrace_servicekit.registry import Options

from headrace_simulator.backends.base import BackendError, ConversationEnvironment
from headrace_simulator.backends.conversation.exchange import Exchange, ExchangeOptions
from headrace_simulator.backends.conversation.tools import ToolConversation, ToolOptions
from headrace_simulator.backends.options import parse, unknown
from headrace_simulator.backends.user_file import is_user_environment, load_factory

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


BUILT_IN: Mapping[str, Callable[[Mapping[str, Any]], ConversationEnvironment]] = {
    "exchange": lambda options: Exchange(parse(ExchangeOptions, options)),
    "tools": lambda options: ToolConversation(parse(ToolOptions, options)),
}


class Conversations:
    """Conversations by name, as `path/to/file.py:Class`, or of a library as `textarena:GuessTheNumber-v0`."""

    def environments(self) -> list[str]:
        """Those that are built in; libraries, which take seconds to import, are not asked."""
        return sorted(BUILT_IN)

    def converse(self, name: str, options: Mapping[str, Any]) -> ConversationEnvironment:
        """Makes an environment; a user's own class gets the options as keyword arguments."""
        if is_user_environment(name):
            made: ConversationEnvironment = load_factory(name, "Conversation")(**options)
            return made
        if found := library_of(name):
            return converse(*found, options)
        if name not in BUILT_IN:
            raise unknown("conversation", name, [*BUILT_IN, *(f"{library}:" for library in LIBRARIES)])
        return BUILT_IN[name](options)


def build(options: Options) -> Conversations:
    """The backend."""
    return Conversations()
