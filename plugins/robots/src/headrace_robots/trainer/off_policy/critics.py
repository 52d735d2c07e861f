"""Critics of a small policy: an ensemble that computes side by side, on features of its own. Knows no loss.

Shapes: E critics, B observations, S numbers of what a critic reads, K values that it gives, F features of pictures.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace_robots.policies.policy import Observation, image_of

EPSILON = 1e-3
MOST_SCALE, MOST_SHIFT = 3.0, 5.0
"""Of batch renormalisation (arXiv 1702.03275)."""


class Stacked(nn.Module):
    """A linear layer for each of E critics, begun as torch begins one."""

    def __init__(self, critics: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(critics, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(critics, 1, outputs).uniform_(-bound, bound))

    def forward(self, read_EBS: Tensor) -> Tensor:
        """(E, B, outputs)."""
        return torch.baddbmm(self.bias, read_EBS, self.weight)


class LayerNorm(nn.Module):
    """Normalises each row, with a scale and a shift for each critic."""

    def __init__(self, critics: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(critics, 1, size))
        self.shift = nn.Parameter(torch.zeros(critics, 1, size))

    def forward(self, read_EBS: Tensor) -> Tensor:
        """The same shape."""
        return nn.functional.layer_norm(read_EBS, read_EBS.shape[-1:]) * self.scale + self.shift


class BatchRenorm(nn.Module):
    """Normalises a batch by its own statistics, and after `warmup` batches towards those that are followed.

    Not in training: by those that are followed.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, critics: int, size: int, momentum: float, warmup: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(critics, 1, size))
        self.shift = nn.Parameter(torch.zeros(critics, 1, size))
        self.register_buffer("mean", torch.zeros(critics, 1, size))
        self.register_buffer("variance", torch.ones(critics, 1, size))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self._momentum, self._warmup = momentum, warmup

    def forward(self, read_EBS: Tensor) -> Tensor:
        """The same shape."""
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = self._of_batch(read_EBS)
        return (read_EBS - mean) / (variance + EPSILON).sqrt() * self.scale + self.shift

    def _of_batch(self, read_EBS: Tensor) -> tuple[Tensor, Tensor]:
        own, spread = read_EBS.mean(1, keepdim=True), read_EBS.var(1, keepdim=True)
        mean, variance = own, spread
        if int(self.batches) > self._warmup:
            followed = (self.variance + EPSILON).sqrt()
            scale = ((spread + EPSILON).sqrt() / followed).detach().clamp(1 / MOST_SCALE, MOST_SCALE)
            shift = ((own - self.mean) / followed).detach().clamp(-MOST_SHIFT, MOST_SHIFT)
            mean, variance = own - shift * spread.sqrt() / scale, spread / scale.square()
        self.mean += self._momentum * (own.detach() - self.mean)
        self.variance += self._momentum * (spread.detach() - self.variance)
        self.batches += 1
        return mean, variance


class Encoder(nn.Module):
    """What critics read: the policy's state, and of pictures features by convolutions of their own."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        found = getattr(policy, "encoder", None)
        self.pictures = None if found is None else copy.deepcopy(found)
        self._policy = [policy]  # in a list: it is no part of this module
        self.size = (getattr(policy.config, "features", 0) if found is not None else 0) + policy.state_size

    def forward(self, observation: Observation) -> Tensor:
        """(B, S)."""
        policy = self._policy[0]
        parts = []
        if self.pictures is not None:
            config = policy.config
            images = [
                image_of(observation, camera, policy.device, config.channels) for camera in config.cameras
            ]
            parts.append(self.pictures(torch.cat(images, 1) - 0.5))
        if policy.state_size:
            parts.append(policy.state(observation))
        return torch.cat(parts, -1) if parts[1:] else parts[0]


class Critics(nn.Module):
    """E critics: (E, B, K) values of observations, with actions beside them where they read any."""

    def __init__(
        self,
        policy: Any,
        critics: int,
        actions: int,
        hidden: Sequence[int],
        *,
        outputs: int = 1,
        layer_norm: bool = False,
        renorm: tuple[float, int] | None = None,
    ) -> None:
        """`renorm`: momentum and warm-up of batch renormalisation, of what is read too."""
        super().__init__()
        self.encoder = Encoder(policy)
        self.critics = critics
        sizes = [self.encoder.size + actions, *hidden]
        layers: list[nn.Module] = [] if renorm is None else [BatchRenorm(critics, sizes[0], *renorm)]
        for width, following in pairwise(sizes):
            layers.append(Stacked(critics, width, following))
            if layer_norm:
                layers.append(LayerNorm(critics, following))
            layers.append(nn.ReLU())
            if renorm is not None:
                layers.append(BatchRenorm(critics, following, *renorm))
        self.layers = nn.Sequential(*layers, Stacked(critics, sizes[-1], outputs))

    def forward(self, observation: Observation, actions_BA: Tensor | None = None) -> Tensor:
        """(E, B, K)."""
        return self.of_features(self.encoder(observation), actions_BA)

    def of_features(self, read_BS: Tensor, actions_BA: Tensor | None = None) -> Tensor:
        """As `forward`, of what the encoder has given."""
        if actions_BA is not None:
            read_BS = torch.cat([read_BS, actions_BA], -1)
        found: Tensor = self.layers(read_BS.expand(self.critics, *read_BS.shape))
        return found


def target_of(learned: Critics, policy: Any, *args: Any, **options: Any) -> Critics:
    """Critics of the same weights, made of the same arguments, that do not learn."""
    found = Critics(policy, *args, **options)
    found.load_state_dict(learned.state_dict())
    return found.requires_grad_(False)


@torch.no_grad()
def follow(targets: nn.Module, learned: nn.Module, tau: float) -> None:
    """Moves target networks towards the learned ones by `tau`; buffers become theirs."""
    own: list[Tensor] = [*targets.parameters()]
    theirs: list[Tensor] = [*learned.parameters()]
    torch._foreach_mul_(own, 1 - tau)
    torch._foreach_add_(own, theirs, alpha=tau)
    for buffer, other in zip(targets.buffers(), learned.buffers(), strict=True):
        buffer.copy_(other)
