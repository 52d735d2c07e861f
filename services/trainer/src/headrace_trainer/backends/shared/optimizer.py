"""AdamW over local shards, its moments in fp32 or in a byte each. Knows no model, no ranks and no schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from headrace_schema.sections.learning import OptimizerSection
from torch import Tensor, nn

from headrace_trainer.backends.shared.blocks import coded_bytes, decode, encode

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
"""What Muon keeps of a matrix in their place."""
KINDS = (*MOMENTS, MOMENTUM)
SCALES = "_scales"
"""Ends the names of scales, beside those of moments in a byte each."""
PART_ELEMENTS = 1 << 27
"""Elements whose moments come to the device at once: 1 GiB of them."""


@dataclass(frozen=True)
class AdamWState:
    """A copy of moments and counters: weight → kind → tensor; weights that have taken no step have none."""

    tensors: dict[str, dict[str, Tensor]]
    steps: int


@dataclass(frozen=True)
class Aside:
    """Weights with a rate of their own, which take one step of every few."""

    names: frozenset[str]
    rate: float
    every: int

    def steps(self, steps: int) -> int:
        """How many steps they have taken where the others took so many."""
        return -(-steps // self.every)


class ShardedAdamW:
    """AdamW (arXiv 1711.05101) on the ranks' own shards: plain tensors, one fused kernel.

    Dividing by the step's denominator and clipping happen inside the kernel, so the gradient is read once.
    Matrices decay, vectors (norms, biases) do not. The critic's weights have a rate of their own.

    With `moments_on_host` moments come to the shards' device for a step, some weights' at a time: the same kernels as
    without, and so the same bits. As `adamw_8bit` moments of matrices are fp32 for a step alone, some at a time too.
    """

    def __init__(
        self,
        config: OptimizerSection,
        shards: dict[str, Tensor],
        *,
        decays: set[str],
        critic: frozenset[str] = frozenset(),
        aside: Aside | None = None,
        moments_on_host: bool = False,
    ) -> None:
        self._moments_on_host = moments_on_host
        self._config = config
        self._aside = aside or Aside(frozenset(), 0.0, 1)
        self._coded = decays if config.name == "adamw_8bit" else set[str]()
        """Whose moments are in a byte each."""
        self._shards = {name: nn.Parameter(shard) for name, shard in shards.items() if shard.numel()}
        self._decays, self._critic = decays, critic
        self._adamw = self._with(config)
        self.steps = 0
        self._places: dict[tuple[str, str], Tensor] = {}

    def _with(self, config: OptimizerSection) -> Any:
        decays = self._decays if config.weight_decay else set()  # fewer groups are fewer kernels
        groups = [
            {
                "params": [
                    p
                    for name, p in self._shards.items()
                    if self.kinds_of(name) == MOMENTS
                    and (name in decays) is decayed
                    and self._owner(name) == owner
                ],
                "weight_decay": config.weight_decay if decayed else 0.0,
                "owner": owner,
            }
            for owner in ("policy", "critic", "aside")
            for decayed in (True, False)
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """What is kept of a weight."""
        return MOMENTS

    def _owner(self, name: str) -> str:
        if name in self._aside.names:
            return "aside"
        return "critic" if name in self._critic else "policy"

    @property
    def learns_aside(self) -> bool:
        """Whether the next step is one that those aside take."""
        return bool(self._aside.names) and self.steps % self._aside.every == 0

    def use(self, config: OptimizerSection) -> None:
        """Steps with other parameters from now on; moments and counters stay."""
        self._config, state = config, self._adamw.state
        self._adamw = self._with(config)
        self._adamw.state = state

    def step(
        self, gradients: dict[str, Tensor], divisor: float, rate: float, critic_rate: float = 0.0
    ) -> None:
        """One step with gradients / divisor, in place on the shards."""
        rates = {"policy": rate, "critic": critic_rate, "aside": self._aside.rate}
        resting = frozenset() if self.learns_aside else self._aside.names
        for group in self._adamw.param_groups:
            group["lr"] = rates[group["owner"]]
        device = next(iter(self._shards.values())).device
        # The fused kernel divides by this as it does for a gradient scaler.
        self._adamw.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)
        self._adamw.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        for names in self._parts():
            for name in names:
                self._shards[name].grad = None if name in resting else gradients[name]
            if self._moments_on_host or self._coded:
                self._bring(names, device)
            self._adamw.step()  # of weights that have a gradient now
            for name in names:
                self._shards[name].grad = None
            if self._moments_on_host or self._coded:
                self._take_back(names)
        self._await_host()
        self.steps += 1

    def _await_host(self) -> None:
        """What comes next may read moments on the host."""
        if self._moments_on_host and (device := next(iter(self._shards.values())).device).type == "cuda":
            torch.cuda.synchronize(device)

    def _parts(self) -> Iterator[list[str]]:
        """Names of the weights that step together: all, or as many as move at once."""
        own = [name for name in self._shards if self.kinds_of(name) == MOMENTS]
        if not self._moments_on_host and not self._coded:
            yield own
            return
        part, size = list[str](), 0
        for name in own:
            shard = self._shards[name]
            if part and size + shard.numel() > PART_ELEMENTS:
                yield part
                part, size = [], 0
            part.append(name)
            size += shard.numel()
        yield part

    def _bring(self, names: list[str], device: torch.device) -> None:
        for name in names:
            state = self._adamw.state.get(self._shards[name], {})
            for key, value in state.items():
                state[key] = value.to(device, non_blocking=True)
            if state and name in self._coded:
                state |= {kind: _decoded(state, kind) for kind in MOMENTS}

    def _take_back(self, names: list[str]) -> None:
        for name in names:
            state = self._adamw.state[self._shards[name]]
            if name in self._coded:
                state |= _coded(state)
            if self._moments_on_host:
                state |= {key: self._on_host(name, key, value) for key, value in state.items()}

    def _on_host(self, name: str, key: str, value: Tensor) -> Tensor:
        """Its copy on the host, in the same pinned memory each time."""
        if value.device.type == "cpu":
            return value
        place = self._places.get((name, key))
        if place is None:
            pinned = value.device.type == "cuda"
            place = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pinned)
            self._places[name, key] = place
        return place.copy_(value, non_blocking=True)

    def moment(self, kind: str, name: str) -> Tensor:
        """The shard of a moment; zeros before the first step."""
        shard = self._shards[name]
        state = self._adamw.state.get(shard)
        if not state:
            return torch.zeros_like(shard)
        return _decoded(state, kind) if name in self._coded else state[kind]

    def load(self, moments: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Replaces the state: kind → name → shard."""
        self.steps = steps
        for name, shard in self._shards.items():
            kinds = self.kinds_of(name)
            own = {kind: moments[kind][name].to(shard.device, torch.float32).clone() for kind in kinds}
            if name in self._coded:
                own = _coded(own)
            if self._moments_on_host:
                own = {kind: self._on_host(name, kind, value) for kind, value in own.items()}
            if kinds == MOMENTS:
                taken = self._aside.steps(steps) if name in self._aside.names else steps
                own["step"] = torch.full((), float(taken), dtype=torch.float32, device=shard.device)
            self._adamw.state[shard] = own

    def copy(self, to_host: Callable[[Tensor], Tensor]) -> AdamWState:
        """The state of the moment, by copies in host memory."""
        state = {
            name: {key: to_host(value) for key, value in self._adamw.state[shard].items()}
            for name, shard in self._shards.items()
            if self._adamw.state.get(shard)
        }
        return AdamWState(state, self.steps)

    def put_back(self, state: AdamWState) -> None:
        """Undoes the steps since `copy`."""
        self.steps = state.steps
        for name, shard in self._shards.items():
            for key, value in self._adamw.state.get(shard, {}).items():
                value.copy_(state.tensors[name][key]) if name in state.tensors else value.zero_()

    def move(self, move: Callable[[Tensor], Tensor], shards: dict[str, Tensor]) -> None:
        """Takes the moments elsewhere, and these shards for the parameters: the model has moved too."""
        for name, shard in self._shards.items():
            shard.data = shards[name]
        for state in [] if self._moments_on_host else self._adamw.state.values():
            for key, value in state.items():
                state[key] = move(value)
        self._adamw.grad_scale = self._adamw.found_inf = None


def _coded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Moments in a byte each, with their scales."""
    found = {kind: encode(state[kind], squared=kind == "exp_avg_sq") for kind in MOMENTS}
    codes = {kind: codes for kind, (codes, _) in found.items()}
    return codes | {kind + SCALES: scales for kind, (_, scales) in found.items()}


def _decoded(state: dict[str, Tensor], kind: str) -> Tensor:
    return decode(state[kind], state[kind + SCALES], squared=kind == "exp_avg_sq")


def moment_bytes(config: OptimizerSection, weight: Tensor, *, is_hidden_matrix: bool) -> tuple[int, int]:
    """(bytes in memory, bytes of fp32 in a checkpoint) of what is kept of a weight."""
    elements = weight.numel()
    if config.name == "muon" and is_hidden_matrix:
        return 4 * elements, 4 * elements
    coded = config.name == "adamw_8bit" and weight.dim() > 1
    return 2 * coded_bytes(elements) if coded else 8 * elements, 8 * elements
