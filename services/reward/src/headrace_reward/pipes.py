"""What service and scorer child say to each other: JSON objects."""

from __future__ import annotations

import json
from typing import Any

from headrace_servicekit.process.worker_pipes import Codec

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """A frame's body."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode(body: bytes) -> Message:
    """The message of a frame's body; ValueError where it is no JSON object."""
    message = json.loads(body.decode("utf-8", "surrogatepass"))
    if not isinstance(message, dict):
        raise ValueError("a frame holds a JSON object")
    return message


CODEC = Codec(encode, decode)
