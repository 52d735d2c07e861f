"""POST /v1/completions: the rest of a text, without a chat template; requests and answers in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

from headrace_rollout.endpoint.requests import ChatRequest, Message, Refusal, TextRequest, read_request
from headrace_rollout.endpoint.session import Answer, Session
from headrace_rollout.endpoint.streaming import Piece


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
    chat = {
        key: given.get(key)
        for key in ChatRequest.model_fields
        if key
        not in (
            "messages",
            "logprobs",
            "top_logprobs",
            "tools",
            "tool_choice",
            "response_format",
            "functions",
        )
    }
    chat |= {"messages": [{"role": "user", "content": prompt}], "logprobs": log_probs is not None}
    checked = read_request(
        json.dumps({key: value for key, value in chat.items() if value is not None}).encode()
    )
    fields = {name: getattr(checked, name) for name in checked.model_fields_set}
    return TextRequest(**{**fields, "messages": [Message(role="user", content=prompt)]})


def text_choice(asked: TextRequest, answer: Answer, index: int = 0) -> dict[str, Any]:
    """The answer as the choice that clients parse."""
    log_probs = None
    if asked.logprobs:
        texts = [text for text, _ in answer.tokens]
        offsets = [len(asked.prompt) + sum(map(len, texts[:place])) for place in range(len(texts))]
        values = [value for _, value in answer.tokens]
        log_probs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
    return {"index": index, "text": answer.content, "logprobs": log_probs, "finish_reason": answer.finish}


def text_pieces(session: Session, asked: ChatRequest, piece: Piece, first: bool) -> list[dict[str, Any]]:
    """Of a streamed completion."""
    log_probs = None
    if piece.tokens:
        texts, values = [text for text, _ in piece.tokens], [value for _, value in piece.tokens]
        log_probs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
    finish = None if piece.answer is None else piece.answer.finish
    return [{"index": piece.choice, "text": piece.text, "logprobs": log_probs, "finish_reason": finish}]
