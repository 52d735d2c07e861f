"""The tool `search` of conversations: over a corpus in memory, an index on disk, or a server of one.

An index is opened by one process a host, which all that ask share; it ends with the last of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import httpx
from headrace_schema.references import SecretOption
from headrace_servicekit.folders import own_folder
from headrace_servicekit.registry import Options, Plugin
from headrace_simulator.backends.conversation.calls import ServiceLost, Tool
from pydantic import Field, PositiveInt, model_validator

from headrace_search.index import By, Found, SearchProblem, ranked_by_words, read_about, read_texts, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S = 120.0
"""Until a server has opened its index and loaded its model."""


class SearchOptions(Options):
    """What is searched, and what is shown of it."""

    path: Path | None = Field(
        None, description="a .jsonl file with one text a line, or an index of `headrace search build`"
    )
    url: str | None = Field(
        None,
        description="in place of path: the address of `headrace search serve`, or of Search-R1's retriever",
    )
    token: SecretOption = Field("", description="that the server of url wants")
    by: By | None = Field(None, description="words, meaning or both; left out: all that the index has")
    text: str = Field("text", description="the key of a line's text")
    results: PositiveInt = Field(3, le=100, description="texts of an answer")
    longest: PositiveInt = Field(1000, description="characters of each text that are shown")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("give path (a corpus or an index) or url (a server of one)")
        if (
            self.path is not None
            and self.by is not None
            and self.path.suffix == ".jsonl"
            and self.by != "words"
        ):
            raise ValueError(
                f"by {self.by} needs an index: headrace search build {self.path} FOLDER --model PATH"
            )
        return self


Search = Callable[[str, float], list[Found]]
"""Finds texts of a query within seconds. Raises ServiceLost, TimeoutError and ValueError."""


def build(options: SearchOptions) -> Tool:
    """The tool. Raises SearchProblem where there is nothing to search."""
    found = _search_of(options)

    def search(query: str, left_s: float) -> str:
        """Searches for texts about the query."""
        shown = [f"[{each.row}] {each.text[: options.longest]}" for each in found(query, left_s)]
        return "\n\n".join(shown) or "nothing was found"

    return Tool(search, bounded=True)


SEARCH = Plugin("headrace_search.tool:build", SearchOptions, "texts of one's own, by words or by meaning")


def _search_of(options: SearchOptions) -> Search:
    if options.url is not None:
        asking = Asking(httpx.Client(base_url=options.url, headers=_headers(options.token)), options.by)
        return lambda query, left_s: asking.search(query, options.results, left_s)
    assert options.path is not None
    place = options.path.resolve()
    if place.is_dir():
        about = read_about(place)
        about.way(options.by)
        shared = _shared(place, about.id)
        return lambda query, left_s: shared.search(query, options.by, options.results, left_s)
    texts, words = _in_memory(place, options.text)

    def search(query: str, left_s: float) -> list[Found]:
        ranked = ranked_by_words(words, len(texts), query, options.results)
        return [Found(row, score, texts[row]) for row, score in ranked]

    return search


@lru_cache(maxsize=4)
def _in_memory(corpus: Path, key: str) -> tuple[list[str], Any]:
    """Made once in a process, as its conversations share it."""
    texts = list(read_texts(corpus, key))
    if not texts:
        raise SearchProblem(f"{corpus} is empty", "write a text a line")
    return texts, words_of(texts)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


class Asking:
    """Asks a server."""

    def __init__(self, client: httpx.Client, by: By | None) -> None:
        self._client, self._by = client, by

    def search(self, query: str, count: int, left_s: float) -> list[Found]:
        """Raises TimeoutError, ValueError with what the server refuses, and ServiceLost where it does not answer."""
        body: dict[str, Any] = {"queries": [query], "topk": count, "return_scores": True}
        if self._by is not None:
            body["by"] = self._by
        try:
            answer = self._client.post("/retrieve", json=body, timeout=max(left_s, 0.001))
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.HTTPError as error:
            raise ServiceLost(f"the search at {self._client.base_url} does not answer: {error}") from error
        return _found(answer)


def _found(answer: httpx.Response) -> list[Found]:
    try:
        told = answer.json()
        if answer.status_code == httpx.codes.OK:
            return [
                Found(int(each["document"]["id"]), float(each["score"]), str(each["document"]["contents"]))
                for each in told["result"][0]
            ]
        reason = str(told["error"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ServiceLost(
            f"{answer.url} answers {answer.status_code} in another form than a server of an index: check url"
        ) from error
    if answer.status_code == httpx.codes.BAD_REQUEST:
        raise ValueError(reason)
    raise ServiceLost(f"{answer.url}: {reason}")


@lru_cache(maxsize=4)
def _shared(folder: Path, id: str) -> Shared:
    return Shared(folder, id)


class Shared:
    """The server of an index on this host, which the first that asks starts; it ends with the last one."""

    def __init__(self, folder: Path, id: str) -> None:
        self._folder = folder
        root = own_folder(Path(tempfile.gettempdir()) / f"headrace-search-{os.geteuid()}", "set TMPDIR")
        name = hashlib.sha256(f"{folder} {id}".encode()).hexdigest()[:16]
        self._socket, self._starts = root / f"{name}.sock", root / f"{name}.start"
        self._users, self._log = root / f"{name}.users", root / f"{name}.log"
        self._using: IO[bytes] | None = None
        self._client: httpx.Client | None = None
        self._ready()

    def search(self, query: str, by: By | None, count: int, left_s: float) -> list[Found]:
        """As `Asking.search`; a server that was lost is started anew by the next query."""
        try:
            return Asking(self._client or self._ready(), by).search(query, count, left_s)
        except ServiceLost:
            self._client = None
            raise

    def _ready(self) -> httpx.Client:
        if self._using is None:
            self._using = self._users.open("ab")
            fcntl.flock(self._using, fcntl.LOCK_SH)  # waits where the server is about to end
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(self._socket)), base_url="http://search")
        with _locked(self._starts):
            if not self._answers(client):
                self._start(client)
        self._client = client
        return client

    def _start(self, client: httpx.Client) -> None:
        self._socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "headrace_search.server"]
        with self._log.open("wb") as log:
            started = subprocess.Popen(
                [*command, str(self._folder), str(self._socket), str(self._users)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it outlives this process where others use it
            )
        ends = time.monotonic() + READY_S
        while not self._answers(client):
            if started.poll() is not None or time.monotonic() > ends:
                started.kill()
                said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise SearchProblem(
                    f"the index {self._folder} could not be served", "".join(said) or "it hangs"
                )
            time.sleep(0.05)

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
