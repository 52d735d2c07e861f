"""Concurrent parts of one step that fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def gather_all(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Runs the parts until all are done, for their results; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
