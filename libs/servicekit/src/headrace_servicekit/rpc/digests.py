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


class RunningDigest:
    """`digest_bytes` of all pieces together."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Adds a piece."""
        self._hash.update(piece)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return str(self._hash.hexdigest())


def trajectory_digest(trajectory: common_pb2.Trajectory) -> str:
    """Digest of a trajectory's body: every field except its texts, its images' files and body_digest."""
    return digest_and_size(trajectory)[0]


def digest_and_size(trajectory: common_pb2.Trajectory) -> tuple[str, int]:
    """`trajectory_digest`, and the bytes of the whole message: asking it for its size would serialise it again."""
    whole = trajectory.SerializeToString(deterministic=True)
    tail = _tail(trajectory)
    if not whole.endswith(tail):  # fields of a newer contract come behind
        return digest_bytes(_body(trajectory)), len(whole)
    # Cutting the serialised tail spares a copy of the body, which may be images.
    return digest_bytes(memoryview(whole)[: len(whole) - len(tail)]), len(whole)


_LEFT_OUT = ("completion_text", "raw_prompt_text", "raw_completion_text", "images", "body_digest")
"""The fields with the highest numbers."""


def _tail(trajectory: common_pb2.Trajectory) -> bytes:
    return common_pb2.Trajectory(
        **{name: getattr(trajectory, name) for name in _LEFT_OUT}
    ).SerializeToString()


def _body(trajectory: common_pb2.Trajectory) -> bytes:
    body = common_pb2.Trajectory()
    body.CopyFrom(trajectory)
    for left_out in _LEFT_OUT:
        body.ClearField(left_out)
    return body.SerializeToString(deterministic=True)


def set_digest(members: Iterable[tuple[int, int, int, str]]) -> str:
    """Digest of a set of (prompt_ordinal, sample_index, attempt, body_digest), whatever their order."""
    return digest_bytes(_canonical(sorted(members)))


def manifest_digest(
    entries: Iterable[common_pb2.WeightEntry], adapter: common_pb2.AdapterBase | None = None
) -> str:
    """Digest over names, types, shapes and digests of a manifest's entries, in their order; `adapter`: of adapters on
    this base, which is in the digest too.
    """
    own = digest_bytes(_canonical([[e.name, int(e.data_type), list(e.shape), e.digest] for e in entries]))
    if adapter is None or not adapter.digest:
        return own
    return digest_bytes(_canonical([own, adapter.digest, sorted(adapter.scales.items())]))


def _canonical(rows: object) -> bytes:
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")
