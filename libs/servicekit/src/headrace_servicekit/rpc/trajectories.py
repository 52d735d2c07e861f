"""Parts of trajectories on the wire: who took which turn, and the routes of tokens through experts.

Routes are zlib's form of the engine's bytes. Knows no model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

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
    """As it travels; nothing for nothing."""
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
