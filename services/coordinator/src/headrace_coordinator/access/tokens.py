"""Tokens: made, listed, revoked; whose one is that a request shows; and what is open under each."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace_schema.access import TokenRequest
from headrace_schema.problems import problem
from headrace_schema.resources.access import NewTokenView, TokenView

from headrace_coordinator.access.issuer import Issuer, looks_issued
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.access import RESERVED, SYSTEM, Principal, Token

if TYPE_CHECKING:
    from headrace_coordinator.store.event_log import EventLog

PREFIX = "hrt_"
"""What tokens begin with, so that scanners of leaked secrets find them."""
MOST_TOKENS = 10_000
LOOK_S = 0.5
"""Seconds between two looks at what is open under tokens."""


def digest_of(secret: str) -> str:
    """What the store has of a token."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Tokens:
    """The tokens of the event log."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._making = asyncio.Lock()

    def all(self) -> list[TokenView]:
        """All tokens that are not revoked, by name; none of their secrets."""
        found = sorted(self._event_log.state.tokens.values(), key=lambda token: token.name)
        return [self._view(token) for token in found]

    async def create(self, asked: TokenRequest) -> NewTokenView:
        """Makes one; its secret is in the answer and nowhere else.

        Raises:
            Refused: CONFLICT for a name that a token has; INVALID for a reserved one.
        """
        owner = asked.owner or asked.name
        for key, name in (("name", asked.name), ("owner", owner)):
            if name in RESERVED:
                reason = f"{name!r} is the fleet's own name"
                raise Refused("INVALID", reason, [problem(key, reason, "choose another one")])
        async with self._making:
            state, now = self._event_log.state, self._event_log.now()
            if any(token.name == asked.name for token in state.tokens.values()):
                fix = f"headrace token revoke {asked.name}, or choose another name"
                raise Refused("CONFLICT", f"there is a token {asked.name}; {fix}")
            if len(state.tokens) >= MOST_TOKENS:
                raise Refused("CONFLICT", f"there are {MOST_TOKENS} tokens; revoke those that nobody uses")
            secret = PREFIX + secrets.token_urlsafe(32)
            made = ev.TokenCreated(
                at=now,
                name=asked.name,
                digest=digest_of(secret),
                owner=owner,
                team=asked.team,
                scopes=list(asked.scopes),
                expires_at=now + asked.expires_in_s if asked.expires_in_s else 0.0,
            )
            await self._event_log.commit(made)
        view = self._view(state.tokens[made.digest])
        return NewTokenView.of(view, token=secret)

    async def revoke(self, name: str) -> None:
        """Ends a token, and what is open under it. NOT_FOUND where there is none."""
        if all(token.name != name for token in self._event_log.state.tokens.values()):
            raise Refused("NOT_FOUND", f"there is no token {name[:60]!r}; see headrace token list")
        await self._event_log.commit(ev.TokenRevoked(name=name))

    def _view(self, token: Token) -> TokenView:
        expired = bool(token.expires_at) and token.expires_at <= self._event_log.now()
        return TokenView.of(token, expires_at=token.expires_at or None, expired=expired)


class Doors:
    """Whose a shown token is, and the requests that are open under each: they end with it."""

    def __init__(self, event_log: EventLog, own: str | None, issuer: Issuer | None = None) -> None:
        """`own`: the API's own token, its bearer is the admin; None: nobody is asked for one."""
        self._event_log = event_log
        self._own = digest_of(own) if own else ""
        self._issuer = issuer
        self._open: dict[asyncio.Task[object], Principal] = {}
        self._cut: set[asyncio.Task[object]] = set()
        self._looking = False

    @property
    def asks(self) -> bool:
        """Whether a token is asked for."""
        return bool(self._own)

    def known(self, secret: str) -> Principal | None:
        """Whose a token is, if it is the API's own or one of the store's that has not expired."""
        digest = digest_of(secret)
        if hmac.compare_digest(digest, self._own):
            return SYSTEM
        token = self._event_log.state.tokens.get(digest)
        if token is None or (token.expires_at and token.expires_at <= self._event_log.now()):
            return None
        return Principal(
            token.owner,
            (token.team,) if token.team else (),
            frozenset(token.scopes),
            token.name,
            digest,
            token.expires_at,
        )

    async def caller(self, secret: str) -> Principal | None:
        """Whose a token is, if it is good: also one of the issuer's."""
        found = self.known(secret)
        if found is None and self._issuer is not None and looks_issued(secret):
            found = await self._issuer.principal(secret)
        return found

    def holds(self, caller: Principal) -> bool:
        """Whether what a caller has shown is still good."""
        token = self._event_log.state.tokens.get(caller.digest)
        if token is not None:
            return not token.expires_at or token.expires_at > self._event_log.now()
        return not caller.digest or (self._issuer is not None and self._issuer.holds(caller.digest))

    @contextlib.contextmanager
    def open(self, caller: Principal) -> Iterator[None]:
        """While the body runs, the end of the caller's token cancels this task; see `was_cut`."""
        task = asyncio.current_task()
        if not caller.digest or task is None:
            yield
            return
        self._open[task] = caller
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)
        try:
            yield
        finally:
            self._open.pop(task, None)

    def was_cut(self) -> bool:
        """Whether this task was cancelled as its token has ended; asked once, and the cancellation is taken back."""
        task = asyncio.current_task()
        if task is None or task not in self._cut:
            return False
        self._cut.discard(task)
        task.uncancel()
        return True

    def _look(self) -> None:
        """Ends what is open under tokens that are good no more; again and again while anything is open."""
        for task, caller in list(self._open.items()):
            if not self.holds(caller):
                del self._open[task]
                self._cut.add(task)
                task.cancel("its token has ended")
        self._looking = bool(self._open)
        if self._looking:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)
