"""Servers of environments over HTTP: what they answer, and what is wrong with one that answers something else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError
from pydantic import Field, NonNegativeFloat, PositiveFloat

NAME = "environment.name"
_SHOWN = 200
"""Characters of an answer that are shown."""
_PAUSE_S = 0.2
_ANSWERED: set[str] = set()
"""Addresses of servers that have answered this process: one that is gone may be started again."""


class ServerLost(Exception):
    """A server that is gone, or failed: the episode is lost, and made again."""


class ServerOptions(Options):
    """Options of any environment behind a server."""

    headers: dict[str, str] = Field(default_factory=dict, description="headers of each request")
    request_timeout_s: PositiveFloat = Field(30.0, description="limit of one request")
    patience_s: NonNegativeFloat = Field(
        20.0,
        description="how long an episode waits to begin while a server that has answered is started again",
    )


class Server:
    """One server by its address; `kind` is what people call it, and `name` which one it is."""

    key, fix = NAME, "give the server's own address"
    """What has to change where it is another server, and how."""

    def __init__(self, kind: str, url: str, options: ServerOptions) -> None:
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise BackendError(NAME, f"{url} is no address of {kind}; write http://HOST:PORT")
        self.kind, self.url = kind, url.rstrip("/")
        self.name = self.url
        self._options = options

    def client(self) -> httpx.Client:
        """A client with cookies of its own."""
        options = self._options
        return httpx.Client(base_url=self.url, headers=options.headers, timeout=options.request_timeout_s)

    def dial(self) -> socket.socket | None:
        """A connection with it, of what cannot be reached by its address alone. Raises ServerLost."""
        return None

    def described(self, path: str) -> Mapping[str, Any]:
        """What the server says of itself, a JSON object. Raises BackendError where it is another server, or none."""
        until = time.monotonic() + (self._options.patience_s if self.name in _ANSWERED else 0.0)
        while True:
            try:
                with self.client() as client:
                    answer = client.get(path)
                break
            except httpx.HTTPError as error:
                if time.monotonic() >= until:
                    reason = f"{self.kind} does not answer at {self.name}: {_words(error)}"
                    raise BackendError(self.key, reason) from error
                time.sleep(_PAUSE_S)
        found = _object(answer)
        if found is None:
            raise BackendError(
                self.key,
                f"{self.name} is no {self.kind}: GET {path} {_what(answer)}; {self.fix}",
            )
        _ANSWERED.add(self.name)
        return found

    def ask(self, client: httpx.Client, path: str, body: Any) -> httpx.Response:
        """What the server answers, whatever its status. Raises ServerLost where it is gone."""
        try:
            return client.post(path, json=body)
        except httpx.HTTPError as error:
            raise ServerLost(f"{self.kind} at {self.name} is gone: {_words(error)}") from error

    def object_of(self, answer: httpx.Response) -> Mapping[str, Any]:
        """The object of a good answer. Raises ServerLost for any other answer."""
        found = _object(answer)
        if found is None:
            path = answer.request.url.path
            raise ServerLost(f"{self.kind} at {self.name}: {path} {_what(answer)}")
        return found


def _object(answer: httpx.Response) -> Mapping[str, Any] | None:
    if not answer.is_success:
        return None
    try:
        found = json.loads(answer.content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _what(answer: httpx.Response) -> str:
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "text/html":
        return f"answers a page for people ({answer.status_code}, HTML)"
    text = " ".join(answer.text.split())[:_SHOWN]
    return f"answers {answer.status_code} {kind or 'without a type'}: {text}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
