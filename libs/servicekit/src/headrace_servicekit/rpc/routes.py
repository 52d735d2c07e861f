"""Routes of tokens through experts, as they travel: zlib's form of the engine's bytes. Knows no model."""

from __future__ import annotations

import zlib

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
