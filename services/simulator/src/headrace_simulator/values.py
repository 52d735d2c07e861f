"""What users' code returns, once it is there, and as a text: awaitables are run, what is no value is refused by name.

Runs in the main thread of child processes only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Collection, Coroutine, Mapping
from functools import cache
from typing import Any

_PLACE = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")


def awaited(value: Any) -> Any:
    """The value of a coroutine, a future or whatever else is awaited; any other value as it is."""
    while True:
        if isinstance(value, concurrent.futures.Future):
            value = value.result()
        elif inspect.isawaitable(value):
            value = _run(_value_of(value))
        else:
            return value


def text_of(value: Any) -> str:
    """A value as a model reads it: a text, or JSON. Raises TypeError for what is neither, such as a generator."""
    if isinstance(value, bytes | bytearray):
        value = value.decode(errors="replace")
    return value if isinstance(value, str) else json.dumps(value, default=_in_json, ensure_ascii=False)


def _in_json(value: Any) -> Any:
    """What JSON has no form for, as something nearer to it."""
    if isinstance(value, concurrent.futures.Future) or inspect.isawaitable(value):
        return awaited(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, enum.Enum):
        return value.value
    for method in ("model_dump", "tolist"):  # of pydantic, of arrays
        if callable(found := getattr(value, method, None)) and not isinstance(value, type):
            return found()
    if isinstance(value, Mapping):
        return dict(value)
    if not _says(value) and isinstance(value, Collection):
        return list(value)
    return _own_text(value)


def _own_text(value: Any) -> str:
    shown, own = str(value), _says(value)
    ahead = hasattr(value, "__next__") or hasattr(value, "__anext__")
    if ahead or _PLACE.search(shown) or (shown.startswith("<") and not own):
        raise TypeError(
            f"it returned {_named(value)}, which is no text and no JSON; return what the model is to read"
        )
    return shown


def _says(value: Any) -> bool:
    """Whether its kind has a text of its own."""
    return vars(object)["__str__"] is not inspect.getattr_static(type(value), "__str__")


def _named(value: Any) -> str:
    kind = type(value).__name__
    return f"an object of {kind}" if not hasattr(value, "__name__") else f"the {kind} {value.__name__}"


async def _value_of(value: Any) -> Any:
    return await value


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs in the one loop of this process, so that what users' code keeps of a loop goes on working."""
    loop = _loop()
    task = loop.create_task(work)
    try:
        return loop.run_until_complete(task)
    except BaseException:  # a deadline, too: nothing of it runs on with what is awaited next
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        raise


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
