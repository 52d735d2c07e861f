"""Waiting for what another process does. Every wait has a deadline and a name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PAUSE_S = 0.05
Found = TypeVar("Found")


def wait_for(look: Callable[[], Found | None], what: str, timeout_s: float = 120.0) -> Found:
    """The first true value of `look`; fails the test after `timeout_s` seconds, naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(PAUSE_S)
    return found
