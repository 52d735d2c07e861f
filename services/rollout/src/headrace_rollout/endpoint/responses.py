"""POST /v1/responses in terms of chat completions: its items as messages, and an answer as a response.

Streams, and items beside text, calls and their outputs, are refused by name. Knows no session.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_rollout.endpoint.requests import ChatRequest, Refusal, read_request
from headrace_rollout.endpoint.session import Answer

_ONLY = "give messages, function_call and function_call_output"


def read_response_request(body: bytes, last: tuple[str, ChatRequest, Answer] | None) -> ChatRequest:
    """The request as one for a chat completion. `last` is the session's last response: id, request and answer.

    Raises Refusal with the key and what to do.
    """
    try:
        given = json.loads(body)
    except ValueError as error:
        raise Refusal(400, "invalid_request", f"the body: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, "invalid_request", "the body: give a JSON object")
    wrong = {
        "stream": bool(given.get("stream"))
        and "responses are not streamed; leave it out, or use chat completions",
        "background": bool(given.get("background")) and "leave it out",
        "conversation": given.get("conversation") is not None
        and "send earlier items, or previous_response_id",
        "prompt": given.get("prompt") is not None and "send input",
    }
    for param, reason in wrong.items():
        if reason:
            raise Refusal(400, "unsupported_parameter", f"{param}: {reason}", param)
    messages = _before(given, last)
    listed = given.get("input")
    messages += messages_of([{"role": "user", "content": listed}] if isinstance(listed, str) else listed)
    chat = {
        "model": given.get("model") or "",
        "messages": messages,
        "tools": _tools(given.get("tools")),
        "tool_choice": given.get("tool_choice"),
        "max_tokens": given.get("max_output_tokens"),
        "top_logprobs": given.get("top_logprobs"),
        "response_format": (given.get("text") or {}).get("format"),
    }
    return read_request(json.dumps({key: value for key, value in chat.items() if value is not None}).encode())


def _before(given: Mapping[str, Any], last: tuple[str, ChatRequest, Answer] | None) -> list[dict[str, Any]]:
    """The messages that stand before the input."""
    instructions = given.get("instructions")
    before: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if (named := given.get("previous_response_id")) is None:
        return before
    if last is None or named != last[0]:
        raise Refusal(
            400,
            "not_extended",
            "previous_response_id: it is not the session's last response",
            "previous_response_id",
        )
    _, request, answer = last
    earlier = [message.model_dump(exclude_none=True) for message in request.messages]
    if before and earlier[0] != before[0]:
        raise Refusal(400, "not_extended", "instructions: they differ from the first ones", "instructions")
    return [*earlier, message_of(answer)]


def message_of(answer: Answer) -> dict[str, Any]:
    """An answer as a message of a later request."""
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in answer.calls]
    return {"role": "assistant", "content": answer.content} | ({"tool_calls": calls} if calls else {})


def messages_of(items: Any) -> list[dict[str, Any]]:
    """Items of an input as messages; the calls of a turn join its text. Raises Refusal."""
    if not isinstance(items, list):
        raise Refusal(400, "invalid_request", "input: give a text or a list of items", "input")
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            found.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif kind == "function_call":
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            found[-1].setdefault("tool_calls", []).append({"function": call})
        elif kind == "function_call_output":
            found.append({"role": "tool", "content": _text(item.get("output"))})
        elif kind != "reasoning":
            raise Refusal(
                400,
                "unsupported_parameter",
                f"input.{index}: {kind!r} is no item that is read here; {_ONLY}",
                "input",
            )
    return found


def response(id: str, asked: ChatRequest, answer: Answer, model: str) -> dict[str, Any]:
    """The answer as the object that clients parse."""
    cut = answer.finish == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": status, "content": [part]}
        )
    output += [
        {
            "type": "function_call",
            "id": f"fc_{id}_{index}",
            "call_id": f"call_{id}_{index}",
            "name": name,
            "arguments": arguments,
            "status": "completed",
        }
        for index, (name, arguments) in enumerate(answer.calls)
    ]
    sampled = len(answer.tokens)
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": asked.model or model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + sampled,
        },
    }


def _text(content: Any) -> Any:
    """Text parts as those of a chat message; what is no text is for the request's own checks."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        else part
        for part in content
    ]


def _tools(given: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    if not given:
        return None
    found = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            message = f"tools.{index}: only functions of the agent's own are called; give type: function"
            raise Refusal(400, "unsupported_parameter", message, "tools")
        kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        found.append({"type": "function", "function": kept})
    return found
