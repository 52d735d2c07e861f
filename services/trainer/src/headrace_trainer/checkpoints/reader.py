"""What a checkpoint holds of a model's state, and reading it one tensor at a time. Knows no model and no lineages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, TensorsInMemory
from headrace_modelkit.weights import below, own_name
from torch import Tensor

from headrace_trainer.errors import Refusal

RANDOM_STATE = "random_state"
CRITIC_KIND = "critic"
"""Kind of the entries of `Backend.moment_parts` that are weights of the critic: no rollout engine gets them."""
ADAPTER_KIND = "adapter"
"""Kind of the entries that are adapters: an engine gets them merged with the weights that they stand beside."""
STEPS_KIND = "steps"
"""Kind of the entries that say how many optimizer steps a policy has made that is not the run's own."""


@dataclass(frozen=True)
class ReferenceFacts:
    """Which frozen model it is, a reference or what adapters stand beside: by name for people, and its digest."""

    name: str
    digest: str


@dataclass(frozen=True)
class StatePart:
    """What one rank saves of a tensor: a box of the whole, whose shape is given. All ranks' boxes make up the tensor.

    `value` is on the device, and good until the next part is asked for.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    value: Tensor


class StateReader:
    """Named tensors of a run's state, or boxes of them: weights, and optimizer state named kind/weight.

    Raises Refusal `reason` for a tensor that is not there. With a `policy`, only what there is of that one of several.
    """

    def __init__(
        self,
        weights: Tensors,
        optimizer: Tensors,
        optimizer_steps: int,
        reason: str,
        source: str,
        policy: str | None = None,
    ) -> None:
        self._weights, self._optimizer, self._steps = weights, optimizer, optimizer_steps
        self._reason, self._source, self._policy = reason, source, policy
        self._weights_only = False

    @classmethod
    def of_checkpoint(cls, path: Path, files: Iterable[str], optimizer_steps: int) -> StateReader:
        """Of these files in a checkpoint's directory, which all ranks have written. Raises OSError and ValueError."""
        names = sorted(name for name in files if name.endswith(".safetensors"))
        weights, optimizer = (
            TensorFiles([path / name for name in names if name.startswith(kind)])
            for kind in ("weights", "optimizer")
        )
        return cls(weights, optimizer, optimizer_steps, "CHECKPOINT_MISMATCH", "the checkpoint")

    @classmethod
    def of_version(cls, weights: Mapping[str, Tensor]) -> StateReader:
        """Of a published version: there is no optimizer state, critic or adapter."""
        return cls(TensorsInMemory(weights), TensorsInMemory({}), 0, "WEIGHTS_MISMATCH", "the version")

    def of_policy(self, policy: str) -> StateReader:
        """What there is of one of several policies, by its own names; "" is the run's own."""
        own = copy(self)
        own._policy = policy
        return own

    def without_moments(self) -> StateReader:
        """The same with no optimizer step behind it."""
        own = copy(self)
        own._weights_only = True
        return own

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps behind the moments; 0: there are none to load."""
        if self._weights_only:
            return 0
        return int(self.moment(STEPS_KIND, STEPS_KIND)) if self._policy else self._steps

    def weight(self, name: str, box: Box | None = None) -> Tensor:
        """fp32 weight, or a buffer in its own type; a box of it alone, as for all of these."""
        return self._tensor(self._weights, "", name, box)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight and buffer by name."""
        return {own: self._weights.shape(name) for own, name in self._own(self._weights, "").items()}

    def moment(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        """fp32 optimizer moment, kind exp_avg or exp_avg_sq."""
        return self._tensor(self._optimizer, f"{kind}/", name, box)

    def moment_kinds(self) -> set[str]:
        """Kinds of optimizer moments that there are."""
        kinds = {name.partition("/")[0] for name in self._optimizer.names() if "/" in name}
        return kinds - {CRITIC_KIND, ADAPTER_KIND, STEPS_KIND}

    def moment_names(self) -> set[str]:
        """Names of what has optimizer state."""
        kinds = {name.partition("/")[0] for name in self._optimizer.names() if "/" in name} - {STEPS_KIND}
        return {own for kind in kinds for own in self._own(self._optimizer, f"{kind}/")}

    def critic_weight(self, name: str, box: Box | None = None) -> Tensor:
        """fp32 weight of the critic, or a buffer in its own type."""
        return self._tensor(self._optimizer, f"{CRITIC_KIND}/", name, box)

    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight and buffer of the critic by name; empty without one."""
        return self._shapes(f"{CRITIC_KIND}/")

    def adapter(self, name: str, box: Box | None = None) -> Tensor:
        """fp32 part of an adapter, or "alpha"."""
        return self._tensor(self._optimizer, f"{ADAPTER_KIND}/", name, box)

    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every part of an adapter by name, and "alpha"; empty without any."""
        return self._shapes(f"{ADAPTER_KIND}/")

    def random_state(self) -> Tensor:
        """State of torch's CPU generator."""
        return self._tensor(self._optimizer, "", RANDOM_STATE)

    def _shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {own: self._optimizer.shape(name) for own, name in self._own(self._optimizer, kind).items()}

    def _own(self, tensors: Tensors, kind: str) -> dict[str, str]:
        """Those of a kind, by their own names."""
        found = {name.removeprefix(kind): name for name in tensors.names() if name.startswith(kind)}
        if self._policy is None:
            return found
        named = {own_name(name): full for name, full in found.items()}
        return {name: full for (policy, name), full in named.items() if policy == self._policy}

    def _tensor(self, tensors: Tensors, kind: str, name: str, box: Box | None = None) -> Tensor:
        full = f"{kind}{below(self._policy or '', name)}"
        if full not in tensors.names():
            raise Refusal(self._reason, f"{self._source} has no tensor {full!r}: it is of another model")
        return tensors.read(full, box)
