"""One address for the clients of an online run: each request goes on to the rollout instance that has its session.

A session says by its id where it is, so that nothing is kept here. New sessions begin where a step lacks most of them,
those of a group at one instance. Reads no answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace_servicekit.http_server import LEFT_STATUS, Bodies, BodyRefused, CallerLeft, while_connected
from headrace_servicekit.session_marks import is_at, own_key, session_of_answer, session_of_key
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

if TYPE_CHECKING:
    import httpx

    from headrace_coordinator.app import Coordinator

PATH = "/v1/runs/{run}/endpoint/v1"
SESSION, GROUP, KEY = "x-headrace-session", "x-headrace-group", "idempotency-key"
BODIES = Bodies(8 << 20, 64 << 20)
NO_KEY = "this key is neither a run's nor a session's here; headrace run endpoint RUN prints a run's"
CONNECT_S, LOOK_S = 5.0, 2.0
_RELAYED = re.compile(r"/v1/runs/([^/]+)/endpoint/v1/")
_KEPT = ("content-type", SESSION, "retry-after")
_SENT = ("authorization", "content-type", "accept", SESSION, GROUP, KEY, "x-stainless-retry-count")


def is_relayed(path: str) -> bool:
    """Whether a request goes on to a run's endpoint, which asks for the key of the run in place of the API's token."""
    return _RELAYED.match(path) is not None


class Unanswered(Exception):
    """A request that no instance answers: HTTP status, code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Relay:
    """Passes requests on. `coordinator` knows where the endpoints of a run are."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._nobodys = secrets.token_urlsafe(32)
        """The key of runs that are not there: names are compared with it as with any other."""
        self._made: httpx.AsyncClient | None = None

    @property
    def route(self) -> Route:
        """The route of all requests to endpoints of runs."""
        return Route(f"{PATH}/{{path:path}}", self.answer, methods=["GET", "POST", "DELETE"], name="relay")

    def refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request to an endpoint without its run's key; the same if there is no such run."""
        found = _RELAYED.match(scope["path"])
        run, shown = found[1] if found else "", _key(Headers(scope=scope))
        key = self._coordinator.reads.endpoint_key(run) or self._nobodys
        of_run = hmac.compare_digest(shown.encode(), key.encode())
        of_session = hmac.compare_digest(shown.encode(), own_key(key, session_of_key(shown)).encode())
        if of_run or of_session:
            return None
        return _told(Unanswered(401, "invalid_api_key", NO_KEY))

    async def answer(self, request: Request) -> Response:
        """The answer of the instance that has the request's session, or begins it."""
        try:
            run, path = request.path_params["run"], request.path_params["path"]
            urls = self._coordinator.reads.endpoints(run)
            body = await BODIES.read(request.scope["headers"], request.receive)
            if path == "sessions" and request.method == "GET":
                return await self._figures(request, urls)
            session = _session(request, path, body)
            places: Sequence[str] = [url for url in urls if is_at(session, url)] if session else []
            if session and not places:
                raise self._lost(request, session, "is gone")
            places = places or await self._in_order(request, urls, body)
            work = self._passed_on(request, path, body, places, session)
            return await while_connected(request.receive, work)
        except (CallerLeft, ClientDisconnect):
            return Response(status_code=LEFT_STATUS)
        except Unanswered as unanswered:
            return _told(unanswered)
        except BodyRefused as refused:
            return _told(Unanswered(refused.status, refused.code, refused.message))

    async def _passed_on(
        self, request: Request, path: str, body: bytes, places: Sequence[str], session: str
    ) -> Response:
        import httpx

        headers = {name: request.headers[name] for name in _SENT if name in request.headers}
        for url in places:
            asked = self._client.build_request(request.method, f"{url}/{path}", headers=headers, content=body)
            try:
                found = await self._client.send(asked, stream=True)
            except httpx.ConnectError:
                continue  # It began nothing there.
            except httpx.TransportError as error:
                raise self._lost(request, session, "has gone away") from error
            kept = {name: found.headers[name] for name in _KEPT if name in found.headers}
            return StreamingResponse(_pieces(found), found.status_code, kept)
        if session:
            raise self._lost(request, session, "is gone")
        message = "no rollout instance has the run open now; see headrace run get"
        raise Unanswered(503, "run_over", message)

    def _lost(self, request: Request, session: str, how: str) -> Unanswered:
        """The error for a client whose session was lost with its instance; counted in the run's figures."""
        self._coordinator.fleet.online[request.path_params["run"]].lose(session)
        which = f"session {session}" if session else "the session that this request began"
        message = f"{which} is lost: the rollout instance that had it {how}; begin a new one"
        return Unanswered(404, "session_lost", message)

    async def _in_order(self, request: Request, urls: Sequence[str], body: bytes) -> Sequence[str]:
        """Where a new session may begin, the best place first."""
        if len(urls) < 2:
            return urls
        if group := request.headers.get(GROUP) or _text(body, "group") or request.headers.get(KEY):
            # The same one for a group, or for a request that is sent again, as long as it is there.
            return sorted(urls, key=lambda url: hashlib.blake2b(f"{group}/{url}".encode()).digest())
        found = await asyncio.gather(*(self._look(request, url) for url in urls))
        lacking = {
            url: figures["wanted"] - figures["open"]
            for url, figures in zip(urls, found, strict=True)
            if figures
        }
        return sorted(lacking, key=lambda url: -lacking[url])

    async def _look(self, request: Request, url: str) -> dict[str, Any] | None:
        """How an instance's sessions stand; None where it does not say."""
        import httpx

        headers = {"authorization": request.headers.get("authorization", "")}
        try:
            found = await self._client.get(f"{url}/sessions", headers=headers, timeout=LOOK_S)
        except httpx.TransportError:
            return None
        if found.status_code != 200:
            return {"wanted": 0, "open": 0, "status": found.status_code, "told": found.json()}
        figures: dict[str, Any] = found.json()
        return figures

    async def _figures(self, request: Request, urls: Sequence[str]) -> Response:
        """How the sessions of all instances stand together."""
        found = [each for each in await asyncio.gather(*(self._look(request, url) for url in urls)) if each]
        if not found:
            raise Unanswered(
                503, "run_over", "no rollout instance has the run open now; see headrace run get"
            )
        if "status" in found[0]:
            return JSONResponse(found[0]["told"], found[0]["status"])
        summed: dict[str, Any] = {
            key: sum(each[key] for each in found) for key in ("open", "rewarded", "wanted")
        }
        ended: Counter[str] = Counter()
        for each in found:
            ended.update(each["ended"])
        answering = any(each["answering"] for each in found)
        return JSONResponse({**summed, "answering": answering, "ended": dict(ended), "instances": len(found)})

    @property
    def _client(self) -> httpx.AsyncClient:
        import httpx

        if self._made is None:
            # A request waits as long as steps and pauses take.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            self._made = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        return self._made


async def _pieces(found: httpx.Response) -> AsyncIterator[bytes]:
    """The answer as it comes. A client that goes away ends it at the instance; one whose instance dies is cut."""
    try:
        async for piece in found.aiter_raw():
            yield piece
    finally:
        await found.aclose()


def _told(unanswered: Unanswered) -> Response:
    kind = "server_error" if unanswered.status >= 500 else "invalid_request_error"
    told = {"message": unanswered.message, "type": kind, "param": None, "code": unanswered.code}
    return JSONResponse({"error": told}, unanswered.status)


def _session(request: Request, path: str, body: bytes) -> str:
    """The session that a request names: by its header, its path, an answer's id or its own key; empty for none."""
    if named := request.headers.get(SESSION):
        return named
    first, _, rest = path.partition("/")
    if first == "sessions" and rest:
        return rest.partition("/")[0]
    if own := session_of_key(_key(request.headers)):
        return own
    key_of_answer = {"feedback": "completion", "responses": "previous_response_id"}.get(path, "")
    return session_of_answer(_text(body, key_of_answer)) if key_of_answer else ""


def _key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _text(body: bytes, key: str) -> str:
    """The text of a key of a JSON body; empty where there is none."""
    if f'"{key}"'.encode() not in body:
        return ""
    try:
        found = json.loads(body).get(key)
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
