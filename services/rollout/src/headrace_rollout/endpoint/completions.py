"""POST /v1/chat/completions and /v1/completions in OpenAI's form, and what their answers share with other requests'.

An answer goes out whole or as pieces.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace_rollout.endpoint.answers import Answer
from headrace_rollout.endpoint.requests import ChatMessage, ChatRequest, Refusal, TextRequest, read_request
from headrace_rollout.endpoint.session import AgentSession
from headrace_rollout.endpoint.streaming import Piece, Tokens

Choices = Callable[[ChatRequest, Piece, bool], list[dict[str, Any]]]
"""The choices of a piece; true for the first one of a choice."""


@dataclass(frozen=True)
class Form:
    """A form in which turns are asked for and answered.

    `session_of`: the session that a body names; empty for none.
    """

    read: Callable[[AgentSession, bytes], ChatRequest]
    whole: Callable[[AgentSession, ChatRequest, Sequence[Answer]], dict[str, Any]]
    events: Callable[[AgentSession, ChatRequest, AsyncIterator[Piece]], AsyncIterator[str]]
    session_of: Callable[[bytes], str] = lambda _: ""


def _head(session: AgentSession, asked: ChatRequest, kind: str) -> dict[str, Any]:
    """What every answer begins with."""
    return {"object": kind, "created": int(time.time()), "model": asked.model or session.terms.model}


def chat_completion(session: AgentSession, asked: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answers to a request as one object."""
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "logprobs": _log_probs(answer.tokens) if asked.logprobs else None,
            "finish_reason": answer.finish,
        }
        for index, answer in enumerate(answers)
    ]
    head = {**_head(session, asked, "chat.completion"), "id": f"chatcmpl-{session.id}-{answers[0].number}"}
    return {**head, "choices": choices, "usage": usage_of(answers)}


def _chat_pieces(asked: ChatRequest, piece: Piece, first: bool) -> list[dict[str, Any]]:
    """Of a streamed chat completion."""
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if piece.text or first:
        delta["content"] = piece.text
    if piece.answer is not None and (calls := _message(piece.answer).get("tool_calls")):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    log_probs = _log_probs(piece.tokens) if piece.tokens else None
    found = [{"index": piece.choice, "delta": delta, "logprobs": log_probs, "finish_reason": None}]
    if piece.answer is not None:
        end = {"index": piece.choice, "delta": {}, "logprobs": None, "finish_reason": piece.answer.finish}
        found = [*(found if delta or piece.tokens else []), end]
    return found


async def _events(
    kind: str,
    prefix: str,
    choices: Choices,
    session: AgentSession,
    asked: ChatRequest,
    pieces: AsyncIterator[Piece],
) -> AsyncIterator[str]:
    """Server-sent events of pieces."""
    head = _head(session, asked, kind)
    answers: list[Answer] = []
    seen: set[int] = set()
    async for piece in pieces:
        head["id"] = f"{prefix}-{session.id}-{piece.first}"
        for choice in choices(asked, piece, piece.choice not in seen):
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        seen.add(piece.choice)
        answers += [piece.answer] if piece.answer is not None else []
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage_of(answers)})}\n\n"
    yield "data: [DONE]\n\n"


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, (name, arguments) in zip(answer.ids, answer.calls, strict=True)
        ]
    return message


def _log_probs(tokens: Tokens) -> dict[str, Any]:
    return {"content": log_probs_of(tokens), "refusal": None}


def log_probs_of(tokens: Tokens) -> list[dict[str, Any]]:
    r"""Tokens with their log-probs; the bytes of all join to the text, also where one is a part of a character."""
    return [
        {"token": _token(data), "logprob": value, "bytes": list(data), "top_logprobs": []}
        for data, value in tokens
    ]


def _token(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _text_log_probs(tokens: Tokens, begins: int) -> dict[str, Any]:
    """In the form of text completions; `begins` is where the first token's text does."""
    offsets, read = [], b""
    for data, _ in tokens:
        offsets.append(begins + len(read.decode(errors="ignore")))
        read += data
    values = [value for _, value in tokens]
    texts = [_token(data) for data, _ in tokens]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens that were read and sampled."""
    sampled, prompt = sum(len(answer.tokens) for answer in answers), answers[0].prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


_CHATS = ("messages", "top_logprobs", "tools", "tool_choice", "response_format", "functions")
"""Keys of chats, which ask for the rest of no text."""


def read_text_request(body: bytes) -> TextRequest:
    """The request of a body. Raises Refusal 400 with the key and what to do."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_request", f"the body: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, "invalid_request", "the body: give a JSON object")
    prompt, log_probs = given.get("prompt"), given.get("logprobs")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    wrong = {
        "prompt": (not isinstance(prompt, str) or not prompt)
        and "give one text: ids are the session's own, and a request asks for the rest of one text",
        "best_of": given.get("best_of") not in (None, 1) and "all answers are told: give n, or leave it out",
        "echo": bool(given.get("echo")) and "the answer alone is told; leave it out",
        "suffix": bool(given.get("suffix")) and "nothing is put behind an answer; leave it out",
        "logprobs": log_probs not in (None, False, True, 0, 1)
        and "only the log-prob of what was sampled is kept; give 1",
    }
    for param, reason in wrong.items():
        if reason:
            raise Refusal(400, "unsupported_parameter", f"{param}: {reason}", param)
    chat = {key: each for key, each in given.items() if key not in ("prompt", *wrong)}
    for key in _CHATS:
        if chat.pop(key, None) is not None:
            raise Refusal(400, "unsupported_parameter", f"{key}: it is one of chats; leave it out", key)
    chat |= {"messages": [{"role": "user", "content": prompt}], "logprobs": log_probs is not None}
    checked = read_request(
        json.dumps({key: value for key, value in chat.items() if value is not None}).encode()
    )
    fields = {name: getattr(checked, name) for name in checked.model_fields_set}
    return TextRequest(**{**fields, "messages": [ChatMessage(role="user", content=prompt)]})


def text_completion(session: AgentSession, asked: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answers to a request for the rest of a text as one object."""
    head = {**_head(session, asked, "text_completion"), "id": f"cmpl-{session.id}-{answers[0].number}"}
    choices = [_text_choice(asked, answer, index) for index, answer in enumerate(answers)]
    return {**head, "choices": choices, "usage": usage_of(answers)}


def _text_choice(asked: ChatRequest, answer: Answer, index: int) -> dict[str, Any]:
    """The answer as the choice that clients parse."""
    log_probs = None
    if asked.logprobs:
        log_probs = _text_log_probs(answer.tokens, len(asked.lines[0].content))
    return {"index": index, "text": answer.content, "logprobs": log_probs, "finish_reason": answer.finish}


def _text_pieces(asked: ChatRequest, piece: Piece, first: bool) -> list[dict[str, Any]]:
    """Of a streamed completion."""
    log_probs = None
    if piece.tokens:
        log_probs = {**_text_log_probs(piece.tokens, 0), "text_offset": []}
    finish = None if piece.answer is None else piece.answer.finish
    return [{"index": piece.choice, "text": piece.text, "logprobs": log_probs, "finish_reason": finish}]


CHATS = Form(
    lambda _, body: read_request(body),
    chat_completion,
    partial(_events, "chat.completion.chunk", "chatcmpl", _chat_pieces),
)
TEXTS = Form(
    lambda _, body: read_text_request(body),
    text_completion,
    partial(_events, "text_completion", "cmpl", _text_pieces),
)
