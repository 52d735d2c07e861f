"""Concurrent parts of one step that fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def gather_all(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Runs the parts until all are done, for their results; the first failure cancels the others and is raised."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if others := [task for task in tasks if not task.done()]:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
