"""A small snapshot to write as a checkpoint."""

from __future__ import annotations

import torch
from headrace_trainer.checkpoints.directory import Snapshot
from headrace_trainer.checkpoints.parts import StateCopy
from headrace_trainer.learning.step import Version


def snapshot(step: int, *, number: int | None = None) -> Snapshot:
    weights = {"a": torch.full((300, 7), float(step)), "b": torch.zeros(0, 4, dtype=torch.bfloat16)}
    optimizer = {"exp_avg/a": torch.ones(300, 7) * step, "random_state": torch.get_rng_state()}
    version = Version(number or step + 1, step, step, f"digest-{step}")
    lineage = {version.number: version.ordinal}
    copy = StateCopy(weights, optimizer, step)
    return Snapshot(version, copy, lineage, "store", b"\x00ledger", b"manifest")
