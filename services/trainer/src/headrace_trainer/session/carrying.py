"""What a leader takes from one trainer group into the next: a run's whole state, in host memory.

Knows no rounds and no wire. The next group may have another number of ranks: tensors are whole here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace_trainer.backends._base import ADAPTER_KIND, CRITIC_KIND
from headrace_trainer.checkpoints.reader import RANDOM_STATE
from headrace_trainer.errors import Refusal
from headrace_trainer.group.rank import Copies
from headrace_trainer.learning.step import Phase, StepState, Version, held_version

CARRIED = "carried"
"""Stands for a checkpoint's name in the restore round that takes up what was carried."""


@dataclass(frozen=True)
class Carried:
    """A recorded version between two groups: where its step stands, its tensors, the algorithm's state."""

    state: StepState
    copies: Copies
    algorithm_state: dict[str, float]

    @property
    def version(self) -> Version:
        """The version that it is."""
        return held_version(self.state)

    @property
    def reader(self) -> CopiesReader:
        """Its tensors, for a restore round."""
        return CopiesReader(self.copies)


def check_carried(state: StepState) -> None:
    """Raises Refusal unless a trainer stands between two steps with a recorded version."""
    held_version(state)
    if state.phase is Phase.COMMITTED:
        raise Refusal("NOT_RECORDED", "the committed version is not recorded: call RecordStep first")
    if state.phase is Phase.ACCUMULATING:
        raise Refusal("CONFLICT", "a step attempt is open: commit or abort it before the group changes")


class CopiesReader:
    """See `StateReader`: the tensors of a snapshot. Raises Refusal CARRIED_MISMATCH for one that is not there."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.optimizer_steps = copies.optimizer_steps

    def weight(self, name: str) -> Tensor:
        """fp32 weight, a merged one in the model's type, or a buffer in its own type."""
        return _of(self._copies.weights, name)

    def moment(self, kind: str, name: str) -> Tensor:
        """fp32 optimizer moment."""
        return _of(self._copies.optimizer, f"{kind}/{name}")

    def critic_weight(self, name: str) -> Tensor:
        """fp32 weight of the critic, or a buffer in its own type."""
        return _of(self._copies.optimizer, f"{CRITIC_KIND}/{name}")

    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight and buffer of the critic by name."""
        return self._shapes(CRITIC_KIND)

    def adapter(self, name: str) -> Tensor:
        """fp32 part of an adapter, or "alpha"."""
        return _of(self._copies.optimizer, f"{ADAPTER_KIND}/{name}")

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every part of an adapter by name, and "alpha"."""
        return self._shapes(ADAPTER_KIND)

    def _shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {
            name.removeprefix(f"{kind}/"): tuple(tensor.shape)
            for name, tensor in self._copies.optimizer.items()
            if name.startswith(f"{kind}/")
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight and buffer by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._copies.weights.items()}

    def moment_kinds(self) -> set[str]:
        """Kinds of optimizer moments, such as exp_avg."""
        kinds = {name.partition("/")[0] for name in self._copies.optimizer if "/" in name}
        return kinds - {CRITIC_KIND, ADAPTER_KIND}

    def random_state(self) -> Tensor:
        """State of torch's CPU generator."""
        return _of(self._copies.optimizer, RANDOM_STATE)


def _of(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise Refusal("CARRIED_MISMATCH", f"what was carried has no tensor {name!r}: it is of another model")
    return tensors[name]
