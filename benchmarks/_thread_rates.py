"""What threads do to a version's bytes in a second on this machine: cast, verify, copy, take as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from unittest.mock import patch

COUNT = 1 << 27
"""Elements of bf16."""
TRIES = 5
PIECE_BYTES = 64 << 20


def thread_rates(threads: int = 1) -> dict[str, float]:
    """GB/s of bf16 that so many threads cast (bf16 to bf16, with NaN's sum and the digest), verify, copy into the place
    of pinned memory, and copy and verify as it arrives: the fastest of a few. Of one thread in seconds of its own, so
    that other work on the machine counts little; of several in seconds of the clock.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    import torch
    from headrace.common.v1 import common_pb2
    from headrace_modelkit.pinned import copy_bytes, flat_bytes
    from headrace_servicekit.rpc import digests
    from headrace_servicekit.weights.arrivals import Arrival
    from headrace_servicekit.weights.versions import check_body
    from headrace_trainer.backends.shared.casting import cast_into

    torch.set_num_threads(1)
    tensor, types = torch.randn(COUNT).to(torch.bfloat16), {"w": torch.bfloat16}
    room, other = memoryview(bytearray(2 * COUNT)), memoryview(bytearray(2 * COUNT))
    entry = common_pb2.WeightEntry(name="w", size_bytes=2 * COUNT)
    manifest = common_pb2.WeightManifest(entries=[entry])

    def arrive() -> None:
        arrival = Arrival(other, manifest.entries, {})
        for first in range(0, 2 * COUNT, PIECE_BYTES):
            asyncio.run(arrival.add(room[first : first + PIECE_BYTES]))

    def cast() -> None:
        manifest.entries[0].digest = cast_into([("w", tensor, room)], types)["w"]

    acts: dict[str, Callable[[], None]] = {
        "cast": cast,
        "verify": lambda: check_body(room, manifest),
        "stage": lambda: copy_bytes(flat_bytes(other), flat_bytes(room), threads),
        "arrive": arrive,
    }
    took: dict[str, list[float]] = {name: [] for name in acts}
    with patch.object(digests, "own_threads", lambda: threads):
        for _ in range(TRIES):
            for name, act in acts.items():
                started = clock()
                act()
                took[name].append(clock() - started)
    return {name: round(2e-9 * COUNT / min(each), 2) for name, each in took.items()}
