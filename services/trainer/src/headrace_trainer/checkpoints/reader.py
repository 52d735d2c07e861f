"""Named tensors of a run's state, one at a time: of a checkpoint's files, or of host memory. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, TensorsInMemory
from torch import Tensor
from typing_extensions import override

from headrace_trainer.backends._base import ADAPTER_KIND, CRITIC_KIND, StateReader
from headrace_trainer.errors import Refusal

RANDOM_STATE = "random_state"


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
    def of_checkpoint(cls, path: Path, files: Iterable[str], optimizer_steps: int) -> TensorReader:
        """Of these files in a checkpoint's directory, which all ranks have written. Raises OSError and ValueError."""
        names = sorted(name for name in files if name.endswith(".safetensors"))
        weights, optimizer = (
            TensorFiles([path / name for name in names if name.startswith(kind)])
            for kind in ("weights", "optimizer")
        )
        return cls(weights, optimizer, optimizer_steps, "CHECKPOINT_MISMATCH", "the checkpoint")

    @classmethod
    def of_version(cls, weights: Mapping[str, Tensor]) -> TensorReader:
        """Of a published version: there is no optimizer state, critic or adapter."""
        return cls(TensorsInMemory(weights), TensorsInMemory({}), 0, "WEIGHTS_MISMATCH", "the version")

    @property
    @override
    def optimizer_steps(self) -> int:
        return self._steps

    @override
    def weight(self, name: str, box: Box | None = None) -> Tensor:
        return self._tensor(self._weights, name, box)

    @override
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._weights.shape(name) for name in self._weights.names()}

    @override
    def moment(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        return self._tensor(self._optimizer, f"{kind}/{name}", box)

    @override
    def moment_kinds(self) -> set[str]:
        kinds = {name.partition("/")[0] for name in self._optimizer.names() if "/" in name}
        return kinds - {CRITIC_KIND, ADAPTER_KIND}

    @override
    def moment_names(self) -> set[str]:
        return {name.partition("/")[2] for name in self._optimizer.names() if "/" in name}

    @override
    def critic_weight(self, name: str, box: Box | None = None) -> Tensor:
        return self._tensor(self._optimizer, f"{CRITIC_KIND}/{name}", box)

    @override
    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes(CRITIC_KIND)

    @override
    def adapter(self, name: str, box: Box | None = None) -> Tensor:
        return self._tensor(self._optimizer, f"{ADAPTER_KIND}/{name}", box)

    @override
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes(ADAPTER_KIND)

    def random_state(self) -> Tensor:
        """State of torch's CPU generator."""
        return self._tensor(self._optimizer, RANDOM_STATE)

    def _shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        own = [name for name in self._optimizer.names() if name.startswith(f"{kind}/")]
        return {name.removeprefix(f"{kind}/"): self._optimizer.shape(name) for name in own}

    def _tensor(self, tensors: Tensors, name: str, box: Box | None = None) -> Tensor:
        if name not in tensors.names():
            raise Refusal(self._reason, f"{self._source} has no tensor {name!r}: it is of another model")
        return tensors.read(name, box)
