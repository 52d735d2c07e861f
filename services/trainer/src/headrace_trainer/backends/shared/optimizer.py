"""AdamW over local shards. Knows no model, no ranks and no schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from headrace_schema.sections.learning import OptimizerSection
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamWState:
    """A copy of moments and counters: weight → kind → tensor; weights that have taken no step have none."""

    tensors: dict[str, dict[str, Tensor]]
    steps: int


class ShardedAdamW:
    """AdamW (arXiv 1711.05101) on the ranks' own shards: plain tensors, one fused kernel.

    Dividing by the step's denominator and clipping happen inside the kernel, so the gradient is read once.
    Matrices decay, vectors (norms, biases) do not. The critic's weights have a rate of their own.
    """

    def __init__(
        self,
        config: OptimizerSection,
        shards: dict[str, Tensor],
        *,
        decays: set[str],
        critic: frozenset[str] = frozenset(),
    ) -> None:
        self._shards = {name: nn.Parameter(shard) for name, shard in shards.items() if shard.numel()}
        if not config.weight_decay:  # fewer groups are fewer kernels
            decays = set()
        groups = [
            {
                "params": [
                    p
                    for name, p in self._shards.items()
                    if (name in decays) is decayed and (name in critic) is of_critic
                ],
                "weight_decay": config.weight_decay if decayed else 0.0,
                "critic": of_critic,
            }
            for of_critic in (False, True)
            for decayed in (True, False)
        ]
        self._adamw: Any = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.steps = 0

    def step(
        self, gradients: dict[str, Tensor], divisor: float, rate: float, critic_rate: float = 0.0
    ) -> None:
        """One step with gradients / divisor, in place on the shards."""
        for group in self._adamw.param_groups:
            group["lr"] = critic_rate if group["critic"] else rate
        for name, shard in self._shards.items():
            shard.grad = gradients[name]
        device = next(iter(self._shards.values())).device
        # The fused kernel divides by this as it does for a gradient scaler.
        self._adamw.grad_scale = torch.full((), divisor, dtype=torch.float32, device=device)
        self._adamw.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._adamw.step()
        for shard in self._shards.values():
            shard.grad = None
        self.steps += 1

    def moment(self, kind: str, name: str) -> Tensor:
        """The shard of a moment; zeros before the first step."""
        shard = self._shards[name]
        state = self._adamw.state.get(shard)
        return state[kind] if state else torch.zeros_like(shard)

    def load(self, moments: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Replaces the state: kind → name → shard."""
        self.steps = steps
        for name, shard in self._shards.items():
            own = {kind: moments[kind][name].to(shard.device, torch.float32).clone() for kind in MOMENTS}
            counter = torch.full((), float(steps), dtype=torch.float32, device=shard.device)
            self._adamw.state[shard] = {"step": counter, **own}

    def copy(self) -> AdamWState:
        """The state of the moment, in host memory."""
        state = {
            name: {key: value.to("cpu", copy=True) for key, value in self._adamw.state[shard].items()}
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
        for state in self._adamw.state.values():
            for key, value in state.items():
                state[key] = move(value)
        self._adamw.grad_scale = self._adamw.found_inf = None
