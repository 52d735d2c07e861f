"""Events of who may use the fleet: tokens, and who sees a run."""

from __future__ import annotations

from headrace_coordinator.domain.events.base import Event


class TokenCreated(Event, frozen=True, kw_only=True):
    """An admin made a token; `digest` is the SHA-256 of its secret, which is nowhere."""

    name: str
    digest: str
    owner: str
    team: str
    scopes: list[str]
    expires_at: float = 0.0
    """0: it does not expire."""


class TokenRevoked(Event, frozen=True, kw_only=True):
    """An admin revoked a token: it opens nothing any more, and what it has open ends."""

    name: str


class RunShared(Event, frozen=True, kw_only=True):
    """A run's owner changed who sees it: private, team or fleet."""

    run: str
    visibility: str


class QuotaSet(Event, frozen=True, kw_only=True):
    """An admin set what a user or team may use, in place of what was set before; nothing at all: no quota."""

    subject: str
    limits: dict[str, float]
