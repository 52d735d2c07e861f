"""Named tensors of a run's state, one at a time: of a checkpoint's mapped files, or of host memory. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor
from typing_extensions import override

from headrace_trainer.backends._base import ADAPTER_KIND, CRITIC_KIND, StateReader
from headrace_trainer.checkpoints.state import OPTIMIZER, WEIGHTS
from headrace_trainer.errors import Refusal

RANDOM_STATE = "random_state"


class Tensors(Protocol):
    """Tensors by name."""

    def names(self) -> Iterable[str]:
        """Of all of them."""

    def tensor(self, name: str) -> Tensor:
        """One of `names`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of `names`; reads no tensor."""


class _MappedFile(Tensors):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        opened: Any = safe_open(path, framework="pt", device="cpu")
        self._file = opened.__enter__()
        self._names = frozenset(self._file.keys())

    @override
    def names(self) -> Iterable[str]:
        return self._names

    @override
    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file.get_tensor(name)
        return found

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())


class _Memory(Tensors):
    """Tensors in host memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @override
    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    @override
    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


class TensorReader(StateReader):
    """Reads weights, and optimizer state named kind/weight. Raises Refusal `reason` for a tensor that is not there."""

    def __init__(
        self, weights: Tensors, optimizer: Tensors, optimizer_steps: int, reason: str, source: str
    ) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._steps = optimizer_steps
        self._reason = reason
        self._source = source

    @classmethod
    def of_checkpoint(cls, path: Path, optimizer_steps: int) -> TensorReader:
        """Of a checkpoint's directory."""
        weights, optimizer = _MappedFile(path / WEIGHTS), _MappedFile(path / OPTIMIZER)
        return cls(weights, optimizer, optimizer_steps, "CHECKPOINT_MISMATCH", "the checkpoint")

    @classmethod
    def of_copies(
        cls, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], optimizer_steps: int
    ) -> TensorReader:
        """Of what a leader carries from one trainer group into the next."""
        return cls(
            _Memory(weights), _Memory(optimizer), optimizer_steps, "CARRIED_MISMATCH", "what was carried"
        )

    @classmethod
    def of_version(cls, weights: Mapping[str, Tensor]) -> TensorReader:
        """Of a published version: there is no optimizer state, critic or adapter."""
        return cls(_Memory(weights), _Memory({}), 0, "WEIGHTS_MISMATCH", "the version")

    @property
    @override
    def optimizer_steps(self) -> int:
        return self._steps

    @override
    def weight(self, name: str) -> Tensor:
        return self._tensor(self._weights, name)

    @override
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._weights.shape(name) for name in self._weights.names()}

    @override
    def moment(self, kind: str, name: str) -> Tensor:
        return self._tensor(self._optimizer, f"{kind}/{name}")

    @override
    def moment_kinds(self) -> set[str]:
        kinds = {name.partition("/")[0] for name in self._optimizer.names() if "/" in name}
        return kinds - {CRITIC_KIND, ADAPTER_KIND}

    @override
    def critic_weight(self, name: str) -> Tensor:
        return self._tensor(self._optimizer, f"{CRITIC_KIND}/{name}")

    @override
    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes(CRITIC_KIND)

    @override
    def adapter(self, name: str) -> Tensor:
        return self._tensor(self._optimizer, f"{ADAPTER_KIND}/{name}")

    @override
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes(ADAPTER_KIND)

    def random_state(self) -> Tensor:
        """State of torch's CPU generator."""
        return self._tensor(self._optimizer, RANDOM_STATE)

    def _shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        own = [name for name in self._optimizer.names() if name.startswith(f"{kind}/")]
        return {name.removeprefix(f"{kind}/"): self._optimizer.shape(name) for name in own}

    def _tensor(self, tensors: Tensors, name: str) -> Tensor:
        if name not in tensors.names():
            raise Refusal(self._reason, f"{self._source} has no tensor {name!r}: it is of another model")
        return tensors.tensor(name)
