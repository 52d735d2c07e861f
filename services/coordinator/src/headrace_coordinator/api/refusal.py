"""How the coordinator refuses a request. Knows no HTTP."""

from __future__ import annotations

from headrace_schema.resources.views import KeyProblemView


class Refused(Exception):
    """A request that the coordinator's state does not allow.

    `reason` is a constant such as NOT_FOUND, CONFLICT, INVALID or UNAVAILABLE; `problems` name keys and fixes.
    """

    def __init__(self, reason: str, message: str, problems: list[KeyProblemView] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.problems = problems or []
