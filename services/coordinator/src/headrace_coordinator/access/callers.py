"""The caller of the request at work, as all code below the HTTP API finds it. Outside of requests: the coordinator."""

from __future__ import annotations

from contextvars import ContextVar

from headrace_coordinator.domain.access import SYSTEM, Principal

CALLER: ContextVar[Principal] = ContextVar("caller", default=SYSTEM)
"""Set for every request before a route sees it."""
