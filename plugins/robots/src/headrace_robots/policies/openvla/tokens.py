"""Actions as tokens: 256 bins on the last ids of a vocabulary, as OpenVLA has them. Knows no model.

Shapes: K bins, V vocabulary; any dimensions before. Token `action_vocabulary - d` stands for bin d, d from 1 to K;
the last two share a centre, because K edges have K - 1 centres (OpenVLA's code).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from headrace_modelkit.logprobs import scale
from torch import Tensor

from headrace_robots.policies.gaussian import row_uniform


class ActionTokens:
    """Numbers from -1 to 1 and their token ids. `action_vocabulary` is the vocabulary without its padding."""

    def __init__(self, action_vocabulary: int, bins: int) -> None:
        self.action_vocabulary, self.bins = action_vocabulary, bins
        self.edges_K = torch.linspace(-1, 1, bins, dtype=torch.float64)
        self.centres = (self.edges_K[:-1] + self.edges_K[1:]) / 2

    @property
    def first(self) -> int:
        """The lowest id that is an action."""
        return self.action_vocabulary - self.bins

    def decode(self, ids: Tensor) -> Tensor:
        """fp32 numbers of ids: bin centres. Raises ValueError for an id that is no action."""
        if bool(((ids < self.first) | (ids >= self.action_vocabulary)).any()):
            raise ValueError(
                f"a token is no action: ids of actions are {self.first} to {self.action_vocabulary - 1}"
            )
        places = (self.action_vocabulary - ids - 1).clamp(0, self.bins - 2)
        return self.centres.to(ids.device)[places].float()

    def encode(self, numbers: Tensor) -> Tensor:
        """int64 ids of numbers, clipped to -1 to 1, for demonstrations."""
        clipped = numbers.double().clamp(-1, 1).contiguous()
        return self.action_vocabulary - torch.bucketize(clipped, self.edges_K.to(clipped.device), right=True)

    def log_probs(self, logits_V: Tensor, temperature: float) -> Tensor:
        """fp32 (…, K) log-probs over the ids of actions alone, lowest id first."""
        return scale(logits_V[..., self.first : self.action_vocabulary], temperature).log_softmax(-1)

    def draw(self, log_probs_K: Tensor, seeds: Sequence[int] | None, draws: slice) -> Tensor:
        """int64 ids, of (B, N, K) log-probs: numbers `draws` of each row's own sequence; the likeliest for None.

        By the inverse of the cumulative distribution in float64, so that a row's draw depends on its seed alone.
        """
        if seeds is None:
            return self.first + log_probs_K.argmax(-1)
        uniform_BN = row_uniform(seeds, (draws.stop,), log_probs_K.device)[:, draws]
        ladder_K = log_probs_K.double().exp().cumsum(-1)
        chosen = torch.searchsorted(ladder_K, (uniform_BN * ladder_K[..., -1])[..., None], right=True)[..., 0]
        return self.first + chosen.clamp(max=self.bins - 1)


def entropy_of(log_probs_K: Tensor) -> Tensor:
    """Entropies in nats over the last dimension; an entry of probability 0 adds 0."""
    floor = torch.finfo(log_probs_K.dtype).min
    return -(log_probs_K.exp() * log_probs_K.clamp(min=floor)).sum(-1)
