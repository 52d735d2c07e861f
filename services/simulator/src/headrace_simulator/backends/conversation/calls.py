"""Calls of tools in what a model says: read by the model family's form, checked, and answered within limits.

Whatever is wrong with a call is told to the model, as the answer to it. Runs in child processes only.
"""

from __future__ import annotations

import inspect
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace_servicekit.tool_calls import Call
from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

ERROR = "error: "
"""What the answer to a broken call begins with."""


class Late(BaseException):
    """The deadline has passed. No Exception: a tool that catches all of those does not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises Late in the main thread, wherever Python code is then, after so many seconds."""

    def late(number: int, frame: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Tool:
    """A function that a model may call. Its signature gives the schema, its docstring's first lines the description.

    Raises TypeError for a function whose arguments cannot be told from its signature.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = function
        fields: dict[str, Any] = {}
        for each in inspect.signature(function, eval_str=True).parameters.values():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
                raise TypeError(f"its parameter {each.name!r} has no name that a call could give")
            if each.annotation is each.empty:
                raise TypeError(f"its parameter {each.name!r} has no type; annotate it, as {each.name}: str")
            fields[each.name] = (each.annotation, ... if each.default is each.empty else each.default)
        try:
            self._model: type[BaseModel] = create_model(
                self.name, __config__=ConfigDict(extra="forbid"), **fields
            )
            parameters = self._model.model_json_schema()
        except PydanticUserError as error:
            raise TypeError(f"a type in its signature is not known to JSON: {error.message}") from error
        described = inspect.getdoc(function) or ""
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": described.partition("\n\n")[0],
                "parameters": _untitled(parameters),
            },
        }

    def answer(self, arguments: Any) -> str:
        """What a call comes to, as text; ValueError says what is wrong with the arguments, in words for the model."""
        try:
            given = self._model.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "arguments"
            raise ValueError(f"{where}: {first['msg']}") from error
        result = self._function(**{name: getattr(given, name) for name in type(given).model_fields})
        if isinstance(result, bytes):
            result = result.decode(errors="replace")
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes of names: they only repeat them."""
    if isinstance(schema, dict):
        return {
            key: _untitled(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_untitled(each) for each in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True)
class Limits:
    """Of one turn: seconds that its calls take together, how many there are, and characters of each answer."""

    deadline_s: float
    calls: int
    characters: int


def answers(calls: list[Call], tools: Mapping[str, Tool], limits: Limits) -> list[str]:
    """An answer to each call, in order, within the limits."""
    ends = time.monotonic() + limits.deadline_s
    found = []
    for index, call in enumerate(calls[: limits.calls + 1]):
        if index == limits.calls:
            found.append(f"{ERROR}{len(calls)} calls in one turn; {limits.calls} are answered")
            break
        found.append(_short(_answer(call, tools, ends - time.monotonic(), limits), limits.characters))
    return found


def _answer(call: Call, tools: Mapping[str, Tool], left_s: float, limits: Limits) -> str:
    if call.problem:
        return ERROR + call.problem
    if call.name not in tools:
        return f"{ERROR}there is no tool {call.name!r}; tools: {', '.join(tools)}"
    try:
        with deadline(left_s):
            return tools[call.name].answer(call.arguments)
    except Late:
        return f"{ERROR}{call.name} was stopped: the calls of a turn may take {limits.deadline_s:g} s"
    except (Exception, SystemExit) as error:  # noqa: BLE001  # tools are other people's code: the model is told
        return f"{ERROR}{call.name}: {type(error).__name__}: {error}"


def _short(text: str, most: int) -> str:
    text = (
        text[: most + 1]
        if len(text) <= most
        else f"{text[:most]} [{len(text) - most} characters are left out]"
    )
    return text.encode(errors="replace").decode()
