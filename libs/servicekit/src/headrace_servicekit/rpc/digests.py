"""Content digests that two services must compute alike: xxh3-128, hexadecimal.

They detect corruption and mismatch between honest parties; they are no signatures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import xxhash
from headrace.common.v1 import common_pb2


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of a buffer, 32 hexadecimal digits."""
    return str(xxhash.xxh3_128_hexdigest(data))


STRETCH_BYTES = 4 << 20
"""Of a tensor: several threads take the digests of its stretches, whose digest is the tensor's."""
MOST_THREADS = 16
"""More do not read a host's memory faster."""


def stretches(size: int) -> list[tuple[int, int]]:
    """(begin, end) of the stretches of a tensor of `size` bytes."""
    return [(begin, min(size, begin + STRETCH_BYTES)) for begin in range(0, size, STRETCH_BYTES)]


def tensor_digest(data: memoryview) -> str:
    """Digest of a tensor's bytes: of one stretch `digest_bytes`, of several that of their digests in order."""
    return joined_digest([digest_stretch(data[begin:end]) for begin, end in stretches(len(data))])


def joined_digest(parts: Sequence[bytes]) -> str:
    """The digest of a tensor with stretches of these digests."""
    if len(parts) == 1:
        return parts[0].hex()
    return digest_bytes(b"".join(parts))


def digest_stretch(data: memoryview) -> bytes:
    """Digest of one stretch, for `joined_digest`."""
    return bytes(xxhash.xxh3_128_digest(data))


StretchDigest = xxhash.xxh3_128
"""As `digest_stretch`, of pieces."""


def own_threads() -> int:
    """How many threads may work on a body at once: as many as this process has cores, at most MOST_THREADS."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def in_threads(acts: Sequence[Callable[[], None]], threads: int | None = None) -> None:
    """Does all of them, the caller in one thread and others in up to `threads` - 1 more, which hold no lock while they
    copy or hash.

    Raises what the first in order of those that failed has raised, when none runs any more.
    """
    problems: list[tuple[int, Exception]] = []
    left: Iterator[tuple[int, Callable[[], None]]] = iter(enumerate(acts))

    def take() -> None:
        for index, act in left:
            try:
                act()
            except Exception as problem:  # noqa: BLE001 - it is raised below
                problems.append((index, problem))

    beside = min(own_threads() if threads is None else threads, len(acts)) - 1
    running = [_pool(os.getpid()).submit(take) for _ in range(beside)]
    take()
    wait(running)
    left = iter(())  # a thread may hold `take` for a moment longer, and with it what the acts use
    if problems:
        raise min(problems, key=lambda each: each[0])[1]


@cache
def _pool(_pid: int) -> ThreadPoolExecutor:
    """Of one process: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="digests")


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


_LEFT_OUT = (
    "completion_text",
    "raw_prompt_text",
    "raw_completion_text",
    "images",
    "body_digest",
    "branch_texts",
)
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
