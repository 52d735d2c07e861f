"""Tensors of a checkpoint, read one at a time from mapped files. Knows no lineages and no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace_trainer.backends._base import ADAPTER_KIND, CRITIC_KIND
from headrace_trainer.checkpoints.state import OPTIMIZER, WEIGHTS
from headrace_trainer.errors import Refusal

RANDOM_STATE = "random_state"


class CheckpointReader:
    """See `StateReader`. Raises Refusal CHECKPOINT_MISMATCH for a tensor that is not there."""

    def __init__(self, path: Path, optimizer_steps: int) -> None:
        self._weights = _open_tensors(path / WEIGHTS)
        self._optimizer = _open_tensors(path / OPTIMIZER)
        self.optimizer_steps = optimizer_steps

    def weight(self, name: str) -> Tensor:
        """fp32 weight, a merged one in the model's type, or a buffer in its own type."""
        return self._tensor(self._weights, name)

    def moment(self, kind: str, name: str) -> Tensor:
        """fp32 optimizer moment."""
        return self._tensor(self._optimizer, f"{kind}/{name}")

    def random_state(self) -> Tensor:
        """State of torch's CPU generator."""
        return self._tensor(self._optimizer, RANDOM_STATE)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight and buffer by name."""
        return {name: tuple(self._weights.get_slice(name).get_shape()) for name in self._weights.keys()}  # noqa: SIM118

    def moment_kinds(self) -> set[str]:
        """Kinds of optimizer moments, such as exp_avg."""
        kinds = {name.partition("/")[0] for name in self._optimizer.keys() if "/" in name}  # noqa: SIM118
        return kinds - {CRITIC_KIND, ADAPTER_KIND}

    def critic_weight(self, name: str) -> Tensor:
        """fp32 weight of the critic, or a buffer in its own type."""
        return self._tensor(self._optimizer, f"{CRITIC_KIND}/{name}")

    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight and buffer of the critic by name."""
        return self._shapes(CRITIC_KIND)

    def adapter(self, name: str) -> Tensor:
        """fp32 part of an adapter, or "alpha"."""
        return self._tensor(self._optimizer, f"{ADAPTER_KIND}/{name}")

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every part of an adapter by name, and "alpha"."""
        return self._shapes(ADAPTER_KIND)

    def _shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        own = [name for name in self._optimizer.keys() if name.startswith(f"{kind}/")]  # noqa: SIM118
        return {
            name.removeprefix(f"{kind}/"): tuple(self._optimizer.get_slice(name).get_shape()) for name in own
        }

    def _tensor(self, file: Any, name: str) -> Tensor:
        try:
            found: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise Refusal(
                "CHECKPOINT_MISMATCH", f"the checkpoint has no tensor {name!r}: it is of another model"
            ) from error
        return found


def _open_tensors(path: Path) -> Any:
    opened: Any = safe_open(path, framework="pt", device="cpu")
    return opened.__enter__()
