"""HTTP requests with deadlines, repetition and typed errors. Knows no resources."""

from __future__ import annotations

import socket
import ssl
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from headrace.client.errors import HeadraceError, Problem
from headrace_servicekit.causes import proxied

RETRY_PAUSE_S = 0.2
GREETING_S = 5.0
EXPIRED, OTHER_NAME = 10, (62, 64)
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED, _HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH."""
BUSY_S = 15.0
"""How long a coordinator that answers "not possible at the moment" is asked again, whatever the patience."""
PAGE_SIZE = 500
NOTE = "Headrace-Note"
"""Header of what the coordinator has to say beside its answer."""


class Transport:
    """Speaks JSON to one coordinator.

    Requests that found nobody are repeated for `patience_s` seconds, those that were answered 503 with Retry-After for
    BUSY_S at least. Repeating a write is safe: each carries an Idempotency-Key, the same in every repetition.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None,
        timeout_s: float,
        patience_s: float,
        ca_file: Path | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.base_url = base_url.rstrip("/")
        self.patience_s = patience_s
        self.note = ""
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=_verification(self.base_url, ca_file),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """GET; returns the JSON answer."""
        return self._send("GET", path, params=params)

    def content(self, path: str) -> bytes:
        """GET; returns the bytes of the answer."""
        return self._answer("GET", path).content

    def download(self, path: str, to: Path) -> None:
        """GET; writes the bytes of the answer to a file, whole or not at all. Raises OSError too."""
        aside = to.with_name(f".{to.name}.partial")
        try:
            with self._http.stream("GET", path) as response, aside.open("wb") as file:
                if response.is_error:
                    response.read()
                    raise error_of(response)
                for piece in response.iter_bytes(1 << 20):
                    file.write(piece)
            aside.rename(to)
        except httpx.TransportError as error:
            raise self._unanswered(error, f"GET {path}", {}) from error
        finally:
            aside.unlink(missing_ok=True)

    def post(
        self,
        path: str,
        body: Any | None = None,
        *,
        idempotency_key: str | None = None,
        answer_s: float = 0.0,
        **params: Any,
    ) -> Any:
        """POST with an Idempotency-Key; returns the JSON answer, for which it waits `answer_s` if that is longer."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        timeout = httpx.Timeout(self._timeout_s, read=max(answer_s, self._timeout_s))
        return self._send("POST", path, params=params, json=body, headers=headers, timeout=timeout)

    def delete(self, path: str) -> None:
        """DELETE with an Idempotency-Key; its answer says nothing."""
        self._answer("DELETE", path, headers={"Idempotency-Key": uuid.uuid4().hex})

    def pages(self, path: str, key: str, **params: Any) -> Iterator[dict[str, Any]]:
        """Items under `key` over all pages of a list."""
        token = ""
        while True:
            page_params = {**params, "page_size": PAGE_SIZE} | ({"page_token": token} if token else {})
            page = self.get(path, **page_params)
            yield from page.get(key, [])
            token = page.get("next_page_token", "")
            if not token:
                return

    def messages(self, path: str, headers: dict[str, str], read_timeout_s: float) -> Iterator[str]:
        """Data of a streamed answer's messages; raises `httpx.TransportError` when the stream breaks."""
        timeout = httpx.Timeout(10.0, read=read_timeout_s)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise error_of(response)
            yield from messages(_lines(response.iter_bytes()))

    def _send(self, method: str, path: str, **request: Any) -> Any:
        response = self._answer(method, path, **request)
        self.note = response.headers.get(NOTE, "")
        return response.json()

    def _answer(self, method: str, path: str, **request: Any) -> httpx.Response:
        began = time.monotonic()
        deadline, busy = began + self.patience_s, began + max(self.patience_s, BUSY_S)
        while True:
            try:
                response = self._http.request(method, path, **request)
                pause_s = _asked_again_after(response)
                if pause_s is None or time.monotonic() + pause_s >= busy:
                    break
                time.sleep(pause_s)
            except httpx.TransportError as error:
                if time.monotonic() >= deadline:
                    raise self._unanswered(error, f"{method} {path}", request.get("headers", {})) from error
                time.sleep(RETRY_PAUSE_S)
        if response.is_error:
            raise error_of(response)
        return response

    def _unanswered(self, error: httpx.TransportError, what: str, headers: dict[str, str]) -> HeadraceError:
        """Tells a coordinator that is slow, or broke off, from none."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return self.unreachable(error)
        slow = isinstance(error, httpx.TimeoutException)
        if not slow and self.base_url.startswith("http:") and speaks_tls(self.base_url):
            return HeadraceError(
                "TLS", f"{self.base_url} is encrypted: write https:, and name its HEADRACE_CA_FILE"
            )
        how = "does not answer" if slow else "broke the connection before it had answered"
        key = headers.get("Idempotency-Key")
        again = f"; it may yet be carried out: repeat it under its idempotency key, {key}" if key else ""
        reason = "DEADLINE_EXCEEDED" if slow else "CONNECTION_LOST"
        return HeadraceError(reason, f"the coordinator at {self.base_url} {how} {what}{again}")

    def unreachable(self, error: Exception) -> HeadraceError:
        """The error of a coordinator that does not answer."""
        if refusal := tls_refusal(error):
            return HeadraceError("TLS", f"the coordinator at {self.base_url} is not trusted: {refusal}")
        detail = (str(error) or type(error).__name__) + proxied(self.base_url)
        return HeadraceError("UNREACHABLE", f"no coordinator answers at {self.base_url} ({detail})")


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Lines that end with a line feed; httpx's own also end at U+2028 and others, which texts have in them."""
    left = b""
    for piece in pieces:
        *whole, left = (left + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
    if left:
        yield left.decode("utf-8", "replace")


def _verification(base_url: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    """What an answer's certificate must come from; none is read where nothing is encrypted, as that takes time."""
    if not base_url.startswith("https:"):
        return False
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise HeadraceError("TLS", f"{ca_file} cannot be read as certificates in PEM: {error}") from error


def tls_refusal(error: BaseException | None) -> str:
    """Why a certificate was refused, and the fix; "" where that is not what happened."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if error is None:
        return ""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"it does not speak TLS as it should ({error.reason or error}); where it is not encrypted, write http:"
    code, words = error.verify_code, error.verify_message
    if code == EXPIRED:
        return "its certificate has expired; start its fleet again, which makes a new one, or give it other files"
    if code in OTHER_NAME:
        return f"its certificate is for another name ({words}); use the address that its fleet listens on"
    return (
        f"its certificate comes from another authority ({words}); name the fleet's ca.pem as HEADRACE_CA_FILE"
    )


def speaks_tls(url: str) -> bool:
    """Whether a server at a plain URL answers a greeting of TLS."""
    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), GREETING_S) as raw:
            context.wrap_socket(raw).close()
    except OSError:
        return False
    return True


def _asked_again_after(response: httpx.Response) -> float | None:
    """Seconds that a 503 asks to wait for; None for other answers, and for one that names no number."""
    after = response.headers.get("Retry-After", "") if response.status_code == 503 else ""
    return float(after) if after.isdecimal() else None


def error_of(response: httpx.Response) -> HeadraceError:
    """Reads an ErrorView; other bodies (a proxy's page) become a message."""
    try:
        body = response.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict) or "message" not in body:
        detail = f"{response.request.method} {response.request.url.path} was answered {response.status_code}"
        return HeadraceError(f"HTTP_{response.status_code}", detail, status=response.status_code)
    problems = [
        Problem(item.get("key", ""), item.get("problem", ""), item.get("fix", ""))
        for item in body.get("problems", [])
    ]
    return HeadraceError(body.get("reason", "UNKNOWN"), body["message"], problems, response.status_code)


def messages(lines: Iterable[str]) -> Iterator[str]:
    """The data of server-sent events (WHATWG HTML, section 9.2); a message that the stream's end cuts off is dropped.

    >>> list(messages([": a comment", "id: 7", "event: step", "data: {}", ""]))
    ['{}']
    """
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))
