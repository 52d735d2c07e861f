"""Content digests that two services must compute alike: xxh3-128, hexadecimal.

They detect corruption and mismatch between honest parties; they are no signatures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import xxhash
from headrace.common.v1 import common_pb2


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of a buffer, 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


def trajectory_digest(trajectory: common_pb2.Trajectory) -> str:
    """Digest of a trajectory's body: every field except completion_text and body_digest."""
    body = common_pb2.Trajectory()
    body.CopyFrom(trajectory)
    body.ClearField("completion_text")
    body.ClearField("body_digest")
    return digest_bytes(body.SerializeToString(deterministic=True))


def set_digest(members: Iterable[tuple[int, int, int, str]]) -> str:
    """Digest of a set of (prompt_ordinal, sample_index, attempt, body_digest), whatever their order."""
    return digest_bytes(_canonical(sorted(members)))


def manifest_digest(entries: Iterable[common_pb2.WeightEntry]) -> str:
    """Digest over names, types, shapes and digests of a manifest's entries, in their order."""
    return digest_bytes(_canonical([[e.name, int(e.data_type), list(e.shape), e.digest] for e in entries]))


def _canonical(rows: object) -> bytes:
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")
