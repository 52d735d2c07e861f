"""From an actor's outputs to actions between -1 and 1: a Gaussian squashed by tanh, or its mean with noise to explore.

The first is that of SAC (arXiv 1801.01290): its width is an output of the actor too. The second is that of TD3, whose
policy is deterministic. Both have the methods of `ActionHead`. Knows no observation.
Shapes: B environments, C actions of a chunk, A numbers of an action, O outputs of the actor for an action.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies import gaussian
from headrace_robots.policies.scaling import ActionBounds, ActionScaling

LEAST_LOG_STD, MOST_LOG_STD = -20.0, 2.0
ROUNDING = 1e-6
"""Keeps the density of a number that is -1 or 1 in fp32 finite."""


class SquashedHead(nn.Module):
    """Draws tanh of a Gaussian's number. What is drawn, (B, C, A), lies between -1 and 1."""

    log_std: None = None

    def __init__(self, bounds: ActionBounds, chunk_length: int) -> None:
        super().__init__()
        self.scaling = ActionScaling(bounds)
        self.outputs = 2 * bounds.size
        self._shape = chunk_length, bounds.size

    def draw(self, outputs_BCO: Tensor, seeds: Sequence[int] | None) -> Tensor:
        """(B, C, A) fp32: each row from its own seed alone; the mean's for None."""
        mean_BCA, log_std_BCA = self._split(outputs_BCO)
        if seeds is None:
            return torch.tanh(mean_BCA)
        noise_BCA = gaussian.row_noise(seeds, self._shape, mean_BCA.device)
        return torch.tanh(mean_BCA + log_std_BCA.exp() * noise_BCA)

    def sample(self, outputs_BCO: Tensor, noise_BCA: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, A) what this noise draws, and (B,) its log-probs; both differentiable."""
        mean_BCA, log_std_BCA = self._split(outputs_BCO)
        free_BCA = mean_BCA + log_std_BCA.exp() * noise_BCA
        drawn_BCA = torch.tanh(free_BCA)
        density_BCA = gaussian.log_density(free_BCA, mean_BCA, log_std_BCA)
        return drawn_BCA, (density_BCA - _shrinking(drawn_BCA)).flatten(1).sum(-1)

    def executed(self, drawn_BCA: Tensor) -> Tensor:
        """What an environment is given, in its units."""
        scaled_BCA: Tensor = self.scaling(drawn_BCA)
        return scaled_BCA

    def drawn_of(self, executed: Tensor) -> Tensor:
        """Undoes `executed`, of actions inside the bounds."""
        return self.scaling.drawn(executed).clamp(-1, 1)

    def score(self, outputs_BCO: Tensor, drawn_BCA: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, A) log-probs of what was drawn, and entropies of the Gaussian before tanh in nats, differentiable."""
        mean_BCA, log_std_BCA = self._split(outputs_BCO)
        least = torch.finfo(drawn_BCA.dtype).eps
        free_BCA = torch.atanh(drawn_BCA.clamp(-1 + least, 1 - least))
        density_BCA = gaussian.log_density(free_BCA, mean_BCA, log_std_BCA)
        return density_BCA - _shrinking(drawn_BCA), gaussian.entropy(log_std_BCA)

    def imitate(self, outputs_BCO: Tensor, actions_BCA: Tensor) -> Tensor:
        """(B, C) mean squared errors of the likeliest action, in units of the bounds."""
        mean_BCA, _ = self._split(outputs_BCO)
        return (torch.tanh(mean_BCA) - self.drawn_of(actions_BCA)).square().mean(-1)

    def _split(self, outputs_BCO: Tensor) -> tuple[Tensor, Tensor]:
        mean_BCA, log_std_BCA = outputs_BCO.chunk(2, -1)
        return mean_BCA, log_std_BCA.clamp(LEAST_LOG_STD, MOST_LOG_STD)


class DeterministicHead(SquashedHead):
    """Draws tanh of the actor's output, with Gaussian noise of a fixed width around it, cut at -1 and 1."""

    def __init__(self, bounds: ActionBounds, chunk_length: int, exploration: float) -> None:
        super().__init__(bounds, chunk_length)
        self.outputs, self._exploration = bounds.size, exploration

    @override
    def draw(self, outputs_BCO: Tensor, seeds: Sequence[int] | None) -> Tensor:
        mean_BCA = torch.tanh(outputs_BCO)
        if seeds is None:
            return mean_BCA
        noise_BCA = gaussian.row_noise(seeds, self._shape, mean_BCA.device)
        return (mean_BCA + self._exploration * noise_BCA).clamp(-1, 1)

    def sample(self, outputs_BCO: Tensor, noise_BCA: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, A) the deterministic actions, whatever the noise, and (B,) zeros."""
        return torch.tanh(outputs_BCO), torch.zeros(len(outputs_BCO), device=outputs_BCO.device)

    def score(self, outputs_BCO: Tensor, drawn_BCA: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, A) log-densities of the exploring Gaussian, as if it were not cut, and its entropies in nats."""
        log_std = torch.full_like(outputs_BCO, max(self._exploration, 1e-3)).log()
        return gaussian.log_density(drawn_BCA, torch.tanh(outputs_BCO), log_std), gaussian.entropy(log_std)

    @override
    def imitate(self, outputs_BCO: Tensor, actions_BCA: Tensor) -> Tensor:
        wanted_BCA = self.drawn_of(actions_BCA)
        return (torch.tanh(outputs_BCO) - wanted_BCA).square().mean(-1)


def _shrinking(drawn_BCA: Tensor) -> Tensor:
    """Log of how much tanh shrinks what lies around a number."""
    return torch.log(1 - drawn_BCA.square() + ROUNDING)
