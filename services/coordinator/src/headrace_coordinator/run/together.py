"""Concurrent parts of one step that fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*parts: Coroutine[Any, Any, Any]) -> None:
    """Runs the parts until all are done; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
