"""Two roles that answer each other: `environment.tasks: [exchange]`. One answers a question, the other replies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from headrace_servicekit.registry import Options
from pydantic import Field

from headrace_simulator.backends.base import Message

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
            return [_to(ANSWERER, _filled(options.told, {"question": self._question, "reply": said}))], 0.0, False
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
