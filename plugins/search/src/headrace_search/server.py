"""Serves an index over HTTP, in the form in which Search-R1 asks its retriever. Queries that wait make one batch.

POST /retrieve {"queries": [TEXT], "topk": 3, "return_scores": true, "by": "both"}; SkyRL writes "query"
→ {"result": [[{"document": {"id", "contents"}, "score"}]]}; without return_scores the documents alone
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import uvicorn
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace_search.index import By, Found, Index, SearchProblem

if TYPE_CHECKING:
    from starlette.requests import Request

MOST_BYTES, MOST_QUERIES, MOST_RESULTS, LONGEST_QUERY = 1 << 20, 256, 100, 8192
TOKEN = "HEADRACE_SEARCH_TOKEN"
UNUSED_S = 5.0
"""How often a server that others started looks whether anybody still uses it."""


Query = Annotated[str, Field(max_length=LONGEST_QUERY)]


class Asked(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="forbid")

    queries: list[Query] = Field(
        min_length=1, max_length=MOST_QUERIES, validation_alias=AliasChoices("queries", "query")
    )
    topk: int = Field(3, ge=1, le=MOST_RESULTS)
    return_scores: bool = False
    by: By | None = None

    @field_validator("queries", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given


@dataclass
class Batches:
    """Answers queries of one kind together: whatever has come while the last batch was answered."""

    index: Index
    _waiting: list[tuple[Asked, asyncio.Future[list[list[Found]]]]] = field(default_factory=list)
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    async def search(self, asked: Asked) -> list[list[Found]]:
        """Raises SearchProblem."""
        answer: asyncio.Future[list[list[Found]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        self._some.set()
        return await answer

    async def answer(self) -> None:
        """Answers until it is cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            waiting, self._waiting = self._waiting, []
            alike = defaultdict(list)
            for asked, answer in waiting:
                alike[asked.topk, asked.by].append((asked, answer))
            for (count, by), several in alike.items():
                queries = [query for asked, _ in several for query in asked.queries]
                try:
                    found = iter(await asyncio.to_thread(self.index.search, queries, count, by))
                except Exception as error:  # noqa: BLE001  # whatever it is, those that wait get it
                    for _, answer in several:
                        if not answer.done():
                            answer.set_exception(error)
                    continue
                for asked, answer in several:
                    own = [next(found) for _ in asked.queries]
                    if not answer.done():
                        answer.set_result(own)


def app(index: Index, token: str = "") -> Starlette:
    """The application; with a `token`, requests need it as a bearer."""
    batches = Batches(index)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        answering = asyncio.create_task(batches.answer())
        yield
        answering.cancel()

    async def retrieve(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return _problem(401, f"send the header Authorization: Bearer with what {TOKEN} holds")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return _problem(413, f"a request has {MOST_BYTES:,} bytes at most")
        try:
            asked = Asked.model_validate_json(bytes(body))
            found = await batches.search(asked)
        except ValidationError as error:
            first = error.errors()[0]
            return _problem(400, f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}")
        except SearchProblem as error:
            return _problem(400, str(error))
        return JSONResponse({"result": [[_shown(each, asked) for each in several] for several in found]})

    async def health(request: Request) -> Response:
        return JSONResponse(index.about.model_dump(mode="json"))

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def _problem(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status)


def _shown(found: Found, asked: Asked) -> dict[str, Any]:
    document = {"id": str(found.row), "contents": found.text}
    return {"document": document, "score": found.score} if asked.return_scores else document


def serve(folder: Path, host: str, port: int) -> None:
    """Serves until it is stopped. Raises SearchProblem: no index, no model, or strangers could ask it."""
    token = os.environ.get(TOKEN, "")
    if not token and host not in ("127.0.0.1", "::1", "localhost"):
        raise SearchProblem(
            "beyond loopback a token is needed", f"set {TOKEN}, and tools.options.token of the spec"
        )
    uvicorn.run(app(_opened(folder), token), host=host, port=port, log_level="warning")


async def serve_shared(folder: Path, socket: Path, users: Path) -> None:
    """Serves processes of this host over a Unix socket, as long as any of them holds a shared lock of `users`."""
    config = uvicorn.Config(app(_opened(folder)), uds=str(socket), log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    with users.open("ab") as file:  # a file that is there, of this host
        while not serving.done():
            await asyncio.wait({serving}, timeout=UNUSED_S)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                server.should_exit = True
                await serving
        socket.unlink(missing_ok=True)  # noqa: ASYNC240  # the same


def _opened(folder: Path) -> Index:
    index = Index(folder)
    index.search(["ready"], 1)  # loads all that a query needs
    return index


if __name__ == "__main__":
    import sys

    asyncio.run(serve_shared(*map(Path, sys.argv[1:4])))
