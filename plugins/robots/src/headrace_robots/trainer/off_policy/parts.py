"""What learns off policy beside the policy: critics, temperature and their targets, with the optimizers of all.

In a checkpoint they stand under the critic's kind, which no engine gets. Knows no store and no algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.learning import OptimizerSection
from headrace_trainer.backends._base import CRITIC_KIND, StateReader
from headrace_trainer.backends.shared.optimizer import MOMENTS, AdamWState, ShardedAdamW
from headrace_trainer.errors import Refusal
from headrace_trainer.group.group import TrainerGroup
from torch import Tensor, nn

from headrace_robots.trainer.off_policy.updates import ACTOR, Update

Held = tuple[dict[str, Tensor], dict[str, AdamWState]]


class Parts:
    """The parts of an `Update` and their optimizers; moves weights for it, as `Steps`."""

    def __init__(
        self,
        update: Update,
        policy: nn.Module,
        actor: ShardedAdamW,
        config: OptimizerSection,
        ranks: TrainerGroup,
    ) -> None:
        self.update = update
        self.rates: dict[str, float] = {}
        """Learning rate by part."""
        self.finite = True
        self.norms: dict[str, list[float]] = {}
        self._config, self._ranks = config, ranks
        self._parameters = {ACTOR: dict(policy.named_parameters())}
        self._optimizers = {ACTOR: actor}
        for name, part in update.learned.items():
            part.to(ranks.device)
            self._parameters[name] = own = dict(part.named_parameters())
            decays = {each for each, parameter in own.items() if each.endswith("weight")}
            shards = {each: parameter.data for each, parameter in own.items()}
            self._optimizers[name] = ShardedAdamW(config, shards, decays=decays)
        for part in update.kept.values():
            part.to(ranks.device)

    # Steps

    def step(self, name: str, loss: Tensor) -> None:
        """As in `Steps`; what is not finite moves nothing, and `finite` says so."""
        own = self._parameters[name]
        found = torch.autograd.grad(loss, [*own.values()], allow_unused=True)
        gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for gradient, parameter in zip(found, own.values(), strict=True)
        ]
        if self._ranks.world_size > 1:
            flat = torch.cat([each.reshape(-1) for each in gradients])
            dist.all_reduce(flat)
            parts = torch.split(flat, [each.numel() for each in gradients])
            gradients = [part.view_as(each) for part, each in zip(parts, gradients, strict=True)]
        norm = float(torch.stack(torch._foreach_norm(gradients)).square().sum().sqrt())
        if not math.isfinite(norm):
            self.finite = False
        if not self.finite:
            return
        self.norms.setdefault(name, []).append(norm)
        clip = min(1.0, self._config.grad_clip / (norm + 1e-6))
        rate = self.rates[name]
        given = {each: gradient.contiguous() for each, gradient in zip(own, gradients, strict=True)}
        self._optimizers[name].step(given, 1 / clip, rate, rate)

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number without gradient over all ranks."""
        if self._ranks.world_size > 1:
            dist.all_reduce(value)
        return value

    # State

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that goes into a checkpoint, but the policy and its moments, by name."""
        for kind, parts in (("learned", self.update.learned), ("kept", self.update.kept)):
            for name, part in parts.items():
                for own, tensor in state_tensors(part):
                    yield f"{kind}/{name}/{own}", tensor.detach()
        for name in self.update.learned:
            optimizer = self._optimizers[name]
            for own in self._parameters[name]:
                for kind in MOMENTS:
                    yield f"{kind}/{name}/{own}", optimizer.moment(kind, own)
            yield f"steps/{name}", torch.tensor([optimizer.steps])

    def check(self, reader: StateReader, algorithm: str) -> None:
        """Raises Refusal CHECKPOINT_MISMATCH unless the checkpoint is of these parts."""
        own = {name: tuple(tensor.shape) for name, tensor in self.tensors()}
        given = {
            name: shape for name, shape in reader.critic_shapes().items() if not name.startswith("replay/")
        }
        if own == given:
            return
        first = min(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        raise Refusal(
            "CHECKPOINT_MISMATCH",
            f"algorithm: {algorithm} with these options has {_shown(own, first)}, and the checkpoint "
            f"{_shown(given, first)}; give algorithm.name, its critics and model.policy as they were, or export the "
            "checkpoint's policy and name that as model.path",
            key="algorithm",
        )

    def load(self, reader: StateReader | None) -> None:
        """Goes on from a checkpoint, which the leader at least reads; all ranks call it."""
        moments: dict[str, dict[str, dict[str, Tensor]]] = {}
        for name, tensor in self.tensors():
            value = tensor.clone() if reader is None else reader.critic_weight(name).to(tensor)
            value = value.to(self._ranks.device)
            self._ranks.share(value)
            kind, part, own = [*name.split("/", 2), ""][:3]
            if kind == "steps":
                self._optimizers[part].load(moments[part], int(value))
            elif kind in MOMENTS:
                moments.setdefault(part, {}).setdefault(kind, {})[own] = value
            else:
                tensor.copy_(value)

    def copy(self, to_host: Callable[[Tensor], Tensor]) -> Held:
        """The state of the moment."""
        optimizers = {name: self._optimizers[name].copy(to_host) for name in self.update.learned}
        return {name: to_host(tensor) for name, tensor in self._weights()}, optimizers

    def put_back(self, held: Held) -> None:
        """Undoes what happened since `copy`."""
        weights, optimizers = held
        for name, tensor in self._weights():
            tensor.copy_(weights[name])
        for name, state in optimizers.items():
            self._optimizers[name].put_back(state)
        self.finite = True

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes everything but the policy elsewhere."""
        for part in (*self.update.learned.values(), *self.update.kept.values()):
            untyped: Any = part
            untyped._apply(move)
        for name in self.update.learned:
            shards = {own: parameter.data for own, parameter in self._parameters[name].items()}
            self._optimizers[name].move(move, shards)

    def even(self) -> None:
        """Gives all ranks the mean of what critics follow of their batches."""
        if self._ranks.world_size == 1:
            return
        for part in self.update.learned.values():
            for buffer in part.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= self._ranks.world_size

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors():
            if name.startswith(("learned/", "kept/")):
                yield name, tensor


def critic_name(name: str) -> str:
    """As it stands among a checkpoint's moments."""
    return f"{CRITIC_KIND}/{name}"


def _shown(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return f"{name} of shape {shapes[name]}" if name in shapes else f"no {name}"
