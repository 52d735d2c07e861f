"""The endpoint's routes: whose session a request is of, what it asks for, and the answer, whole or token by token."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from headrace_servicekit.http_server import (
    LEFT_STATUS,
    Bodies,
    BodyRefused,
    CallerLeft,
    Receive,
    Scope,
    Send,
    admit,
    guarded,
    while_connected,
)
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.completions import CHATS, TEXTS, Form
from headrace_rollout.endpoint.requests import ChatRequest, Refusal
from headrace_rollout.endpoint.responses import RESPONSES
from headrace_rollout.endpoint.server import KEY, NO_KEY, SESSION, Endpoint
from headrace_rollout.endpoint.session import AgentSession
from headrace_rollout.endpoint.streaming import MARKS, Piece, Pieces, pieces_of

NOT_FORCED = "x-headrace-not-forced"
_COMPLETION = re.compile(r"(?:chatcmpl-|cmpl-|resp_)([0-9a-f]{16})[-_](\d{1,9})")


def read_group(body: bytes) -> str:
    """The group that a new session is of; empty for none. Raises Refusal."""
    try:
        given = json.loads(body or b"{}")
        group = given.get("group") or ""
    except (ValueError, AttributeError, RecursionError) as error:
        raise Refusal(400, "invalid_request", 'the body: send {"group": NAME}, or nothing') from error
    if not isinstance(group, str):
        raise Refusal(400, "invalid_request", "group: give a text", "group")
    return group


def read_reward(body: bytes) -> tuple[float, bool | None, str, bool]:
    """Value, success, ID-NUMBER of the completion that is named, and whether it is the session's last reward."""
    try:
        given = json.loads(body)
        value, success = given["reward"], given.get("success")
        completion, final = given.get("completion") or "", given.get("final", True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = 'reward: send {"reward": NUMBER}, and "success": true or false if you like'
        raise Refusal(400, "invalid_request", message, "reward") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(400, "invalid_request", f"reward: {str(value)[:80]!r} is no number", "reward")
    if not isinstance(success, bool | None):
        raise Refusal(
            400, "invalid_request", f"success: {str(success)[:80]!r}; give true or false", "success"
        )
    if not isinstance(final, bool):
        raise Refusal(400, "invalid_request", f"final: {str(final)[:80]!r}; give true or false", "final")
    found = _COMPLETION.fullmatch(str(completion))
    if completion and found is None:
        message = f"completion: {str(completion)[:80]!r} is no id of an answer, such as chatcmpl-…-1"
        raise Refusal(400, "invalid_request", message, "completion")
    return float(value), success, f"{found[1]}-{found[2]}" if found else "", final


FORMS = {"/v1/chat/completions": CHATS, "/v1/completions": TEXTS, "/v1/responses": RESPONSES}
MOST_BYTES, MOST_ARRIVING = 32 << 20, 128 << 20
"""Longest body of a request; bytes of all bodies that arrive at the same time."""


class KeyFirst:
    """ASGI middleware before every route: without a good key nothing is read of a request but its head."""

    def __init__(self, app: Any, endpoint: Endpoint) -> None:
        self._app, self._endpoint = app, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses or passes on."""
        if scope["type"] == "http" and not self._endpoint.knows(Headers(scope=scope)):
            refused = JSONResponse(_error(Refusal(401, "invalid_api_key", NO_KEY)), 401)
            await refused(scope, receive, guarded(send, closing=True))
            return
        admit(scope)
        await self._app(scope, receive, guarded(send))


class Routes:
    """What each path does. A Refusal that a handler raises is the answer (`make_app`)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._bodies = endpoint, Bodies(MOST_BYTES, MOST_ARRIVING)

    async def answer(self, request: Request, form: Form) -> Response:
        """POST /v1/chat/completions, /v1/completions and /v1/responses.

        A session that a client's request began is withdrawn where the request comes to nothing.
        """
        session, of = None, ""
        try:
            body = await self._body(request)
            of = form.session_of(body)
            session = self._endpoint.session(request.headers, of)
            response = await while_connected(request.receive, _answered(request, session, body, form))
        except (Refusal, CallerLeft, ClientDisconnect) as error:
            own = self._endpoint.clients_desk(request.headers)
            begun_here = not (of or SESSION in request.headers)
            if own is not None and session is not None and begun_here and not session.talk.turns:
                own.drop(session, "withdrawn")
            if isinstance(error, Refusal):
                raise
            return Response(status_code=LEFT_STATUS)
        response.headers[SESSION] = session.id
        return response

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        desk = self._endpoint.clients_desk(request.headers)
        name = desk.terms.model if desk is not None else self._endpoint.session(request.headers).terms.model
        listed = {"id": name, "object": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [listed]})

    async def reward(self, request: Request) -> Response:
        """POST /v1/sessions/{session}/reward, and /v1/feedback, whose body names the completion."""
        value, success, completion, final = read_reward(await self._body(request))
        named = request.path_params.get("session") or completion.partition("-")[0]
        desk = self._endpoint.clients_desk(request.headers)
        session = desk.find(named) if desk is not None else self._endpoint.session(request.headers)
        named = named or session.id
        if named != session.id or (completion and not completion.startswith(f"{session.id}-")):
            raise Refusal(404, "not_found", "the key or the completion is of another session")
        session.reward(value, success, int(completion.rpartition("-")[2]) if completion else None)
        told: dict[str, Any] = {"rewards": session.rewards}
        if (of := self._endpoint.desk) is not None and of.with_id(session.id):
            told |= {"session": session.id, "state": of.end(session) if final else "open"}
        return JSONResponse(told)

    async def sessions(self, request: Request) -> Response:
        """GET and POST /v1/sessions."""
        desk = self._endpoint.clients_desk(request.headers)
        if desk is None:
            message = "sessions are begun with the key of an online run: headrace run endpoint RUN"
            raise Refusal(401, "invalid_api_key", message)
        if request.method == "GET":
            return JSONResponse(desk.figures())
        session = desk.begin(read_group(await self._body(request)))
        return JSONResponse({"id": session.id, "api_key": session.api_key}, 201)

    async def withdraw(self, request: Request) -> Response:
        """DELETE /v1/sessions/{session}."""
        desk = self._endpoint.clients_desk(request.headers)
        if desk is None:
            raise Refusal(401, "invalid_api_key", "a session is withdrawn with the key of the run")
        desk.drop(desk.find(request.path_params["session"]), "withdrawn")
        return JSONResponse({"session": request.path_params["session"], "state": "withdrawn"})

    async def other(self, request: Request) -> Response:
        """Any other path."""
        served = (
            "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, GET /v1/models and "
            "POST /v1/sessions/{id}/reward, for one session a key; of an online run /v1/sessions and /v1/feedback"
        )
        message = f"there is no {request.method} {request.url.path}; there are {served}"
        raise Refusal(404, "not_found", message)

    async def _body(self, request: Request) -> bytes:
        try:
            return await self._bodies.read(request.scope["headers"], request.receive)
        except BodyRefused as refused:
            raise Refusal(refused.status, refused.code, refused.message) from refused


async def _answered(request: Request, session: AgentSession, body: bytes, form: Form) -> Response:
    """The answer, whole or as server-sent events. What is refused before the first one is a plain refusal."""
    asked = form.read(session, body)
    headers = _unforced(asked, session.terms)
    # `openai` counts how often it repeats a request, others give each a key.
    again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    answer = partial(session.answer, asked, again=again, key=request.headers.get(KEY, ""))
    if not asked.stream:
        return JSONResponse(form.whole(session, asked, await answer()), headers=headers)
    marks = MARKS[session.terms.tool_calls] if asked.tools and asked.tool_choice != "none" else ()
    codec, log_probs = session.player.codec, bool(asked.logprobs)
    texts = [Pieces(codec, marks, log_probs=log_probs) for _ in range(asked.n or 1)]
    pieces = pieces_of(lambda told: answer(told=told), texts)
    first = await anext(pieces)
    told = _told(form, session, asked, first, pieces)
    return StreamingResponse(told, headers=headers, media_type="text/event-stream")


def _unforced(asked: ChatRequest, terms: Terms) -> dict[str, str]:
    """The header that tells which keys the answer was not forced to follow. Raises Refusal where they are no hints."""
    if (unforced := asked.unforced) and not terms.hints:
        key, reason = next(iter(unforced.items()))
        message = f"{key}: {reason}; or set agent.forms: hint, with which such keys force nothing"
        raise Refusal(400, "unsupported_parameter", message, key)
    return {NOT_FORCED: ", ".join(unforced)} if unforced else {}


async def _told(
    form: Form, session: AgentSession, asked: ChatRequest, first: Piece, pieces: AsyncGenerator[Piece, None]
) -> AsyncIterator[str]:
    async def whole() -> AsyncIterator[Piece]:
        yield first
        async for piece in pieces:
            yield piece

    try:
        async for event in form.events(session, asked, whole()):
            yield event
    except Refusal as refusal:
        yield f"data: {json.dumps(_error(refusal))}\n\n"
    finally:
        await pieces.aclose()


def make_app(endpoint: Endpoint) -> FastAPI:
    """The endpoint's application."""
    app = FastAPI(title="Headrace endpoint for agents", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(KeyFirst, endpoint=endpoint)
    app.add_exception_handler(Refusal, _refused)
    routes = Routes(endpoint)
    for path, form in FORMS.items():
        app.add_route(path, partial(routes.answer, form=form), methods=["POST"])
    app.add_route("/v1/models", routes.models, methods=["GET"])
    app.add_route("/v1/sessions/{session}/reward", routes.reward, methods=["POST"])
    app.add_route("/v1/sessions", routes.sessions, methods=["GET", "POST"])
    app.add_route("/v1/sessions/{session}", routes.withdraw, methods=["DELETE"])
    app.add_route("/v1/feedback", routes.reward, methods=["POST"])
    app.add_route("/{path:path}", routes.other, methods=["GET", "POST", "PUT", "DELETE"])
    return app


def _refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return JSONResponse(_error(refusal), refusal.status)


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}
