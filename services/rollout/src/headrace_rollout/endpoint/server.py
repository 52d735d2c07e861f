"""The HTTP server that agents speak with: sessions by key, answers in OpenAI's form, whole or token by token.

Knows no engine.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace_servicekit.rpc.addresses import host_port

from headrace_rollout.endpoint.completions import read_text_request, text_choice
from headrace_rollout.endpoint.requests import ChatRequest, Refusal, read_request
from headrace_rollout.endpoint.responses import read_response_request, response, response_events
from headrace_rollout.endpoint.session import Answer, Session
from headrace_rollout.endpoint.streaming import MARKS, Piece, Pieces, pieces_of

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request, Response

    from headrace_rollout.endpoint.desk import Desk

MOST_BYTES = 8 << 20
"""Longest body of a request."""
SESSION, GROUP = "x-headrace-session", "x-headrace-group"
"""Headers of requests with an online run's key: the session that is gone on with, and the group of a new one."""
_COMPLETION = re.compile(r"(?:chatcmpl-|cmpl-|resp_)([0-9a-f]{16})[-_](\d{1,9})")
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

    def session(self, headers: Mapping[str, str]) -> Session:
        """The session of a request's key, or the one that the run's key begins or names. Raises Refusal."""
        if (desk := self.clients_desk(headers)) is not None:
            if named := headers.get(SESSION):
                return desk.find(named)
            return desk.begin(headers.get(GROUP, ""))
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

        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family)
        listening.bind((self._host, 0))
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


def make_app(endpoint: Endpoint) -> FastAPI:
    """The routes."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, StreamingResponse

    app = FastAPI(title="Headrace endpoint for agents", openapi_url=None, docs_url=None, redoc_url=None)

    async def answered(request: Request, what: Callable[[Session], Awaitable[Response]]) -> Response:
        session = None
        try:
            session = endpoint.session(request.headers)
            response = await what(session)
        except Refusal as refusal:
            own = endpoint.clients_desk(request.headers)
            if (
                own is not None
                and session is not None
                and SESSION not in request.headers
                and not session.turns
            ):
                own.drop(session, "withdrawn")
            return JSONResponse(_error(refusal), refusal.status)
        response.headers[SESSION] = session.id
        return response

    async def streamed(
        session: Session,
        asked: ChatRequest,
        again: bool,
        events: Callable[[AsyncIterator[Piece]], AsyncIterator[str]],
    ) -> Response:
        """Server-sent events of an answer as it is made. What is refused before the first one is a plain refusal."""
        marks = MARKS[session.terms.tool_calls] if asked.tools and asked.tool_choice != "none" else ()
        codec, log_probs = session.terms.codec, bool(asked.logprobs)
        texts = [Pieces(codec, marks, log_probs=log_probs) for _ in range(asked.n or 1)]
        pieces = pieces_of(lambda told: session.answer(asked, again=again, told=told), texts)
        first = await anext(pieces)

        async def whole() -> AsyncIterator[Piece]:
            yield first
            async for piece in pieces:
                yield piece

        async def told() -> AsyncIterator[str]:
            try:
                async for event in events(whole()):
                    yield event
            except Refusal as refusal:
                yield f"data: {json.dumps(_error(refusal))}\n\n"
            finally:
                await pieces.aclose()

        return StreamingResponse(told(), media_type="text/event-stream")

    async def chat(request: Request) -> Response:
        async def work(session: Session) -> Response:
            asked, again = read_request(await _body(request)), _again(request)
            if asked.stream:
                head = _head(session, asked, "chat.completion.chunk")
                return await streamed(
                    session, asked, again, partial(_stream, session, asked, head, "chatcmpl", chat_pieces)
                )
            answers = await session.answer(asked, again=again)
            return JSONResponse(_completion(session, asked, answers))

        return await answered(request, work)

    async def completions(request: Request) -> Response:
        async def work(session: Session) -> Response:
            asked, again = read_text_request(await _body(request)), _again(request)
            head = _head(session, asked, "text_completion")
            if asked.stream:
                return await streamed(
                    session, asked, again, partial(_stream, session, asked, head, "cmpl", text_pieces)
                )
            answers = await session.answer(asked, again=again)
            choices = [text_choice(asked, answer, index) for index, answer in enumerate(answers)]
            id = f"cmpl-{session.id}-{answers[0].number}"
            return JSONResponse({**head, "id": id, "choices": choices, "usage": _usage(answers)})

        return await answered(request, work)

    async def responses(request: Request) -> Response:
        async def work(session: Session) -> Response:
            asked = read_response_request(await _body(request), partial(_response_of, session))
            again = _again(request)
            if asked.stream:
                events = partial(response_events, asked=asked, name=f"resp_{session.id}", model=session.model)
                return await streamed(session, asked, again, events)
            (answer,) = await session.answer(asked, again=again)
            return JSONResponse(response(f"resp_{session.id}_{answer.number}", asked, answer, session.model))

        return await answered(request, work)

    async def models(request: Request) -> Response:
        try:
            desk = endpoint.clients_desk(request.headers)
            name = desk.terms.model if desk is not None else endpoint.session(request.headers).model
        except Refusal as refusal:
            return JSONResponse(_error(refusal), refusal.status)
        listed = {"id": name, "object": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [listed]})

    async def rewarded(request: Request, named: str) -> Response:
        try:
            value, success, completion, final = _reward(await _body(request))
            named = named or completion.partition("-")[0]
            desk = endpoint.clients_desk(request.headers)
            session = desk.find(named) if desk is not None else endpoint.session(request.headers)
            if named != session.id or (completion and not completion.startswith(f"{session.id}-")):
                raise Refusal(404, "not_found", "the key or the completion is of another session")
            session.reward(value, success, int(completion.rpartition("-")[2]) if completion else None)
            told: dict[str, Any] = {"rewards": session.rewards}
            if (of := endpoint.desk) is not None and of.has(session):
                told |= {"session": session.id, "state": of.end(session) if final else "open"}
            return JSONResponse(told)
        except Refusal as refusal:
            return JSONResponse(_error(refusal), refusal.status)

    async def reward(request: Request) -> Response:
        return await rewarded(request, request.path_params["session"])

    async def feedback(request: Request) -> Response:
        return await rewarded(request, "")

    async def sessions(request: Request) -> Response:
        try:
            desk = endpoint.clients_desk(request.headers)
            if desk is None:
                message = "sessions are begun with the key of an online run: headrace run endpoint RUN"
                raise Refusal(401, "invalid_api_key", message)
            if request.method == "GET":
                return JSONResponse(desk.figures())
            session = desk.begin(_group(await _body(request)))
            return JSONResponse({"id": session.id, "api_key": session.api_key}, 201)
        except Refusal as refusal:
            return JSONResponse(_error(refusal), refusal.status)

    async def withdraw(request: Request) -> Response:
        try:
            desk = endpoint.clients_desk(request.headers)
            if desk is None:
                raise Refusal(401, "invalid_api_key", "a session is withdrawn with the key of the run")
            desk.drop(desk.find(request.path_params["session"]), "withdrawn")
            return JSONResponse({"session": request.path_params["session"], "state": "withdrawn"})
        except Refusal as refusal:
            return JSONResponse(_error(refusal), refusal.status)

    async def other(request: Request) -> Response:
        served = (
            "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, GET /v1/models and "
            "POST /v1/sessions/{id}/reward, for one session a key; of an online run /v1/sessions and /v1/feedback"
        )
        refusal = Refusal(
            404, "not_found", f"there is no {request.method} {request.url.path}; there are {served}"
        )
        return JSONResponse(_error(refusal), refusal.status)

    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_route("/v1/completions", completions, methods=["POST"])
    app.add_route("/v1/responses", responses, methods=["POST"])
    app.add_route("/v1/models", models, methods=["GET"])
    app.add_route("/v1/sessions/{session}/reward", reward, methods=["POST"])
    app.add_route("/v1/sessions", sessions, methods=["GET", "POST"])
    app.add_route("/v1/sessions/{session}", withdraw, methods=["DELETE"])
    app.add_route("/v1/feedback", feedback, methods=["POST"])
    app.add_route("/{path:path}", other, methods=["GET", "POST", "PUT", "DELETE"])
    return app


def _again(request: Request) -> bool:
    """Whether the client says that it repeats a request, as the `openai` client does."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise Refusal(413, "too_large", f"the body is longer than {MOST_BYTES} bytes; send less")
    return bytes(body)


def _key(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _group(body: bytes) -> str:
    try:
        given = json.loads(body or b"{}")
        group = given.get("group") or ""
    except (ValueError, AttributeError) as error:
        raise Refusal(400, "invalid_request", 'the body: send {"group": NAME}, or nothing') from error
    if not isinstance(group, str):
        raise Refusal(400, "invalid_request", "group: give a text", "group")
    return group


def _reward(body: bytes) -> tuple[float, bool | None, str, bool]:
    """Value, success, ID-NUMBER of the completion that is named, and whether it is the session's last reward."""
    try:
        given = json.loads(body)
        value, success = given["reward"], given.get("success")
        completion, final = given.get("completion") or "", given.get("final", True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
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


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def _response_of(session: Session, id: str) -> tuple[ChatRequest, Answer] | None:
    """The request and answer of a response's id, if it is one of the session's."""
    number = id.removeprefix(f"resp_{session.id}_")
    return session.answered(int(number)) if number.isdecimal() else None


def _head(session: Session, asked: ChatRequest, kind: str) -> dict[str, Any]:
    return {"object": kind, "created": int(time.time()), "model": asked.model or session.model}


def _completion(session: Session, asked: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": _message(session, answer),
            "logprobs": _log_probs(answer.tokens) if asked.logprobs else None,
            "finish_reason": answer.finish,
        }
        for index, answer in enumerate(answers)
    ]
    head = {**_head(session, asked, "chat.completion"), "id": f"chatcmpl-{session.id}-{answers[0].number}"}
    return {**head, "choices": choices, "usage": _usage(answers)}


Choices = Callable[[Session, ChatRequest, Piece, bool], list[dict[str, Any]]]
"""The choices of a piece; true for the first one of a choice."""


def chat_pieces(session: Session, asked: ChatRequest, piece: Piece, first: bool) -> list[dict[str, Any]]:
    """Of a streamed chat completion."""
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if piece.text or first:
        delta["content"] = piece.text
    if piece.answer is not None and (calls := _message(session, piece.answer).get("tool_calls")):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    log_probs = _log_probs(piece.tokens) if piece.tokens else None
    found = [{"index": piece.choice, "delta": delta, "logprobs": log_probs, "finish_reason": None}]
    if piece.answer is not None:
        end = {"index": piece.choice, "delta": {}, "logprobs": None, "finish_reason": piece.answer.finish}
        found = [*(found if delta or piece.tokens else []), end]
    return found


def text_pieces(session: Session, asked: ChatRequest, piece: Piece, first: bool) -> list[dict[str, Any]]:
    """Of a streamed completion."""
    log_probs = None
    if piece.tokens:
        texts, values = [text for text, _ in piece.tokens], [value for _, value in piece.tokens]
        log_probs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
    finish = None if piece.answer is None else piece.answer.finish
    return [{"index": piece.choice, "text": piece.text, "logprobs": log_probs, "finish_reason": finish}]


async def _stream(
    session: Session,
    asked: ChatRequest,
    head: dict[str, Any],
    prefix: str,
    choices: Choices,
    pieces: AsyncIterator[Piece],
) -> AsyncIterator[str]:
    """Server-sent events of pieces."""
    answers: list[Answer] = []
    seen: set[int] = set()
    async for piece in pieces:
        head["id"] = f"{prefix}-{session.id}-{piece.first}"
        for choice in choices(session, asked, piece, piece.choice not in seen):
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        seen.add(piece.choice)
        answers += [piece.answer] if piece.answer is not None else []
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(answers)})}\n\n"
    yield "data: [DONE]\n\n"


def _message(session: Session, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{session.id}_{answer.number}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(answer.calls)
        ]
    return message


def _log_probs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in tokens
    ]
    return {"content": content, "refusal": None}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    sampled, prompt = sum(len(answer.tokens) for answer in answers), answers[0].prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
