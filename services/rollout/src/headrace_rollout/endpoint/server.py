"""The HTTP server that agents speak with: where it listens, and whose session a request is of. Knows no engine."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace_servicekit.http_server import listening_socket, make_server, serve
from headrace_servicekit.rpc.addresses import host_port
from headrace_servicekit.session_marks import session_of_key

from headrace_rollout.endpoint.requests import Refusal
from headrace_rollout.endpoint.session import AgentSession

if TYPE_CHECKING:
    import uvicorn

    from headrace_rollout.sessions.drivers.online import Desk

SESSION, GROUP = "x-headrace-session", "x-headrace-group"
"""Headers of requests with an online run's key: the session that is gone on with, and the group of a new one."""
KEY = "idempotency-key"
"""Header of a request that its client may send again."""
KEEP_ALIVE_S = 600
"""How long a connection that has shown a key may be idle: an agent's tools take their time between two requests."""
NO_KEY = "no session has this key, or it has ended; an agent finds its key in OPENAI_API_KEY"


class Endpoint:
    """The server of an instance, which listens from the first agent on.

    `host` is bound; others reach it by the name `advertised`.
    """

    def __init__(self, host: str, advertised: str) -> None:
        self._host, self._advertised = host, advertised
        self._sessions: dict[str, AgentSession] = {}
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
    def serving(self, session: AgentSession) -> Iterator[None]:
        """Answers the session's requests meanwhile."""
        self._sessions[session.id] = session
        try:
            yield
        finally:
            del self._sessions[session.id]

    async def close(self) -> None:
        """Ends the server and its connections."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None

    def clients_desk(self, headers: Mapping[str, str]) -> Desk | None:
        """The desk where the request shows the run's own key."""
        desk, key = self.desk, _key(headers)
        return desk if desk is not None and key and _same(key, desk.key) else None

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the request shows the run's key, or that of a session that goes on."""
        return self.clients_desk(headers) is not None or self._of_key(_key(headers)) is not None

    def session(self, headers: Mapping[str, str], named: str = "") -> AgentSession:
        """The session of a request's key, or the one that the run's key begins, or names by `named` or its header.

        Raises Refusal.
        """
        if (desk := self.clients_desk(headers)) is not None:
            if named := headers.get(SESSION) or named:
                return desk.find(named)
            return desk.begin(headers.get(GROUP, ""), headers.get(KEY, ""))
        if (session := self._of_key(_key(headers))) is None:
            raise Refusal(401, "invalid_api_key", NO_KEY)
        return session

    def _of_key(self, key: str) -> AgentSession | None:
        found = self._sessions.get(session_of_key(key))
        if found is None and self.desk is not None:
            found = self.desk.with_id(session_of_key(key))
        return found if found is not None and _same(found.api_key, key) else None

    async def _start(self) -> str:
        from headrace_rollout.endpoint.routes import make_app

        listening = listening_socket(self._host, 0)
        self._server = make_server(make_app(self), idle_s=KEEP_ALIVE_S)
        self._serving = asyncio.create_task(serve(self._server, listening), name="endpoint")
        return f"http://{host_port(self._advertised, listening.getsockname()[1])}/v1"


def _key(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
