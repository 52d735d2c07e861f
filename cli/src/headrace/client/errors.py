"""What goes wrong between a client and a coordinator, as one exception. Knows no HTTP library."""

from __future__ import annotations

from dataclasses import dataclass

USER_STATUSES = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request: the key, what is wrong with it, and what to write instead."""

    key: str
    problem: str
    fix: str = ""


class HeadraceError(Exception):
    """A request that was refused, or that found nobody.

    `reason` is a constant such as INVALID, NOT_FOUND, CONFLICT, UNAVAILABLE, UNREACHABLE, DEADLINE_EXCEEDED.
    `problems` name keys and fixes. `status` is the HTTP status, 0 when no answer came.

    >>> error = HeadraceError("INVALID", "1 problem", [Problem("steps", "is -1", "use 1 or more")], 422)
    >>> error.is_user_error, error.problems[0].fix
    (True, 'use 1 or more')
    """

    def __init__(
        self, reason: str, message: str, problems: list[Problem] | None = None, status: int = 0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.problems = problems or []
        self.status = status

    @property
    def is_user_error(self) -> bool:
        """Whether another request would be answered, as against the same request at another time."""
        return self.status in USER_STATUSES
