"""Answers to POST /v1/chat/completions in OpenAI's form, whole or as pieces, and what those to other requests share."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from headrace_rollout.endpoint.requests import ChatRequest
from headrace_rollout.endpoint.session import Answer, Session
from headrace_rollout.endpoint.streaming import Piece

Choices = Callable[[Session, ChatRequest, Piece, bool], list[dict[str, Any]]]
"""The choices of a piece; true for the first one of a choice."""


def head_of(session: Session, asked: ChatRequest, kind: str) -> dict[str, Any]:
    """What every answer begins with."""
    return {"object": kind, "created": int(time.time()), "model": asked.model or session.model}


def chat_completion(session: Session, asked: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answers to a request as one object."""
    choices = [
        {
            "index": index,
            "message": _message(session, answer),
            "logprobs": _log_probs(answer.tokens) if asked.logprobs else None,
            "finish_reason": answer.finish,
        }
        for index, answer in enumerate(answers)
    ]
    head = {**head_of(session, asked, "chat.completion"), "id": f"chatcmpl-{session.id}-{answers[0].number}"}
    return {**head, "choices": choices, "usage": usage_of(answers)}


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


async def events_of(
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
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage_of(answers)})}\n\n"
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


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens that were read and sampled."""
    sampled, prompt = sum(len(answer.tokens) for answer in answers), answers[0].prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
