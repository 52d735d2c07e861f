"""Parts of trajectories on the wire: who took which turn, routes of tokens through experts, what a teacher finds
likeliest, and chat messages with whatever keys templates read beside role and content.

Routes are zlib's form of the engine's bytes. Knows no model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from headrace.common.v1 import common_pb2


def turn_roles(talk: common_pb2.Conversation) -> list[str]:
    """The role that took each turn of the policy; empty where there are no roles."""
    found = [talk.messages[turn.message].party for turn in talk.turns if turn.message < len(talk.messages)]
    return found if any(found) else []


def segments_of(trajectory: common_pb2.Trajectory) -> Iterator[common_pb2.Segment]:
    """The segments of all branches, in order."""
    return (segment for branch in trajectory.branches for segment in branch.segments)


LEVEL = 1
"""Routes are nearly random: more effort saves little."""


def pack_routes(data: bytes) -> bytes:
    """The routes as they travel; empty for empty ones."""
    return zlib.compress(data, LEVEL) if data else b""


def unpack_routes(packed: bytes, most: int) -> bytes:
    """What `pack_routes` was given. Raises ValueError where that has more than `most` bytes, or was not packed so."""
    if not packed:
        return b""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(f"it is no zlib stream ({error})") from error
    if len(found) > most or not reader.eof:
        raise ValueError(f"it has more than {most} bytes, or ends too early")
    return found


IDS, LOG_PROBS = np.dtype("<i4"), np.dtype("<f4")


def pack_top(ids_TM: np.ndarray, log_probs_TM: np.ndarray) -> bytes:
    """The M likeliest words in the place of each of T tokens, and their log-probs, as they travel: 8 T M bytes."""
    return ids_TM.astype(IDS).tobytes() + log_probs_TM.astype(LOG_PROBS).tobytes()


def unpack_top(packed: bytes, tokens: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """What `pack_top` was given for so many tokens. Raises ValueError where it has other sizes."""
    half = tokens * top * IDS.itemsize
    if len(packed) != 2 * half:
        raise ValueError(f"it has {len(packed)} bytes, and {top} words of {tokens} tokens have {2 * half}")
    ids, log_probs = np.frombuffer(packed[:half], IDS), np.frombuffer(packed[half:], LOG_PROBS)
    return ids.reshape(tokens, top), log_probs.reshape(tokens, top)


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
