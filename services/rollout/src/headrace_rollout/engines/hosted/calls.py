"""Deadlines for an engine's calls. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from headrace_rollout.engines.hosted.backend import BackendFailed

_Result = TypeVar("_Result")


class Hung(BackendFailed):
    """A call was not answered in time."""


async def within(seconds: float, what: str, call: Awaitable[_Result]) -> _Result:
    """The call's result. Raises Hung, naming the call, when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise Hung(f"{what} was not answered within {seconds:g} s") from error
