"""Conversations in rows: their messages with all keys, the answer behind them, and what a chat template gets beside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_schema.problems import show

from headrace_coordinator.data.builtin.values import BadRow, Row, jsonable

ROLES = ("system", "user", "assistant", "tool", "developer", "ipython", "function")
ANSWERED = ("user", "tool", "ipython", "function")
"""Roles of a last message, which the model answers."""


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages."""
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Mapping) for each in value)
    )


def until_learned(row: Row, key: str) -> Row:
    """The row without turns of `key` behind the last assistant's turn that is learned from, where one has weight 0."""
    if not is_conversation(row.get(key)):
        return row
    turns: Sequence[Row] = row[key]
    own = [(at, turn.get("weight") != 0) for at, turn in enumerate(turns) if turn.get("role") == "assistant"]
    if not own or own[-1][1]:
        return row
    learned = [at for at, wanted in own if wanted]
    if not learned:
        raise BadRow(
            f"has no turn in {key!r} that is learned from", "give one the weight 1, or leave the row out"
        )
    return {**row, key: list(turns[: learned[-1] + 1])}


def conversation(
    turns: Sequence[Row], key: str, *, prompt_alone: bool
) -> tuple[tuple[dict[str, Any], ...], Mapping[str, Any] | None]:
    """The turns up to the one that is answered, and the assistant's turn that answers it, which may be missing."""
    messages = tuple(_message(turn, f"{key}[{place}]") for place, turn in enumerate(turns))
    answer, last = None, messages[-1]
    if last["role"] == "assistant":
        if prompt_alone:
            reason = f"ends {key!r} with a turn of the assistant, which a model does not go on with"
            raise BadRow(reason, "leave it out, or begin all answers alike with data.prompt.prefill")
        answer, messages = with_objects(last), messages[:-1]
    if not messages or messages[-1]["role"] not in ANSWERED:
        reason = f"has no user's turn at the end of {key!r}, nor a tool's answer"
        raise BadRow(reason, "end it with a message of the user or of a tool")
    return messages, answer


def spoken(turn: Mapping[str, Any]) -> str:
    """What a turn says as people read it: its text, and its calls of tools as JSON."""
    calls = turn.get("tool_calls")
    return f"{turn.get('content') or ''}{json.dumps(calls) if calls else ''}"


def _message(turn: Row, place: str) -> dict[str, Any]:
    """A message with all its keys, whatever chat templates read of them; its parts are one text."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise BadRow(f"has {show(role)} as role of {place}", f"use one of: {', '.join(ROLES)}")
    keys = {
        key: jsonable(value, f"{place}.{key}")
        for key, value in turn.items()
        if key not in ("role", "content") and value is not None
    }
    if isinstance(content, (list, tuple)):
        content = "".join(part_text(part, place) for part in content)
    calls = role == "assistant" and bool(keys.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls):
        raise BadRow(
            f"has {show(content)} as content of {place}",
            "write text, or parts of type text, image, video and audio",
        )
    return {"role": role, "content": content, **keys}


def part_text(part: Any, place: str) -> str:
    """The text of a part of a message. Raises `BadRow` for one that has none."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise BadRow(
            f"has a part of type {show(kind)} in {place}",
            "write text, or parts of type text, image, video and audio",
        )
    return text


def with_objects(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls of tools have their arguments as objects, which OpenAI writes as JSON texts."""
    if not isinstance(calls := turn.get("tool_calls"), list):
        return turn
    return {**turn, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (TypeError, KeyError, ValueError):
        return call


def arguments(row: Row) -> dict[str, Any]:
    """What a row gives the chat template beside its messages: tools, and what TRL calls its kwargs."""
    found: dict[str, Any] = {}
    for key, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if (given := row.get(key)) is None:
            continue
        try:
            given = json.loads(given) if isinstance(given, str) else jsonable(given, key)
        except json.JSONDecodeError as error:
            raise BadRow(f"has no JSON under {key!r} ({error})", "write it as JSON") from error
        if not isinstance(given, kind):
            raise BadRow(f"has {show(given)} under {key!r}", f"give a JSON {kind.__name__}")
        found |= given if isinstance(given, dict) else {key: given} if given else {}
    return found
