"""Whole copies of a run's state in host memory: carried from one trainer group into the next, or exported.

The next group may have another number of ranks: tensors are whole here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace_modelkit.lora import is_adapter
from torch import Tensor

from headrace_trainer.checkpoints.reader import TensorReader
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.rank import Copies
from headrace_trainer.group.rounds import Rounds
from headrace_trainer.learning.step import Phase, StepState, Version, held_version

CARRIED = "carried"
"""Stands for a checkpoint's name in the restore round that takes up what was carried."""
_EXPORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Carried:
    """A recorded version between two groups: the state of its steps, its tensors, the algorithm's state."""

    state: StepState
    copies: Copies
    algorithm_state: dict[str, float]

    @property
    def version(self) -> Version:
        """The version that it is."""
        return held_version(self.state)

    @property
    def reader(self) -> TensorReader:
        """Its tensors, for a restore round."""
        return _reader(self.copies)


def _reader(copies: Copies) -> TensorReader:
    return TensorReader.of_copies(copies.weights, copies.optimizer, copies.optimizer_steps)


def check_carried(state: StepState) -> None:
    """Raises Refusal unless the run is between two steps with a recorded version."""
    held_version(state)
    if state.phase is Phase.COMMITTED:
        raise Refusal("NOT_RECORDED", "the committed version is not recorded: call RecordStep first")
    if state.phase is Phase.ACCUMULATING:
        raise Refusal("CONFLICT", "a step attempt is open: commit or abort it before the group changes")


def export_run(rounds: Rounds, directory: Path, name: str) -> Path:
    """Writes the held weights below a run's directory; where. Raises Refusal INVALID for a name that cannot be."""
    if not _EXPORT_NAME.fullmatch(name) or name == "checkpoints":
        raise invalid(
            f"name {name[:100]!r}: give a directory's name of letters, digits, '.', '_' and '-' that begins with a "
            "letter or digit and is not 'checkpoints'"
        )
    weights: dict[str, Tensor] = {}
    adapters: dict[str, Tensor] = {}
    if rounds.rank.config.trainer.lora is None:
        rounds.gather(weights.update)
    else:
        copies = rounds.snapshot()
        reader = _reader(copies)
        weights = copies.weights
        adapters = {name: reader.adapter(name) for name in reader.adapter_shapes() if is_adapter(name)}
    rounds.rank.kind.export(weights, directory / name, adapters)
    return directory / name
