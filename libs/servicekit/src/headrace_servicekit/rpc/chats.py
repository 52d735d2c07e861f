"""Chat messages on the wire, with whatever keys chat templates read beside the role and the content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.common.v1 import common_pb2

OWN = ("role", "content")


def keys_of(turn: Mapping[str, Any]) -> str:
    """The keys of a message beside its role and its text, as JSON; empty for none. ValueError for what is no JSON."""
    keys = {key: value for key, value in turn.items() if key not in OWN and value is not None}
    if turn.get("content", "") is None:
        keys["content"] = None
    try:
        return json.dumps(keys, ensure_ascii=False, allow_nan=False) if keys else ""
    except TypeError as error:
        raise ValueError(str(error)) from error


def chat_message(turn: Mapping[str, Any]) -> common_pb2.ChatMessage:
    """A message of {role, content} and other keys for the wire."""
    return common_pb2.ChatMessage(role=turn["role"], content=turn["content"] or "", keys_json=keys_of(turn))


def chat_turn(role: str, content: str, keys_json: str = "") -> dict[str, Any]:
    """A message as chat templates take it. Raises ValueError for keys that are no JSON object."""
    return {"role": role, "content": content, **(json.loads(keys_json) if keys_json else {})}
