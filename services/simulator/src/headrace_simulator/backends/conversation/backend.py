"""The backend of conversations: a user's own class by PATH.py:NAME, built-in ones, and those of LIBRARY:NAME.

A library that others wrote is an extra, and a module of one class beside this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from headrace_servicekit.registry import Options
from pydantic import Field

from headrace_simulator.backends.base import BackendError, ConversationEnvironment, Message
from headrace_simulator.backends.conversation.tools import ToolConversation, ToolOptions
from headrace_simulator.backends.options import parse, unknown
from headrace_simulator.backends.user_file import is_user_environment, load_factory

ANSWERER, REPLIER = "answerer", "replier"
MOST_REPLIES = 64
_PLACE = re.compile(r"{(question|answer|reply)}")


class ExchangeOptions(Options):
    """Options of `exchange`."""

    turns: Annotated[int, Field(ge=1, le=MOST_REPLIES)] = Field(
        1, description="replies of an exchange; there is one more answer"
    )
    asks: str = Field(
        "{question}\n{answer}",
        description="what the replier reads first, of the item's {question} and the first {answer}; later answers it "
        "reads as they are",
    )
    told: str = Field("{reply}", description="what the answerer reads of a {reply}, and of its {question}")
    system: str = Field("", description="system message of the answerer")
    replier_system: str = Field("", description="system message of the replier")


class Exchange:
    """Answer, reply, answer, and so on, up to the answer behind the last reply.

    It gives no reward: scorers judge the last answer, and may read all that was said in `messages`.
    """

    roles = (ANSWERER, REPLIER)

    def __init__(self, options: ExchangeOptions) -> None:
        self._options = options
        self._question, self._replies = "", 0

    def reset(self, seed: int, item: Mapping[str, Any]) -> Sequence[Message]:
        """The item's question, or its conversation, to the answerer."""
        self._question, self._replies = str(item.get("question", "")), 0
        asked = item.get("messages") or [{"role": "user", "content": self._question}]
        return [*_system(self._options.system, ANSWERER), *({**each, "to": ANSWERER} for each in asked)]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        """Hands what one has said to the other."""
        said, options = message["content"], self._options
        if message["by"] == REPLIER:
            self._replies += 1
            return (
                [_to(ANSWERER, _filled(options.told, {"question": self._question, "reply": said}))],
                0.0,
                False,
            )
        if self._replies == options.turns:
            return [], 0.0, True
        if self._replies:
            return [_to(REPLIER, said)], 0.0, False
        asks = _filled(options.asks, {"question": self._question, "answer": said})
        return [*_system(options.replier_system, REPLIER), _to(REPLIER, asks)], 0.0, False


def _to(role: str, content: str) -> Message:
    return {"role": "user", "content": content, "to": role}


def _system(content: str, role: str) -> Sequence[Message]:
    return [{"role": "system", "content": content, "to": role}] if content else []


def _filled(template: str, texts: Mapping[str, str]) -> str:
    """The template with the texts in their places; what they hold themselves is no place."""
    return _PLACE.sub(lambda found: texts.get(found[1], found[0]), template)


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
