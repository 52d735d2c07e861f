"""The disk of the simulated trainers: checkpoints by run directory, which outlive processes and get damaged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common

Weights = tuple[tuple[int, int], ...]
"""Slots (prompt, sample) that went into a version, in order of steps."""


@dataclass
class StoredCheckpoint:
    """A checkpoint. `damage` says what is wrong with it; a `torn` one is found by listing, others by reading."""

    directory: str
    name: str
    version: common.PolicyVersion
    weights: Weights
    ledger: bytes
    damage: str = ""
    torn: bool = False
    set_aside: bool = False
    hidden: bool = False
    """Its run's directory was moved away."""
    pruned: bool = False


@dataclass
class Disk:
    """All checkpoints, newest last. A `full` disk accepts none."""

    checkpoints: list[StoredCheckpoint] = field(default_factory=list)
    full: bool = False
    harmed: set[str] = field(default_factory=set)
    """Directories whose checkpoints were ever damaged or moved away."""

    def save(self, stored: StoredCheckpoint, keep: int = 0, retained: Collection[str] = ()) -> None:
        """Adds a checkpoint, the same one only once; of a run's intact ones the newest `keep` stay (0: all).

        Those named in `retained` stay too.
        """
        if self.find(stored.directory, stored.name) is None:
            self.checkpoints.append(stored)
        intact = [c for c in self.listed(stored.directory) if not c.damage]
        for checkpoint in intact[keep:] if keep else ():
            checkpoint.pruned = checkpoint.name not in retained

    def listed(self, directory: str) -> list[StoredCheckpoint]:
        """The checkpoints in a run's directory, newest first."""
        return [
            c
            for c in reversed(self.checkpoints)
            if c.directory == directory and not (c.set_aside or c.hidden or c.pruned)
        ]

    def find(self, directory: str, name: str) -> StoredCheckpoint | None:
        """A listed checkpoint by name."""
        return next((c for c in self.listed(directory) if c.name == name), None)

    def move_away(self, directory: str) -> None:
        """Moves a run's directory away, until `put_back`."""
        self.harmed.add(directory)
        for checkpoint in self.listed(directory):
            checkpoint.hidden = True

    def put_back(self, directory: str) -> None:
        """Moves a run's directory back."""
        for checkpoint in self.checkpoints:
            if checkpoint.directory == directory:
                checkpoint.hidden = False
