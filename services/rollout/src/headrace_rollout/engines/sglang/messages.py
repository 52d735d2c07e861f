"""Frames between the backend and the process that holds SGLang: JSON objects, one number for a call and its answers.

A call is {"id", "call", …}; its answers are {"id", "tokens"} while a request runs, then one {"id", "result"} or
{"id", "failed"}, which says why in a sentence.
"""

from __future__ import annotations

import json
from typing import Any

from headrace_servicekit.process.worker_pipes import Codec

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """A message as the body of a frame."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """The message of a frame's body. Raises ValueError."""
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("a message is a JSON object")
    return found


CODEC: Codec[Message] = Codec(encode, decode)
