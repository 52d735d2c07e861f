"""Finished trajectories that their producer keeps until the ledger says TRAINED or DROPPED.

Knows no engine; one body a slot, the latest attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2

Slot = tuple[int, int]


class Retention:
    """The bodies of one run, in host memory, counted against a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.size_bytes = 0
        # With their sizes: a message that is asked for its size is serialised.
        self._kept: dict[Slot, tuple[common_pb2.Trajectory, int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        """True when no more work should be taken."""
        return self.size_bytes >= self.budget_bytes

    def add(self, trajectory: common_pb2.Trajectory) -> None:
        """Keeps a body; an earlier attempt at the slot goes, a later one stays."""
        slot = _slot(trajectory.sample)
        before = self._kept.get(slot)
        if before is not None and before[0].attempt > trajectory.attempt:
            return
        self.release([trajectory.sample])
        size = trajectory.ByteSize()
        self._kept[slot] = (trajectory, size)
        self.size_bytes += size

    def items(self) -> list[rollout_pb2.InventoryItem]:
        """The inventory, by slot."""
        return [
            rollout_pb2.InventoryItem(
                sample=kept.sample,
                attempt=kept.attempt,
                body_digest=kept.body_digest,
                size_bytes=size,
            )
            for _, (kept, size) in sorted(self._kept.items())
        ]

    def fetch(self, samples: Iterable[common_pb2.SlotKey]) -> Iterator[tuple[common_pb2.Trajectory, int]]:
        """The bodies of the given slots that are kept, and their bytes."""
        for sample in samples:
            kept = self._kept.get(_slot(sample))
            if kept is not None:
                yield kept

    def release(self, samples: Iterable[common_pb2.SlotKey]) -> None:
        """Ends retention of the given slots."""
        for sample in samples:
            _, size = self._kept.pop(_slot(sample), (None, 0))
            self.size_bytes -= size


def _slot(sample: common_pb2.SlotKey) -> Slot:
    return sample.prompt_ordinal, sample.sample_index
