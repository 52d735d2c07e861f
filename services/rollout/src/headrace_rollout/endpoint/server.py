"""The HTTP server that agents speak with: where it listens, and whose session a request is of. Knows no engine."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace_servicekit.rpc.addresses import host_port

from headrace_rollout.endpoint.requests import Refusal
from headrace_rollout.endpoint.session import Session

if TYPE_CHECKING:
    import uvicorn

    from headrace_rollout.endpoint.desk import Desk

SESSION, GROUP = "x-headrace-session", "x-headrace-group"
"""Headers of requests with an online run's key: the session that is gone on with, and the group of a new one."""
KEY = "idempotency-key"
"""Header of a request that its client may send again."""
KEEP_ALIVE_S = 600
"""How long a connection may be idle: an agent's tools take their time between two requests."""


class Endpoint:
    """The server of an instance, which listens from the first agent on.

    `host` is bound; others reach it by the name `advertised`.
    """

    def __init__(self, host: str, advertised: str) -> None:
        self._host, self._advertised = host, advertised
        self._sessions: dict[str, Session] = {}
        self.desk: Desk | None = None
        """Of an online run: whoever shows its key begins sessions."""
        self._starting = asyncio.Lock()
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    async def url(self) -> str:
        """Where agents reach it; starts it the first time."""
        async with self._starting:
            if self._server is None:
                self._url = await self._start()
        return self._url

    @contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Answers the session's requests meanwhile."""
        self._sessions[session.api_key] = session
        try:
            yield
        finally:
            del self._sessions[session.api_key]

    async def close(self) -> None:
        """Ends the server and its connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None

    def clients_desk(self, headers: Mapping[str, str]) -> Desk | None:
        """The desk where the request shows the run's own key."""
        desk, key = self.desk, _key(headers)
        return desk if desk is not None and key and hmac.compare_digest(key, desk.key) else None

    def session(self, headers: Mapping[str, str], named: str = "") -> Session:
        """The session of a request's key, or the one that the run's key begins, or names by `named` or its header.

        Raises Refusal.
        """
        if (desk := self.clients_desk(headers)) is not None:
            if named := headers.get(SESSION) or named:
                return desk.find(named)
            return desk.begin(headers.get(GROUP, ""), headers.get(KEY, ""))
        key = _key(headers)
        session = self._sessions.get(key) or (
            self.desk.of_key(key) if self.desk is not None and key else None
        )
        if session is None:
            message = "no session has this key, or it has ended; an agent finds its key in OPENAI_API_KEY"
            raise Refusal(401, "invalid_api_key", message)
        return session

    async def _start(self) -> str:
        import uvicorn

        from headrace_rollout.endpoint.routes import make_app

        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family)
        listening.bind((self._host, 0))
        listening.listen()  # whoever is told of it may connect at once
        config = uvicorn.Config(
            make_app(self),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        # Not `serve`: it would take the signal handlers over.
        self._serving = asyncio.create_task(self._server._serve(sockets=[listening]), name="endpoint")
        return f"http://{host_port(self._advertised, listening.getsockname()[1])}/v1"


def _key(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
