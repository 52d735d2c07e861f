"""Asks a judge over HTTP: retries, deadline, bounded concurrency, replies remembered by content.

Knows the form of OpenAI's chat completions, and nothing of what a verdict means.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace_schema.references import SecretOption, Unread, read, redacted
from headrace_servicekit.causes import cause_first, proxied
from headrace_servicekit.problems import nearest
from headrace_servicekit.registry import Options
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from headrace_reward.scorers.base import AnswerFailed, ScorerError, Unavailable

if TYPE_CHECKING:
    import httpx

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 8.0
_LONGEST_REPLY = 4 << 20
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses with which the same request may succeed later."""
_SENT = ("messages", "model", "max_tokens", "temperature", "response_format")
_OURS = (*_SENT, "n", "stream")
_STATUS_OF = {"rate_limit": 429, "context_length": 400, "invalid_request": 400, "api_key": 401, "auth": 401}
"""Of what servers write in an error that they send with status 200; model_not_found and others are looked at too."""
_slots: dict[tuple[str, int], asyncio.Semaphore] = {}
"""Bounds the requests to an endpoint over all scorers and batches of this process."""


class EndpointOptions(Options):
    """Where a judge is, and how it is asked."""

    base_url: str = Field(description="of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    model: str = Field(min_length=1, description="the model's name there")
    api_key: SecretOption = Field(
        "", description="env:NAME or file:PATH with the key; read anew for each request"
    )
    temperature: NonNegativeFloat | None = Field(0.0, description="of the judge; null: the server's own")
    max_tokens: PositiveInt | None = Field(512, description="of a reply; null: the server's own")
    keys: dict[str, str | None] = Field(
        default_factory=dict,
        description="keys of a request that this server names otherwise, such as max_tokens: max_completion_tokens; "
        "null: left out",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="further keys of a request, such as seed or reasoning_effort"
    )
    concurrency: PositiveInt = Field(16, description="requests at a time, in each of the service's children")
    deadline_s: PositiveFloat = Field(
        60.0, description="of one verdict, all tries together; at most reward.timeout_s"
    )
    remembered: NonNegativeInt = Field(4096, description="replies kept by the content that they are about")

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, given: str) -> str:
        url = urlsplit(given)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("it is no http or https address; write such as http://127.0.0.1:8000/v1")
        if url.username is not None:
            raise ValueError("it holds a password; leave it out; a key is api_key: env:NAME or file:PATH")
        if url.path.rstrip("/").endswith("/completions"):
            raise ValueError("it names a request; leave out /chat/completions")
        return given.rstrip("/")

    @field_validator("keys")
    @classmethod
    def _sent(cls, given: dict[str, str | None]) -> dict[str, str | None]:
        if unknown := sorted(set(given) - set(_SENT)):
            raise ValueError(f"{unknown[0]} is never sent; sent are {', '.join(_SENT)}")
        if given.get("messages", "messages") is None:
            raise ValueError("messages are what is asked; they cannot be left out")
        return given

    @field_validator("parameters")
    @classmethod
    def _not_ours(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(set(given) & set(_OURS)):
            raise ValueError(f"{taken[0]} is not free; remove it, or use the option of that name")
        return given


@dataclass(frozen=True)
class Reply:
    """What a judge said; `problem`: why it is no whole reply, empty where it is one."""

    text: str
    problem: str = ""


class Endpoint:
    """One judge. Made once per process and scorer; its requests belong to one event loop."""

    def __init__(self, options: EndpointOptions) -> None:
        import httpx  # 0.2 s, which whoever lists the scorers does not need

        self._httpx = httpx
        self._options = options
        self._slot = _slots.setdefault(
            (options.base_url, options.concurrency), asyncio.Semaphore(options.concurrency)
        )
        self._client: httpx.AsyncClient | None = None
        self._replies: OrderedDict[bytes, asyncio.Task[Reply]] = OrderedDict()
        self._key()  # one that is missing is told as the scorer is made

    async def ask(self, messages: Sequence[Mapping[str, str]], extra: Mapping[str, Any]) -> Reply:
        """The judge's reply. Equal requests are sent once, while one is open or remembered.

        Raises:
            Unavailable: the judge cannot be reached, or refuses the key or the model's name.
            ScorerError: it refuses the request's form.
            AnswerFailed: the request is too long for it.
        """
        body = self._body(messages, extra)
        key = hashlib.blake2b(body, digest_size=16).digest()
        reply = self._replies.get(key)
        if reply is None or (reply.done() and (reply.cancelled() or reply.exception() is not None)):
            reply = self._replies[key] = asyncio.ensure_future(self._send(body))
        self._replies.move_to_end(key)
        try:
            return await asyncio.shield(reply)
        finally:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        """Removes a failure, and the oldest replies beyond the bound; what is still open stays."""
        reply = self._replies.get(key)
        if reply is not None and reply.done() and (reply.cancelled() or reply.exception() is not None):
            del self._replies[key]
        for old in list(self._replies)[: max(0, len(self._replies) - self._options.remembered)]:
            if self._replies[old].done():
                del self._replies[old]

    def _body(self, messages: Sequence[Mapping[str, str]], extra: Mapping[str, Any]) -> bytes:
        options = self._options
        body: dict[str, Any] = {"model": options.model, "messages": list(messages), **extra}
        body |= {"max_tokens": options.max_tokens, "temperature": options.temperature}
        named = {options.keys.get(key, key): value for key, value in body.items() if value is not None}
        sent = options.parameters | {key: value for key, value in named.items() if key is not None}
        return json.dumps(sent, sort_keys=True).encode(errors="replace")

    async def _send(self, body: bytes) -> Reply:
        async with self._slot:
            deadline = time.monotonic() + self._options.deadline_s
            failed = "no reply in time"
            delay = _FIRST_DELAY_S
            while (left := deadline - time.monotonic()) > 0:
                wait: float | None = None
                try:
                    async with asyncio.timeout(left):
                        status, headers, found = await self._post(body)
                    status = _meant(status, found)
                except TimeoutError:
                    break
                except self._httpx.RequestError as error:
                    failed = (str(error) or type(error).__name__) + proxied(self._options.base_url)
                else:
                    if status not in _AGAIN:
                        return await self._reply(status, found)
                    failed, wait = self._told(status, found), _retry_after(headers)
                    if wait is not None and wait > deadline - time.monotonic():
                        failed += f" (and asks to wait {wait:.0f} s)"
                        break
                await asyncio.sleep(
                    min(wait if wait is not None else delay * random.uniform(0.75, 1.25), max(0.0, left))
                )
                delay = min(2 * delay, _LONGEST_DELAY_S)
        url, limit = self._options.base_url, self._options.deadline_s
        raise Unavailable(
            "options.base_url",
            cause_first(
                failed,
                f"the judge at {url} gave no verdict within deadline_s = {limit:g} s: start it, mend it, or correct "
                "the address",
            ),
        )

    async def _post(self, body: bytes) -> tuple[int, httpx.Headers, bytes]:
        headers = {"Content-Type": "application/json", **self._authority()}
        if self._client is None:
            # The deadline is around each try; connections are bounded by the slots. Reading certificates takes 50 ms.
            self._client = self._httpx.AsyncClient(
                timeout=None,
                limits=self._httpx.Limits(max_connections=None),
                verify=self._options.base_url.startswith("https:"),
            )
        url = f"{self._options.base_url}/chat/completions"
        async with self._client.stream("POST", url, content=body, headers=headers) as response:
            found = bytearray()
            async for piece in response.aiter_bytes():
                found += piece
                if len(found) > _LONGEST_REPLY:
                    raise ScorerError(
                        "options.base_url", f"the judge's reply is longer than {_LONGEST_REPLY} B"
                    )
            return response.status_code, response.headers, bytes(found)

    async def _reply(self, status: int, found: bytes) -> Reply:
        """A whole reply; raises what another status means."""
        if status in (401, 403):
            given = self._options.api_key
            why = f"the key of {given}" if given else "requests without a key"
            raise Unavailable("options.api_key", f"the judge refuses {why}: {self._told(status, found)}")
        if status == 404:
            raise Unavailable("options.model", f"{self._told(status, found)}{await self._models()}")
        if status >= 300:
            told = self._told(status, found)
            if status == 413 or "context_length" in told or "context length" in told or "too long" in told:
                raise AnswerFailed(f"it is too long for the judge: {told}")
            raise ScorerError(
                "options",
                f"the judge refuses the request: {told}; change parameters, rename or leave out a key (keys: "
                "{max_tokens: max_completion_tokens}, temperature: null), or set verdict: json where it has no "
                "response_format of type json_schema",
            )
        try:
            choices = json.loads(found)["choices"]
            if not choices:
                return Reply("", "it has no choices")
            return _read(choices[0])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unavailable(
                "options.base_url",
                f"what answers at {self._options.base_url} is no OpenAI-compatible server: its reply has no "
                f"choices[0].message.content: {found[:120].decode(errors='replace')!r}; correct the address",
            ) from error

    async def _models(self) -> str:
        """What the server says that it has, to name beside a model that it has not."""
        assert self._client is not None
        try:
            async with asyncio.timeout(5.0):
                listed = await self._client.get(f"{self._options.base_url}/models", headers=self._authority())
            names = [str(each["id"]) for each in listed.json()["data"]][:20]
        except (TimeoutError, self._httpx.HTTPError, ValueError, LookupError, TypeError):
            return "; correct model, or base_url, which usually ends with /v1"
        close = nearest(self._options.model, names)
        return f"; {f'did you mean {close!r}? ' if close else ''}models there: {', '.join(names)}"

    def _authority(self) -> dict[str, str]:
        key = self._key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _key(self) -> str:
        try:
            return read(self._options.api_key)
        except Unread as error:
            raise ScorerError("options.api_key", str(error)) from error

    def _told(self, status: int, found: bytes) -> str:
        """What a server says of a request that failed, without the key."""
        try:
            error = json.loads(found)["error"]
            words = str(error["message"] if isinstance(error, dict) else error)
            if isinstance(error, dict) and error.get("code"):
                words += f" ({error['code']})"
        except (ValueError, LookupError, TypeError):
            words = found.decode(errors="replace")
        words = " ".join(redacted(words).split())[:300]
        return f"status {status}" + (f", {words}" if words else "")


def _meant(status: int, found: bytes) -> int:
    """The status that a reply means: some servers send an error with 200, with its own status in it or in words."""
    if status != 200:
        return status
    try:
        body = json.loads(found)
        error = body.get("error") or next(iter(body.get("choices") or [{}])).get("error")
    except (ValueError, AttributeError, TypeError):
        return status
    if not error:
        return status
    told = error if isinstance(error, dict) else {"message": error}
    code = str(told.get("code") or told.get("status") or "")
    if code.isdigit() and 400 <= int(code) < 600:
        return int(code)
    words = f"{code} {told.get('type', '')}".lower().replace(" ", "_")
    if "model_not_found" in words:
        return 404
    return next((meant for part, meant in _STATUS_OF.items() if part in words), 500)


def _read(choice: Mapping[str, Any]) -> Reply:
    """A choice, in all shapes that OpenAI's contract has: text, parts, a refusal, calls of tools, nothing."""
    message, ended = choice["message"], choice.get("finish_reason")
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(content, list):
        refusal = refusal or next((each["refusal"] for each in content if each.get("refusal")), None)
        content = "".join(each["text"] for each in content if each.get("type") in ("text", "output_text"))
    if content is not None and not isinstance(content, str):
        raise TypeError(f"content is of type {type(content).__name__}")
    text = content or ""
    if refusal:
        return Reply(text, f"the judge refuses: {refusal}"[:200])
    if ended == "length":
        return Reply(text, "it is longer than max_tokens")
    if ended == "content_filter":
        return Reply(text, "the judge's server has filtered it (finish_reason content_filter)")
    if not text.strip():
        calls = message.get("tool_calls") or message.get("function_call")
        thinks = message.get("reasoning_content") or message.get("reasoning")
        why = ", but calls of tools" if calls else ", but reasoning alone" if thinks else ""
        return Reply(text, f"it has no content{why}")
    return Reply(text)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait; None where it does not say."""
    given = headers.get("retry-after")
    if given is None:
        return None
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
