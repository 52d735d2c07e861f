"""The losses that a loop of the user's own asks for, one in each call: sums over tokens, as tinker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace_schema.sessions import LOSS_OPTIONS, LOSSES
from headrace_servicekit.registry import Options
from torch import Tensor

from headrace_trainer.algorithms._base import Barrier, LossSums, Outcomes, Passes, Refill, TokenBatch

WEIGHTS, SAMPLED = "weights", "sampled_log_probs"
"""Columns of a call's tokens: what each counts, and its log-prob under the policy that sampled it."""
Given = Mapping[str, float]


def _clipped(ratios_K: Tensor, given: Given) -> Tensor:
    return ratios_K.clamp(given["clip_low_threshold"], given["clip_high_threshold"])


def _importance_sampling(lp_K: Tensor, q_K: Tensor, advantages_K: Tensor, given: Given) -> Tensor:
    return -(lp_K - q_K).exp() * advantages_K


def _ppo(lp_K: Tensor, q_K: Tensor, advantages_K: Tensor, given: Given) -> Tensor:
    ratios_K = (lp_K - q_K).exp()
    return -(ratios_K * advantages_K).minimum(_clipped(ratios_K, given) * advantages_K)


def _cispo(lp_K: Tensor, q_K: Tensor, advantages_K: Tensor, given: Given) -> Tensor:
    return -_clipped((lp_K.detach() - q_K).exp(), given) * advantages_K * lp_K


def _dro(lp_K: Tensor, q_K: Tensor, advantages_K: Tensor, given: Given) -> Tensor:
    return -(lp_K * advantages_K - 0.5 * given["beta"] * (lp_K - q_K).square())


_TERMS: dict[str, Callable[[Tensor, Tensor, Tensor, Given], Tensor]] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}


class AskedLosses:
    """The loss of `ask`. A step's gradient is their plain sum, so that the denominator is 1."""

    barrier, passes, refill = Barrier.GROUP, Passes(), Refill()
    least_group = 1
    greedy_first = needs_teacher = False
    every_token = True
    critic = None
    columns: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self._name = LOSSES[0]
        self._given: dict[str, float] = {}

    def ask(self, name: str, options: Given) -> None:
        """Computes this loss from now on."""
        self._name, self._given = name, {**LOSS_OPTIONS[name], **options}

    def loss(self, batch: TokenBatch) -> LossSums:
        """Of the loss that was asked for."""
        lp_K = batch.log_probs_K
        weights_K = batch.weights_K * batch.columns_K.get(WEIGHTS, batch.weights_K)
        if self._name == "cross_entropy":
            return LossSums(-(weights_K * lp_K).sum())
        q_K = batch.columns_K.get(SAMPLED, lp_K.detach())
        terms_K = _TERMS[self._name](lp_K, q_K, batch.advantages_K, self._given)
        # A token that does not count adds nothing, however far its ratio is off.
        return LossSums((weights_K * terms_K.where(weights_K != 0, 0.0 * lp_K)).sum())

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """None are computed: calls bring theirs."""
        return outcomes.rewards_B[:, None] * outcomes.mask_BT

    def token_weight(self, tokens: int) -> float:
        """Tokens weigh what the call says."""
        return 1.0

    def denominator(self, tokens: float, sequences: int) -> float:
        """1: losses are sums."""
        return 1.0

    def observe(self, figures: Mapping[str, float], sequences: int) -> None:
        """Nothing is steered."""

    def state(self) -> dict[str, float]:
        """The loss, for the other ranks."""
        return {"loss": float(LOSSES.index(self._name)), **self._given}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Computes the loss of a `state`."""
        given = dict(state)
        self._name = LOSSES[int(given.pop("loss", 0.0))]
        self._given = given
