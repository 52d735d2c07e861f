"""Calls of tools: checked, and answered within limits; those that can run side by side.

Whatever is wrong with a call is told to the model, as the answer to it. Runs in child processes only.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple, Protocol

from headrace_schema.images import MARKS
from headrace_servicekit.image_files import image_file
from headrace_servicekit.tool_arguments import typed
from headrace_servicekit.tool_calls import Call
from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from headrace_simulator.values import awaited, text_of

ERROR = "error: "
"""What the answer to a broken call begins with."""
Content = str | list[dict[str, Any]]
"""Of an answer: a text, or parts of which some are images."""


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


class ServiceLost(Exception):
    """The service behind a tool is gone: no fault of the model's, so the conversation is lost and made again."""


class AnyTool(Protocol):
    """What a model may call."""

    name: str
    schema: Mapping[str, Any]
    """As chat templates take it."""

    def begin(self, arguments: Any, left_s: float) -> Callable[[float], Content]:
        """Begins a call that may take `left_s` seconds; returns what waits so many seconds for its answer.

        Both raise ValueError for what is wrong, in words for the model, Late (or TimeoutError) for what is late, and
        ServiceLost. Calls that can run side by side begin here, others when they are waited for.
        """
        ...


@cache
def threads() -> ThreadPoolExecutor:
    """Of this process, for calls that run side by side."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "tool")


def waited(future: Future[Content], left_s: float) -> Content:
    """The result of a call that runs beside others."""
    return future.result(max(0.0, left_s))


class Tool:
    """A function that a model may call. Its signature gives the schema, its docstring's first lines the description.

    Raises TypeError for a function whose arguments cannot be told from its signature. One that is `bounded` ends by
    itself within the seconds that it is given as `left_s`, and so runs beside others in a thread.
    """

    def __init__(self, function: Callable[..., Any], *, bounded: bool = False) -> None:
        self.name = function.__name__
        self._function, self._bounded = function, bounded
        fields: dict[str, Any] = {}
        for each in inspect.signature(function, eval_str=True).parameters.values():
            if bounded and each.name == "left_s":
                continue
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
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": described.partition("\n\n")[0],
                "parameters": _untitled(parameters),
            },
        }

    def begin(self, arguments: Any, left_s: float) -> Callable[[float], Content]:
        """See `AnyTool`. A function of a user's runs in the main thread, where the deadline stops it."""
        given = self._checked(arguments)
        if self._bounded:
            future = threads().submit(lambda: _content(self._function(**given, left_s=left_s)))
            return lambda left_s: waited(future, left_s)

        def answer(left_s: float) -> Content:
            with deadline(left_s):
                return _content(self._function(**given))

        return answer

    def _checked(self, arguments: Any) -> dict[str, Any]:
        try:
            given = self._model.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "arguments"
            raise ValueError(f"{where}: {first['msg']}") from error
        return {name: getattr(given, name) for name in type(given).model_fields}


def _content(result: Any) -> Content:
    """What a function returned, once it is there: a text, or where some of it are images of Pillow, parts."""
    result = awaited(result)
    if isinstance(result, list | tuple):
        result = list(map(awaited, result))
    several = result if isinstance(result, list) else [result]
    if not any(hasattr(each, "getbands") for each in several):
        return text_of(result)
    return [
        {"type": "image", "image": each}
        if hasattr(each, "getbands")
        else {"type": "text", "text": text_of(each)}
        for each in several
    ]


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
    """Of one turn: seconds that its calls take together, how many there are, and characters of each answer.

    Without `images` the model is told where an answer has one. A call whose service was lost is asked again so many
    times, within the seconds.
    """

    deadline_s: float
    calls: int
    characters: int
    retries: int = 0
    images: bool = False


class Answer(NamedTuple):
    """What the model reads of a call, and how often it was asked again before that."""

    content: Content
    retries: int = 0


def answers(calls: list[Call], tools: Mapping[str, AnyTool], limits: Limits) -> list[Answer]:
    """An answer to each call, in order, within the limits. Raises ServiceLost."""
    ends = time.monotonic() + limits.deadline_s
    begun = [_begin(call, tools, ends - time.monotonic()) for call in calls[: limits.calls]]
    found = [_answered(call, tools, waits, limits, ends) for call, waits in zip(calls, begun, strict=False)]
    if len(calls) > limits.calls:
        found.append(Answer(f"{ERROR}{len(calls)} calls in one turn; {limits.calls} are answered"))
    return found


def _answered(
    call: Call, tools: Mapping[str, AnyTool], begun: Callable[[float], Content], limits: Limits, ends: float
) -> Answer:
    """Waits for a call, and asks again where its service was lost meanwhile."""
    lost = ""
    for retries in count():
        try:
            return Answer(_told(call.name, partial(_until, begun, ends), limits, lost), retries)
        except ServiceLost as error:
            if retries == limits.retries or time.monotonic() > ends:
                raise
            lost = str(error)  # the exception would hold what its frames hold
            begun = _begin(call, tools, ends - time.monotonic())
    raise AssertionError


def _until(waits: Callable[[float], Content], ends: float) -> Content:
    return waits(ends - time.monotonic())


def _begin(call: Call, tools: Mapping[str, AnyTool], left_s: float) -> Callable[[float], Content]:
    """What waits for the answer; of a call that cannot begin, it says why, or raises ServiceLost."""
    if call.problem:
        return _constant(ERROR + call.problem)
    if call.name not in tools:
        return _constant(f"{ERROR}there is no tool {call.name!r}; tools: {', '.join(tools)}")
    try:
        tool = tools[call.name]
        return tool.begin(typed(call, tool.schema["function"]["parameters"]).arguments, left_s)
    except ServiceLost as lost:
        return partial(_raise, lost)
    except Exception as error:  # noqa: BLE001  # tools are other people's code: the model is told
        return _constant(_failure(call.name, error))


def _raise(error: ServiceLost, left_s: float) -> str:
    raise error


def _constant(text: str) -> Callable[[float], str]:
    return lambda left_s: text


def _told(name: str, answer: Callable[[], Content], limits: Limits, lost: str = "") -> Content:
    """The answer as the model gets it: its text is cut, and its images are checked files.

    Where the service was `lost` before, that is why it is late. Raises ServiceLost.
    """
    try:
        found = answer()
        if isinstance(found, list):
            found = _pictured(found, limits) if limits.images else _worded(found)
    except ServiceLost:
        raise
    except (Late, TimeoutError):
        if lost:
            raise ServiceLost(lost) from None
        found = f"{ERROR}{name} was stopped: the calls of a turn may take {limits.deadline_s:g} s"
    except (Exception, SystemExit) as error:  # noqa: BLE001  # tools are other people's code: the model is told
        found = _failure(name, error)
    return _short(found, limits.characters) if isinstance(found, str) else found


def _worded(parts: list[dict[str, Any]]) -> str:
    """Parts as a text that says where an image was."""
    return "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in parts)


def _pictured(parts: list[dict[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """Raises ValueError for an image that is not read."""
    if any(MARKS["image"] in part.get("text", "") for part in parts):
        raise ValueError(f"its text has {MARKS['image']}, which stands for an image")
    return [
        {**part, "text": _short(part["text"], limits.characters)}
        if part["type"] == "text"
        else {"type": "image", "image": image_file(part["image"])}
        for part in parts
    ]


def _failure(name: str, error: BaseException) -> str:
    return f"{ERROR}{name}: {type(error).__name__}: {error}"


def _short(text: str, most: int) -> str:
    text = (
        text[: most + 1]
        if len(text) <= most
        else f"{text[:most]} [{len(text) - most} characters are left out]"
    )
    return text.encode(errors="replace").decode()
