"""Who may do what with whose run: principals, tokens, visibility. Pure: knows no HTTP, no store and no clock."""

from __future__ import annotations

from typing import Protocol

import msgspec

READ, SUBMIT, OPERATE, ADMIN = SCOPES = ("read", "submit", "operate", "admin")
"""Read: see what one may see. Submit: also begin and steer runs of one's own. Operate: the fleet, and stop any run.
Admin: all of it, of everybody, and the tokens.
"""
PRIVATE, TEAM, FLEET = VISIBILITIES = ("private", "team", "fleet")
BOOTSTRAP = "admin"
"""The name of whoever has the API's own token; nobody else can have it."""
NOBODY_NAME = "nobody"
RESERVED = (BOOTSTRAP, NOBODY_NAME)


class Owned(Protocol):
    """What belongs to somebody."""

    owner: str
    team: str
    visibility: str


class Token(msgspec.Struct):
    """A named token. Of its secret the store has the SHA-256 alone."""

    name: str
    owner: str
    team: str
    scopes: list[str]
    created_at: float
    expires_at: float = 0.0
    """0: it does not expire."""


class Principal(msgspec.Struct, frozen=True):
    """Who makes a request, and what it may do."""

    name: str
    teams: tuple[str, ...] = ()
    scopes: frozenset[str] = frozenset()
    token: str = ""
    """Name of the token; empty: the API's own one, or none is asked for."""
    digest: str = ""
    """SHA-256 of the token that was shown."""
    expires_at: float = 0.0

    @property
    def team(self) -> str:
        """The team that its runs belong to."""
        return self.teams[0] if self.teams else ""

    def may(self, scope: str) -> bool:
        """Whether it has a scope; an admin has all."""
        return scope in self.scopes or ADMIN in self.scopes

    def sees(self, owned: Owned) -> bool:
        """Whether it may read what is in a run: its owner, its team or everybody, by its visibility, and admins."""
        return (
            owned.owner == self.name
            or owned.visibility == FLEET
            or (owned.visibility == TEAM and bool(owned.team) and owned.team in self.teams)
            or ADMIN in self.scopes
        )

    def knows(self, owned: Owned) -> bool:
        """Whether it may know of a run and its state: who sees it, and operators, who keep the fleet going."""
        return self.sees(owned) or OPERATE in self.scopes

    def owns(self, owned: Owned) -> bool:
        """Whether it may change a run: its owner and admins."""
        return owned.owner == self.name or ADMIN in self.scopes

    def stops(self, owned: Owned) -> bool:
        """Whether it may pause, resume and cancel a run: its owner, operators and admins."""
        return self.owns(owned) or OPERATE in self.scopes


SYSTEM = Principal(BOOTSTRAP, scopes=frozenset(SCOPES))
"""The coordinator itself, and whoever has the API's own token."""
NOBODY = Principal(NOBODY_NAME)
