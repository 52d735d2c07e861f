"""What the routers of a model do besides choosing: record, follow a recorded choice, count, balance the load.

Knows no router and no product.

Shapes: N tokens, K experts of a token, E experts of a layer, M layers of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headrace_modelkit.families.mixtures import ExpertShape

OWN = 65535
"""In place of a recorded expert: the router chooses itself. No model has so many experts."""

_BIAS = "e_score_correction_bias"
_ASKED = ("forced_MNK", "recorded", "counts", "balance_ME")


def router_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a model's tensors by which its routers choose experts and do not weigh them, in the order of layers."""
    return {
        name: each
        for name, each in tensors.items()
        if name.endswith(_BIAS) and not name.startswith("draft.") and not isinstance(each, nn.Parameter)
    }


@dataclass
class Routing:
    """What the routers of one model do in a forward, and what they find. Set before the forward; kept for a backward
    that computes layers again.

    `forced_MNK` are experts to send the tokens to (`OWN` where the router chooses). `visits_N` is how often each token
    counts: 0 for padding, and for a beginning that several sequences share the number of them. `balance_ME` is the
    gradient of the load-balance loss at each probability of a visit, see `balance_gradient`.
    """

    forced_MNK: Tensor | None = None
    visits_N: Tensor | None = None
    balance_ME: Tensor | None = None
    recorded: list[Tensor] | None = None
    """(N, K) of each layer in turn, where a list is given."""
    counts: Counts | None = None
    """What is counted, where it is given."""
    changed: Tensor | float = 0.0
    """How many of the forced choices the routers would have made otherwise, since it was set to 0."""
    forced: Tensor | float = 0.0
    """How many choices were forced, since it was set to 0."""

    acts: bool = field(default=False, init=False)
    """Whether routers do anything besides choosing: all that a compiled layer looks at."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _ASKED:
            super().__setattr__("acts", any(getattr(self, each, None) is not None for each in _ASKED))

    def noted(self) -> tuple[Any, ...]:
        """What was found until now, for `forget`."""
        recorded = None if self.recorded is None else len(self.recorded)
        counts = None if self.counts is None else self.counts.copy()
        return recorded, counts, self.changed, self.forced

    def forget(self, noted: tuple[Any, ...]) -> None:
        """Drops what was found since: a forward that is made again finds it again."""
        recorded, counts, self.changed, self.forced = noted
        if self.recorded is not None:
            del self.recorded[recorded:]
        if self.counts is not None:
            vars(self.counts).update(vars(counts))

    def chosen(self, layer: int, own_NK: Tensor) -> Tensor:
        """(N, K) experts that the tokens go to."""
        if self.forced_MNK is not None:
            forced_NK = self.forced_MNK[layer].to(own_NK.dtype)
            given_NK = forced_NK != OWN
            same_NK = (forced_NK[:, :, None] == own_NK[:, None, :]).any(-1)
            if self.visits_N is not None:
                given_NK = given_NK & (self.visits_N > 0)[:, None]
            self.changed = self.changed + (given_NK & ~same_NK).sum()
            self.forced = self.forced + given_NK.sum()
            own_NK = torch.where(forced_NK != OWN, forced_NK, own_NK)
        if self.recorded is not None:
            self.recorded.append(own_NK.detach())
        return own_NK

    def observed(self, layer: int, probs_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The probabilities, counted where wanted, with the load-balance loss's gradient added in the backward pass."""
        if self.counts is not None and self.visits_N is not None:
            self.counts.add(layer, probs_NE.detach(), chosen_NK, self.visits_N)
        if self.balance_ME is None or self.visits_N is None or not probs_NE.requires_grad:
            return probs_NE
        function: Any = _Balanced
        found: Tensor = function.apply(probs_NE, self.visits_N, self.balance_ME[layer])
        return found


@dataclass
class Counts:
    """Of the tokens of a minibatch, each as often as it is visited: how many choices fell on each expert, and the sums
    of the routers' probabilities. float64, so that micro-batches and ranks add up in any order.
    """

    chosen_ME: Tensor
    probs_ME: Tensor
    tokens: Tensor | float = 0.0
    """Visits, counted at the first layer."""

    @classmethod
    def of(cls, shape: ExpertShape) -> Counts:
        """Empty ones."""
        nothing = torch.zeros(shape.layers, shape.experts, dtype=torch.float64)
        return cls(nothing, nothing.clone())

    def copy(self) -> Counts:
        """What nothing is added to."""
        return Counts(self.chosen_ME.clone(), self.probs_ME.clone(), self.tokens)

    def add(self, layer: int, probs_NE: Tensor, chosen_NK: Tensor, visits_N: Tensor) -> None:
        """Adds the tokens of one forward of a layer, where they are: the host does not wait for them."""
        if layer == 0:
            self.chosen_ME, self.probs_ME = (
                each.to(probs_NE.device) for each in (self.chosen_ME, self.probs_ME)
            )
        visits_N = visits_N.to(probs_NE.device, torch.float64)
        hot_NE = torch.zeros_like(probs_NE, dtype=torch.float64).scatter_(1, chosen_NK, 1.0)
        self.chosen_ME[layer] += visits_N @ hot_NE
        self.probs_ME[layer] += visits_N @ probs_NE.double()
        if layer == 0:
            self.tokens = self.tokens + visits_N.sum()

    def packed(self) -> Tensor:
        """(2 * M * E + 1,), to be added up over ranks."""
        tail = torch.as_tensor(self.tokens, dtype=torch.float64).reshape(1)
        return torch.cat([each.flatten().cpu() for each in (self.chosen_ME, self.probs_ME, tail)])

    def unpack(self, packed: Tensor) -> None:
        """Takes what `packed` gave, added up."""
        chosen, probs = packed[:-1].chunk(2)
        self.chosen_ME = chosen.view_as(self.chosen_ME).clone()
        self.probs_ME = probs.view_as(self.probs_ME).clone()
        self.tokens = float(packed[-1])

    def loss(self, chosen: int) -> float:
        """The load-balance loss before its coefficient, the mean over the layers: 1 where all experts are equal."""
        if not self.tokens:
            return 0.0
        share_ME = self.chosen_ME / (self.tokens * chosen)
        mean_ME = self.probs_ME / self.tokens
        return float((share_ME * mean_ME).sum(-1).mean() * self.chosen_ME.shape[1])

    def bias_steps(self, rate: float) -> Tensor:
        """(M, E) what is added to the biases by which routers choose: `rate`, with the sign of the difference of an
        equal share from the expert's choices (DeepSeek V3, arXiv 2412.19437, section 2.1.2; Megatron's
        `moe_router_bias_update_rate`).
        """
        return (self.chosen_ME.mean(-1, keepdim=True) - self.chosen_ME).sign() * rate

    def busiest(self) -> float:
        """Choices of a layer's busiest expert against an equal share, the mean over the layers."""
        total = self.chosen_ME.sum(-1, keepdim=True)
        if not bool(total.all()):
            return 0.0
        return float((self.chosen_ME / total).amax(-1).mean() * self.chosen_ME.shape[1])

    def balance_gradient(self, coefficient: float, chosen: int, scale: float) -> Tensor:
        """(M, E) fp32 gradient of `scale` * coefficient * the loss of each layer at one visit's probabilities.

        The loss of a layer is E * sum over experts of (share of the choices) * (mean probability), both over all tokens
        of the minibatch (Switch Transformer, arXiv 2101.03961, eq. 4; its statistics global as in arXiv 2501.11873 and
        Megatron's `global_aux_loss`). Layers add up, as in Megatron. The share has no gradient, so this is a constant
        once it is known: the gradient of the minibatch is a sum over its micro-batches, whatever their packing.
        """
        if not self.tokens:
            return torch.zeros_like(self.chosen_ME, dtype=torch.float32)
        share_ME = self.chosen_ME / (self.tokens * chosen)
        return (share_ME * (coefficient * self.chosen_ME.shape[1] * scale / self.tokens)).float()


class _Balanced(torch.autograd.Function):
    """Probabilities as they are; their gradient gets visits_N x balance_E more."""

    @staticmethod
    def forward(ctx: Any, probs_NE: Tensor, visits_N: Tensor, balance_E: Tensor) -> Tensor:
        ctx.save_for_backward(visits_N, balance_E)
        return probs_NE.view_as(probs_NE)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_NE: Tensor) -> tuple[Tensor | None, ...]:
        visits_N, balance_E = ctx.saved_tensors
        more_NE = visits_N.to(upstream_NE)[:, None] * balance_E.to(upstream_NE)
        return upstream_NE + more_NE, None, None
