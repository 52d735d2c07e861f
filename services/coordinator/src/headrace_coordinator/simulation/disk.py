"""The disk of the imaginary trainers: checkpoints by run directory, which outlive processes and get damaged."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common

Weights = tuple[tuple[int, int], ...]
"""Slots (prompt, sample) that went into a version, in order of steps."""


@dataclass
class Stored:
    """A checkpoint. `damage` says what is wrong with it; a `torn` one is found by listing, others by reading."""

    directory: str
    name: str
    version: common.PolicyVersion
    weights: Weights
    ledger: bytes
    damage: str = ""
    torn: bool = False
    set_aside: bool = False


@dataclass
class Disk:
    """All checkpoints, newest last."""

    checkpoints: list[Stored] = field(default_factory=list)

    def save(self, stored: Stored) -> None:
        """Adds a checkpoint; the same one only once."""
        if self.find(stored.directory, stored.name) is None:
            self.checkpoints.append(stored)

    def listed(self, directory: str) -> list[Stored]:
        """What was not set aside, newest first."""
        return [c for c in reversed(self.checkpoints) if c.directory == directory and not c.set_aside]

    def find(self, directory: str, name: str) -> Stored | None:
        """A listed checkpoint by name."""
        return next((c for c in self.listed(directory) if c.name == name), None)
