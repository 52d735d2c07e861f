"""Figures over trained tokens, kept as sums and maxima so that they add up over micro-batches and ranks.

They stay on the device until they are asked for: a figure that is read at each micro-batch makes the host wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from headrace_servicekit.lease.devices import FIXED_WORKSPACES, WORKSPACES
from torch import Tensor

from headrace_trainer.algorithms._base import LossSums, TokenBatch
from headrace_trainer.errors import invalid
from headrace_trainer.learning.figures import BITS, LARGEST_LOG_RATIO, Difference, differences
from headrace_trainer.learning.samples import Rows

Figure = float | Tensor
"""A number, or a double without dimensions that is still on the device."""


class TokenFigures:
    """Sums over tokens: `loss` (as the algorithm weighs it), `entropy`, `mismatch`, the algorithm's own."""

    def __init__(self) -> None:
        names = (
            "tokens",
            "engine_tokens",
            "loss",
            "entropy",
            "mismatch",
            "mismatch_kl",
            "ratio",
            "ratio_square",
        )
        self._sums: dict[str, Figure] = dict.fromkeys(names, 0.0)
        self._own: dict[str, Figure] = {}
        self._maxima: dict[str, Figure] = {"mismatch": 0.0, "ratio": 0.0}
        self.differs: list[Difference] = []
        """Of a deterministic run: the first token whose log-prob is not the engine's."""

    def add(self, sums: LossSums, batch: TokenBatch) -> None:
        """Adds a micro-batch. The mismatch is that of the old log-probs; tokens without an engine one are left out."""
        self._sums["tokens"] += float(batch.log_probs_K.numel())
        self._sums["loss"] += sums.loss.detach().double()
        self._compare((batch.old_log_probs_K - batch.engine_log_probs_K).detach())
        for name, value in sums.token_sums.items():
            self._own[name] = self._own.get(name, 0.0) + value.detach().double()

    def _compare(self, log_ratio_K: Tensor) -> None:
        if not log_ratio_K.numel():
            return
        # Where there is no engine log-prob every term is 0: leaving those tokens out would need their number here.
        told_K = torch.isfinite(log_ratio_K)
        known_K = torch.where(told_K, log_ratio_K, 0.0).double()
        ratio_K = known_K.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp() * told_K
        off_K, told = known_K.abs(), told_K.sum().double()
        # Of tokens that the engine drew, ratio - 1 - log ratio estimates KL(engine || trainer); never below 0.
        terms = torch.stack([off_K, ratio_K - told_K.double() - known_K, ratio_K, ratio_K.square()]).sum(-1)
        for name, value in zip(("mismatch", "mismatch_kl", "ratio", "ratio_square"), terms, strict=True):
            self._sums[name] += value
        self._sums["engine_tokens"] += told
        for name, value in zip(("mismatch", "ratio"), torch.stack([off_K, ratio_K]).amax(-1), strict=True):
            self._maxima[name] = _larger(self._maxima[name], value)

    def compare_bits(self, batch: TokenBatch, rows: Rows) -> None:
        """Counts the bits in which old log-probs differ from the engine's, and keeps the first that does."""
        engine_K, old_K = batch.engine_log_probs_K.float(), batch.old_log_probs_K.float()
        differ_K = (engine_K.view(torch.int32) ^ old_K.view(torch.int32))[~engine_K.isnan()]
        bits = int(np.bitwise_count(differ_K.cpu().numpy().view(np.uint32)).sum())
        self._sums[BITS] = self._sums.get(BITS, 0.0) + float(bits)
        if bits:
            own, samples = iter(old_K.tolist()), [sample for row in rows for sample in row]
            each = [[next(own) for _ in sample.trained] for sample in samples]
            self.differs = sorted([*self.differs, *differences(samples, each)])[:1]

    def balance(self, loss: float, busiest: float) -> None:
        """Adds the load-balance loss of a minibatch, and the share of the busiest expert against an equal one."""
        for name, value in (("balanced", 1.0), ("balance_loss", loss), ("busiest_expert", busiest)):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def add_drafts(self, drafted: Tensor) -> None:
        """Adds what `drafting.draft_loss` gives of a micro-batch."""
        for name, value in zip(("draft_loss", "draft_overlap", "draft_tokens"), drafted[1:], strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + value.double()

    def reroute(self, changed: float, forced: float) -> None:
        """Adds forced choices of experts, and how many of them the routers would have made otherwise."""
        for name, value in (("routes", forced), ("routes_changed", changed)):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def compare_unforced(self, log_ratio_K: Tensor) -> None:
        """Adds the mismatch of tokens that were computed with the routers' own choice."""
        told_K = torch.isfinite(log_ratio_K)
        off_K = torch.where(told_K, log_ratio_K, 0.0).double().abs()
        for name, value in (("unforced_tokens", told_K.sum().double()), ("unforced_mismatch", off_K.sum())):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def add_entropy(self, entropy_K: Tensor) -> None:
        """Adds the entropies of a micro-batch's tokens."""
        self._sums["entropy"] += entropy_K.sum().double()

    def merge(self, other: TokenFigures) -> None:
        """Adds another's."""
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in other._own.items():
            self._own[name] = self._own.get(name, 0.0) + value
        for name, value in other._maxima.items():
            self._maxima[name] = _larger(self._maxima[name], value)
        self.differs = sorted([*self.differs, *other.differs])[:1]

    @classmethod
    def of(cls, sums: Mapping[str, float], maxima: Mapping[str, float]) -> TokenFigures:
        """What `sums` and `maxima` gave."""
        found = cls()
        for name, value in sums.items():
            own = name.removeprefix("own.")
            (found._own if own != name else found._sums)[own] = value
        found._maxima |= maxima
        return found

    def sums(self) -> dict[str, float]:
        """Sums by name; the algorithm's own are prefixed "own."."""
        return _read(self._sums | {f"own.{name}": value for name, value in self._own.items()})

    def maxima(self) -> dict[str, float]:
        """Maxima by name."""
        return _read(self._maxima)


def _larger(one: Figure, other: Figure) -> Figure:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other)
    if isinstance(one, Tensor):
        return one.clamp(min=other)
    return other.clamp(min=one) if isinstance(other, Tensor) else max(one, other)


def _read(figures: Mapping[str, Figure]) -> dict[str, float]:
    """Numbers, of which those on the device come in one transfer."""
    waiting = [value for value in figures.values() if isinstance(value, Tensor)]
    found = iter(torch.stack(waiting).tolist() if waiting else ())
    return {name: next(found) if isinstance(value, Tensor) else value for name, value in figures.items()}


def fix_sums(fixed: bool) -> None:
    """torch computes the same sums in the same order from now on, or as is fastest.

    Raises Refusal where this process was given other workspaces of cuBLAS: torch would refuse its first product.
    """
    given = os.environ.get(WORKSPACES, "")
    if fixed and given not in FIXED_WORKSPACES and torch.cuda.is_available():
        raise invalid(
            f"deterministic: {WORKSPACES} is {given!r} where this trainer runs, with which cuBLAS sums in changing "
            f"orders; start the trainers without it, which makes it {FIXED_WORKSPACES[0]}, or set deterministic: false"
        )
    torch.use_deterministic_algorithms(fixed)
