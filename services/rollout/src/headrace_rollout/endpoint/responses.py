"""POST /v1/responses in terms of chat completions: its items as messages, and an answer as a response.

Items beside text, calls and their outputs are refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from headrace_servicekit.session_marks import session_of_answer

from headrace_rollout.endpoint.answers import Answer
from headrace_rollout.endpoint.completions import Form, log_probs_of
from headrace_rollout.endpoint.requests import ChatRequest, Refusal, read_request
from headrace_rollout.endpoint.session import AgentSession
from headrace_rollout.endpoint.streaming import Piece, Tokens

_NOTHING = Answer(0, "", (), "stop", 0, ())
_ONLY = "give messages, function_call and function_call_output"


_SHARED = (
    *("model", "tools", "tool_choice", "top_logprobs", "stream", "stream_options", "temperature", "top_p"),
    *("seed", "parallel_tool_calls"),
)
"""Keys that requests of both forms have."""
_OWN = (
    *("input", "instructions", "previous_response_id", "max_output_tokens", "text", "include", "reasoning"),
    *("background", "conversation", "prompt"),
)
_LOG_PROBS = "message.output_text.logprobs"


def read_response_request(session: AgentSession, body: bytes) -> ChatRequest:
    """The request as one for a chat completion.

    Raises Refusal with the key and what to do.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_request", f"the body: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, "invalid_request", "the body: give a JSON object")
    wrong = {
        "background": bool(given.get("background")) and "leave it out",
        "conversation": given.get("conversation") is not None
        and "send earlier items, or previous_response_id",
        "prompt": given.get("prompt") is not None and "send input",
        "reasoning": any((given.get("reasoning") or {}).get(key) for key in ("effort", "mode"))
        and "give data.prompt.template_arguments in the run's spec; leave it out here",
        **{
            key: given[key] is not None and "it is no key of responses; leave it out"
            for key in given
            if key in ChatRequest.model_fields and key not in _SHARED
        },
    }
    for param, reason in wrong.items():
        if reason:
            raise Refusal(400, "unsupported_parameter", f"{param}: {reason}", param)
    messages = _before(given, session)
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
        "stream": given.get("stream"),
        "verbosity": (given.get("text") or {}).get("verbosity"),
        "logprobs": _LOG_PROBS in (given.get("include") or ()),
        **{key: given.get(key) for key in ("temperature", "top_p", "seed", "parallel_tool_calls")},
        **{key: each for key, each in given.items() if key not in (*ChatRequest.model_fields, *_OWN)},
    }
    return read_request(json.dumps({key: value for key, value in chat.items() if value is not None}).encode())


def _session_of(body: bytes) -> str:
    """The session of the response that a request goes on from; empty for none."""
    try:
        found = json.loads(body).get("previous_response_id")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return session_of_answer(found) if isinstance(found, str) else ""


def _before(given: Mapping[str, Any], session: AgentSession) -> list[dict[str, Any]]:
    """The messages that stand before the input."""
    instructions = given.get("instructions")
    before: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if (named := given.get("previous_response_id")) is None:
        return before
    number = str(named).removeprefix(f"resp_{session.id}_")
    found = session.exchanges.of_answer(int(number)) if number.isdecimal() else None
    if found is None:
        message = "previous_response_id: it is no response of this session, or one of long ago"
        raise Refusal(404, "not_found", message, "previous_response_id")
    request, answer = found
    said = [message.model_dump(exclude_none=True) for message in request.messages]
    if (
        before and said[0]["role"] == "system"
    ):  # Instructions are the request's own: those of before do not hold on.
        said = said[1:]
    return [*(before or ()), *said, message_of(answer)]


def message_of(answer: Answer) -> dict[str, Any]:
    """An answer as a message of a later request."""
    calls = [
        {"id": id, "function": {"name": name, "arguments": arguments}}
        for id, (name, arguments) in zip(answer.ids, answer.calls, strict=True)
    ]
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
            named = {"id": item["call_id"]} if item.get("call_id") else {}
            found[-1].setdefault("tool_calls", []).append({**named, "function": call})
        elif kind == "function_call_output":
            answer = {"role": "tool", "content": _text(item.get("output"))}
            found.append({**answer, "tool_call_id": item.get("call_id")})
        elif kind != "reasoning" or item.get("summary") or item.get("content"):
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
        message = {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": status}
        output.append({**message, "content": [_part(answer.content, _told(asked, answer.tokens))]})
    output += [
        {
            "type": "function_call",
            "id": f"fc_{id}_{index}",
            "call_id": answer.ids[index],
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


async def response_events(
    session: AgentSession, asked: ChatRequest, pieces: AsyncIterator[Piece]
) -> AsyncIterator[str]:
    """Server-sent events of a response as it is made."""
    count, model = 0, session.terms.model

    def event(kind: str, **fields: Any) -> str:
        nonlocal count
        count += 1
        return (
            f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': count - 1, **fields})}\n\n"
        )

    at: dict[str, Any] = {}
    async for piece in pieces:
        id = f"resp_{session.id}_{piece.first}"
        if not count:
            begun = {
                **response(id, asked, _NOTHING, model),
                "status": "in_progress",
                "output": [],
                "usage": None,
            }
            yield event("response.created", response=begun)
            yield event("response.in_progress", response=begun)
        if piece.text and not at:
            at = {"item_id": f"msg_{id}", "output_index": 0, "content_index": 0}
            message = {"type": "message", "id": f"msg_{id}", "role": "assistant"}
            item = {**message, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=0, item=item)
            yield event("response.content_part.added", **at, part=_part(""))
        if piece.text:
            told = _told(asked, piece.tokens)
            yield event("response.output_text.delta", **at, delta=piece.text, logprobs=told)
        if piece.answer is None:
            continue
        whole = response(id, asked, piece.answer, model)
        if at:
            text, told = piece.answer.content, _told(asked, piece.answer.tokens)
            yield event("response.output_text.done", **at, text=text, logprobs=told)
            yield event("response.content_part.done", **at, part=_part(text, told))
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                yield event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
                of = {"item_id": item["id"], "output_index": index}
                yield event("response.function_call_arguments.delta", **of, delta=item["arguments"])
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield event("response.function_call_arguments.done", **of, **done)
            elif not at:  # A turn without a text.
                yield event("response.output_item.added", output_index=index, item=item)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(
            "response.completed" if whole["status"] == "completed" else "response.incomplete", response=whole
        )


def _part(text: str, log_probs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(log_probs)}


def _told(asked: ChatRequest, tokens: Tokens) -> list[dict[str, Any]]:
    """The tokens' log-probs, where they were asked for."""
    return log_probs_of(tokens) if asked.logprobs else []


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


RESPONSES = Form(
    read_response_request,
    lambda session, asked, answers: response(
        f"resp_{session.id}_{answers[0].number}", asked, answers[0], session.terms.model
    ),
    response_events,
    _session_of,
)
