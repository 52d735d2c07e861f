"""The backend of conversations: a user's own class by PATH.py:NAME, built-in ones, and those of LIBRARY:NAME."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_servicekit.registry import Options

from headrace_simulator.backends.base import ConversationEnvironment
from headrace_simulator.backends.conversation.exchange import Exchange, ExchangeOptions
from headrace_simulator.backends.conversation.libraries import LIBRARIES, converse, library_of
from headrace_simulator.backends.conversation.tools import ToolConversation, ToolOptions
from headrace_simulator.backends.options import parse, unknown
from headrace_simulator.backends.user_file import is_user_environment, load_factory

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
