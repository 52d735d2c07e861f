"""Applies the table: whoever is not allowed by a route's row is told so before the route reads anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.access.table import TABLE, Row, Rule
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain.access import Owned, Principal

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

ROW, RUN = "headrace.row", "headrace.run"
"""Keys of a request's scope: its row, and the run that is there or was made, for what is written down of it."""
ALLOWED: dict[Rule, Callable[[Principal, Owned], bool]] = {
    Rule.KNOWN: Principal.knows,
    Rule.SEEN: Principal.sees,
    Rule.STOPPED: Principal.stops,
    Rule.OWNED: Principal.owns,
}


class Enforcement:
    """The one dependency of all routes; whose a run is the coordinator's reads say."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def __call__(self, request: Request) -> None:
        """Refuses, or lets the route answer.

        Raises:
            Refused: FORBIDDEN for a scope that is missing, or for a run that the caller knows of and may not touch.
                Of a run that the caller may not know of nothing is said here: it is not found, as one that is not.
        """
        scope = request.scope
        name = scope["route"].name
        row = TABLE.get(name)
        if row is None:
            raise Refused("FORBIDDEN", f"nobody may call {name}: it has no row in the table of access")
        scope[ROW] = row
        run = scope["path_params"].get(row.of, "")
        if run and self._coordinator.reads.owned(run) is not None:
            scope[RUN] = run
        self.check(row, CALLER.get(), run)

    def check(self, row: Row, caller: Principal, run: str) -> None:
        """Refuses a caller by a row; see the call."""
        if row.scope and not caller.may(row.scope):
            raise Refused("FORBIDDEN", _lacking(caller, row.scope))
        allowed = ALLOWED.get(row.rule)
        if allowed is None:
            return
        owned = self._coordinator.reads.owned(run)
        if owned is None or allowed(caller, owned) or not caller.knows(owned):
            return  # What is not there, or must not be known of, the route finds missing: in the same words.
        whose = f"{owned.owner}'s ({owned.visibility})"
        raise Refused("FORBIDDEN", f"run {run} is {whose}; this is for {row.rule.value}, or an admin")


def _lacking(caller: Principal, scope: str) -> str:
    has = ", ".join(sorted(caller.scopes)) or "none"
    return f"{caller.name} lacks the scope {scope} (has {has}); an admin gives it: headrace token create"
