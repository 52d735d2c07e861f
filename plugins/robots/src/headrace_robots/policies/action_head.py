"""From an actor's outputs to actions: a Gaussian of state-independent width for numbers, a softmax for categories.

Shapes: B environments, C actions of a chunk, A numbers of an action, O outputs of the actor for an action; G numbers
that are Gaussian, D that are categories, K categories of the one with the most. Knows no observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from headrace_robots.policies import gaussian
from headrace_robots.policies.scaling import ActionBounds, ActionScaling


class ActionHead(nn.Module):
    """Draws and scores actions.

    What is drawn, (B, C, A), has a Gaussian's number as it was drawn, and of a category its index, from 0. An action
    needs `outputs` of the actor: a mean for each Gaussian number, then a logit for each category.
    """

    log_std: nn.Parameter | None
    """(C, G); None where all numbers are categories."""
    gaussian_G: Tensor
    category_D: Tensor
    order_A: Tensor
    places_DK: Tensor
    possible_DK: Tensor
    first_D: Tensor

    def __init__(
        self, bounds: ActionBounds, categories: Sequence[int], chunk_length: int, log_std: float
    ) -> None:
        super().__init__()
        counts = list(categories) or [0] * bounds.size
        numbers = [place for place, count in enumerate(counts) if not count]
        chosen = [place for place, count in enumerate(counts) if count]
        self.outputs = len(numbers) + sum(counts)
        self.scaling = ActionScaling(bounds)
        width = nn.Parameter(torch.full((chunk_length, len(numbers)), log_std)) if numbers else None
        self.register_parameter("log_std", width)
        ladder_K = torch.arange(max(counts))
        firsts = [
            len(numbers) + before for before in accumulate([counts[place] for place in chosen], initial=0)
        ]
        sizes_D = torch.tensor([counts[place] for place in chosen], dtype=torch.long)
        buffers = {
            "gaussian_G": torch.tensor(numbers, dtype=torch.long),
            "category_D": torch.tensor(chosen, dtype=torch.long),
            "order_A": torch.tensor([*numbers, *chosen]).argsort(),
            "places_DK": (torch.tensor(firsts[:-1], dtype=torch.long)[:, None] + ladder_K).clamp(
                max=self.outputs - 1
            ),
            "possible_DK": ladder_K < sizes_D[:, None],
            "first_D": torch.tensor([bounds.low[place] or 0.0 for place in chosen]),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def draw(self, outputs_BCO: Tensor, seeds: Sequence[int] | None) -> Tensor:
        """(B, C, A) fp32: each row from its own seed alone; the likeliest for None."""
        mean_BCG, drawn = self._means(outputs_BCO), list[Tensor]()
        if self.log_std is not None:
            noise = (
                0.0
                if seeds is None
                else gaussian.row_noise(seeds, tuple(self.log_std.shape), mean_BCG.device)
            )
            drawn.append(mean_BCG + self.log_std.exp() * noise)
        if len(self.category_D):
            drawn.append(self._draw_categories(self._log_probs(outputs_BCO), seeds).float())
        return self._in_order(drawn)

    def executed(self, drawn_BCA: Tensor) -> Tensor:
        """What an environment is given, in its units; int64 where all numbers are categories."""
        if not len(self.category_D):
            scaled_BCA: Tensor = self.scaling(drawn_BCA)
            return scaled_BCA
        chosen_BCD = drawn_BCA[..., self.category_D] + self.first_D
        if self.log_std is None:
            return chosen_BCD.long()
        return self._in_order([self.scaling(drawn_BCA)[..., self.gaussian_G], chosen_BCD])

    def drawn_of(self, executed: Tensor) -> Tensor:
        """Undoes `executed`, of actions inside the bounds: what would have been drawn."""
        drawn = self.scaling.drawn(executed.float())
        drawn[..., self.category_D] = (executed[..., self.category_D] - self.first_D).round().float()
        return drawn

    def score(self, outputs_BCO: Tensor, drawn_BCA: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, A) log-probs of what was drawn and entropies in nats, differentiable."""
        log_probs, entropies = list[Tensor](), list[Tensor]()
        if self.log_std is not None:
            mean_BCG = self._means(outputs_BCO)
            log_probs.append(gaussian.log_density(drawn_BCA[..., self.gaussian_G], mean_BCG, self.log_std))
            entropies.append(gaussian.entropy(self.log_std).expand_as(mean_BCG))
        if len(self.category_D):
            log_probs_BCDK = self._log_probs(outputs_BCO)
            index_BCD = drawn_BCA[..., self.category_D].long()
            log_probs.append(log_probs_BCDK.gather(-1, index_BCD[..., None])[..., 0])
            entropies.append(-(log_probs_BCDK.exp() * log_probs_BCDK).sum(-1))
        return self._in_order(log_probs), self._in_order(entropies)

    def imitate(self, outputs_BCO: Tensor, actions_BCA: Tensor) -> Tensor:
        """(B, C) losses of imitating actions in the environment's units: mean over their numbers."""
        losses = list[Tensor]()
        if self.log_std is not None:
            drawn_BCG = self.scaling.drawn(actions_BCA)[..., self.gaussian_G]
            losses.append((self._means(outputs_BCO) - drawn_BCG).square())
        if len(self.category_D):
            index_BCD = (actions_BCA[..., self.category_D] - self.first_D).round().long()
            log_probs_BCDK = self._log_probs(outputs_BCO)
            losses.append(-log_probs_BCDK.gather(-1, index_BCD[..., None])[..., 0])
        return torch.cat(losses, -1).mean(-1)

    def _means(self, outputs_BCO: Tensor) -> Tensor:
        return outputs_BCO[..., : len(self.gaussian_G)]

    def _log_probs(self, outputs_BCO: Tensor) -> Tensor:
        """(B, C, D, K); of a category that there is not, the lowest number, which adds nothing to an entropy."""
        lowest = torch.finfo(outputs_BCO.dtype).min
        logits_BCDK = outputs_BCO[..., self.places_DK].masked_fill(~self.possible_DK, lowest)
        return logits_BCDK.log_softmax(-1)

    def _draw_categories(self, log_probs_BCDK: Tensor, seeds: Sequence[int] | None) -> Tensor:
        """By the inverse of the cumulative distribution in float64."""
        if seeds is None:
            return log_probs_BCDK.argmax(-1)
        shape = tuple(log_probs_BCDK.shape[1:-1])
        # A stream beside that of the Gaussian numbers: none of them tells a category.
        uniform_BCD = gaussian.row_uniform(
            [~seed & (1 << 63) - 1 for seed in seeds], shape, log_probs_BCDK.device
        )
        ladder_BCDK = log_probs_BCDK.double().exp().cumsum(-1)
        target_BCD1 = (uniform_BCD * ladder_BCDK[..., -1])[..., None]
        index_BCD = torch.searchsorted(ladder_BCDK, target_BCD1, right=True)[..., 0]
        return torch.minimum(index_BCD, self.possible_DK.sum(-1) - 1)

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """Gaussian numbers and categories, each at its place in the action."""
        return torch.cat(parts, -1)[..., self.order_A] if parts[1:] else parts[0]
