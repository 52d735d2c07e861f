"""What an algorithm is: advantages from outcomes, and a loss as an unnormalised sum. Knows no model.

Shapes: B samples, T trained tokens of the longest of them, K trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.algorithms.functional.aggregation import Terms

OLD_LOG_PROBS = "old_log_probs"
"""Column: the trainer's own log-probs under the weights at which the step began."""
REFERENCE_LOG_PROBS = "reference_log_probs"
"""Column: log-probs under the frozen reference model."""
VALUES = "values"
"""Column: the critic's value of what was read before each token, under the weights at which the step began."""
RETURNS = "returns"
"""What values are compared with: the returns of `Advantages`, as a column of a loss. Never inferred."""


class Barrier(Enum):
    """The set that must be complete before its gradient may be taken."""

    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True)
class Passes:
    """How often a step's batch is learned from: `epochs` times, in `minibatches` optimizer steps each time.

    After the first epoch no further step is made once a minibatch's mean `approx_kl` is above `target_kl`.
    `minibatch_size`: at most so many chunks of episodes in a minibatch, however many minibatches that makes.
    """

    epochs: int = 1
    minibatches: int = 1
    target_kl: float | None = None
    minibatch_size: int | None = None

    @property
    def several(self) -> bool:
        """Whether the policy moves while its batch is learned from, so that ratios differ from 1."""
        return self.epochs * self.minibatches > 1 or self.minibatch_size is not None

    def parts(self, chunks: int) -> int:
        """Optimizer steps of a pass over so many chunks of episodes: at least 1."""
        wanted = self.minibatches if self.minibatch_size is None else -(-chunks // self.minibatch_size)
        return max(1, min(wanted, chunks))


@dataclass(frozen=True)
class Refill:
    """Which groups a step does without, and how many it takes in their place.

    With `drop_equal`, a group whose rewards are all equal is not learned from. A step takes further groups in place of
    those and of failed ones, up to `most` times its own number.
    """

    drop_equal: bool = False
    most: int = 0


@dataclass(frozen=True)
class CriticPlan:
    """The critic that an algorithm wants, whose own weights learn at a rate of their own (None: the policy's).

    A value head on the policy, or, with `own_model`, on a model of its own that begins as `path` (None: as the policy
    begins). In the run's first `warmup_steps` it learns alone. `bootstraps`: values of where answers were cut are
    wanted, as `Outcomes.bootstrap_values_B`. A head without `bias` is told apart from none by differences alone.
    """

    own_model: bool = False
    path: str | None = None
    learning_rate: float | None = None
    warmup_steps: int = 0
    bootstraps: bool = False
    bias: bool = True


@dataclass(frozen=True)
class GivenRewards:
    """What an answer's reward is made of, up to a factor: a column, less a second one where there are two; added up
    over its trained tokens, or their mean.
    """

    columns: tuple[str, ...] = ()
    by_token: bool = False


@dataclass(frozen=True)
class TurnCredit:
    """Rewards are given by turn, and one is worth `discount` of it to the turn before.

    With `apart`, `Algorithm.advantages` gets each turn as an answer of its own (see `by_turn`); without, it reads
    `Outcomes.turns`.
    """

    discount: float = 1.0
    apart: bool = True


@dataclass(frozen=True)
class Turns:
    """The turns of B conversations, N of the one that has most: 0 behind each one's last, of which `counts_B` says the
    number. `rewards_BN` in float64 adds up to the samples' rewards. `tokens_BN` counts what was sampled in each turn.
    `roles_BN` numbers who took each, -1 behind the last; the turns of a role follow each other. None: one party did.
    `cut_roles_B` says whose line a limit has cut, -1 where none was.
    """

    rewards_BN: Tensor
    tokens_BN: Tensor
    counts_B: Tensor
    roles_BN: Tensor | None = None
    cut_roles_B: Tensor | None = None

    @property
    def starts_BN(self) -> Tensor:
        """Each turn's first token, among the sample's sampled ones."""
        return self.tokens_BN.cumsum(1) - self.tokens_BN

    def of_tokens(self, longest: int) -> Tensor:
        """(B, T): the turn of each of `longest` tokens; N behind a sample's last token."""
        places_BT = torch.arange(longest).expand(len(self.tokens_BN), longest).contiguous()
        return torch.searchsorted(self.tokens_BN.cumsum(1), places_BT, right=True)


@dataclass(frozen=True)
class Outcomes:
    """What became of the samples that advantages compare, in float64: one group, or a step's whole batch.

    `groups_B` numbers the groups from 0; samples of a group follow each other. `mask_BT` is true where a sample has
    a t-th trained token (none in a masked answer). `lengths_B` counts the tokens of each answer, trained or not, of its
    longest turn where it has several; `longest` is the run's limit of them. `columns_BT` are the algorithm's `columns`,
    0 outside the mask. `draw` seeds what is drawn by chance: another in each step. `bootstrap_values_B` is the critic's
    value at the end of what a limit has cut, of several lines the cut one; 0 of a sample that ended; None where the
    critic does not bootstrap. `greedy_B` is true at the greedy sample of a group, which may have none; None where the
    algorithm wants none. `turns`: where the algorithm has a `turn_credit`, and of conversations of several roles (see
    `by_role`).
    """

    rewards_B: Tensor
    groups_B: Tensor
    mask_BT: Tensor
    lengths_B: Tensor
    longest: int
    columns_BT: Mapping[str, Tensor] = field(default_factory=dict)
    bootstrap_values_B: Tensor | None = None
    draw: int = 0
    turns: Turns | None = None
    greedy_B: Tensor | None = None


@dataclass(frozen=True)
class TokenBatch:
    """The trained tokens of one micro-batch, flat; the tokens of a sequence follow each other.

    `old_log_probs_K` are the trainer's own under the weights at which the step began; where a step is one optimizer
    step they are `log_probs_K`, detached. `engine_log_probs_K` are what the engine reported, each under the version
    that sampled that token, which may be older than the base and differ within a sequence; NaN where it reported none.
    `weights_K` is each token's share of its sequence, from `Algorithm.token_weight`. `sequences_K` numbers the
    micro-batch's sequences from 0: every trained token of a sequence is in one micro-batch. `columns_K` are the
    algorithm's `columns`, and RETURNS where its advantages came with them. `entropy_K` are the entropies of the
    distributions that the tokens were drawn from, `values_K` its critic's values (None without a critic); both are
    differentiable. `teacher_log_probs_KM` are a teacher's of the words that it finds likeliest in each token's place,
    and `top_log_probs_KM`, differentiable, the policy's of the same words; None without such a teacher.
    """

    log_probs_K: Tensor
    old_log_probs_K: Tensor
    engine_log_probs_K: Tensor
    advantages_K: Tensor
    weights_K: Tensor
    sequences_K: Tensor
    columns_K: Mapping[str, Tensor] = field(default_factory=dict)
    entropy_K: Tensor | None = None
    values_K: Tensor | None = None
    top_log_probs_KM: Tensor | None = None
    teacher_log_probs_KM: Tensor | None = None

    def mask(self) -> Tensor:
        """(S, T) bool: where `padded` has a token."""
        places_K, count, longest = self._places()
        mask_ST = torch.zeros(count, longest, dtype=torch.bool, device=places_K.device)
        mask_ST[self.sequences_K, places_K] = True
        return mask_ST

    def padded(self, values_K: Tensor) -> Tensor:
        """(S, T) with a row for each sequence and 0 behind its tokens; differentiable."""
        places_K, count, longest = self._places()
        empty_ST = values_K.new_zeros(count, longest)
        return empty_ST.index_put((self.sequences_K, places_K), values_K)

    def flat(self, values_ST: Tensor) -> Tensor:
        """(K,) from (S, T): undoes `padded`."""
        return values_ST[self.sequences_K, self._places()[0]]

    def flat_terms(self, terms: Terms) -> Terms:
        """(K,) loss and metrics from (S, T) ones."""
        return Terms(
            self.flat(terms.loss), {name: self.flat(values_ST) for name, values_ST in terms.metrics.items()}
        )

    def _places(self) -> tuple[Tensor, int, int]:
        """Each token's place in its sequence, the number of sequences, the length of the longest."""
        lengths_S = torch.bincount(self.sequences_K)
        starts_S = lengths_S.cumsum(0) - lengths_S
        places_K = torch.arange(len(self.sequences_K), device=lengths_S.device) - starts_S[self.sequences_K]
        return places_K, len(lengths_S), int(lengths_S.max()) if len(lengths_S) else 0


@dataclass(frozen=True)
class LossSums:
    """An unnormalised loss, with figures to be added up and divided by the trained tokens at the commit.

    `approx_kl` among the figures, the divergence of the policy from the old one, is what `target_kl` looks at.
    """

    loss: Tensor
    token_sums: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One policy-gradient algorithm.

    The gradient of an optimizer step is `sum over micro-batches of d loss / denominator`, with the denominator known
    only at the end: so groups may be learned from as they come, in any order and packing.
    """

    @property
    def barrier(self) -> Barrier:
        """GROUP allows streaming accumulation; BATCH waits for the whole step, as several passes must."""

    @property
    def passes(self) -> Passes:
        """Optimizer steps of a commit."""

    @property
    def least_group(self) -> int:
        """Samples that a group needs at least, so that there is something to compare."""

    @property
    def refill(self) -> Refill:
        """Which groups a step replaces; `Refill()` for none. Rewards are compared as the scorers gave them."""

    @property
    def greedy_first(self) -> bool:
        """Whether the first sample of each group is the greedy answer, scored as a baseline and not learned from."""

    @property
    def every_token(self) -> bool:
        """Whether the loss has terms beside the advantages', so that tokens without an advantage are computed too."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what the infer pass computes for each trained token, once, before advantages and first forward.

        With several passes OLD_LOG_PROBS is among them. Where there are columns, they are of every trained token.
        """

    @property
    def balance_loss(self) -> float:
        """Coefficient of the load-balance loss of experts; above 0 the barrier is BATCH. See `balance_loss_of`:
        an algorithm may leave it out.
        """

    @property
    def expert_bias_rate(self) -> float:
        """What biases of routers follow their experts' load by; above 0 the barrier is BATCH. See `bias_rate_of`."""

    @property
    def routing_replay(self) -> bool:
        """Whether tokens go to the experts that the engine sent them to. Read it with `replays_routing`."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the reference must be another model than the policy: `trainer.reference`."""

    @property
    def critic(self) -> CriticPlan | None:
        """The critic whose values `columns` and the loss may name; most have none."""

    @property
    def turn_credit(self) -> TurnCredit | None:
        """How credit goes to the turns of conversations; None: a reward is the whole conversation's. Read it with
        `turn_credit_of`: an algorithm may leave it out.
        """

    @property
    def branch_weights(self) -> str:
        """What each branch of an agent's session is worth: "divide", its credit by their number, or "whole", all of it.
        Read it with `branch_weights_of`: an algorithm may leave it out.
        """

    @property
    def judge(self) -> str:
        """What the values of its critic's head are of, and so what is exported: "answers", a classifier of sequences;
        "steps", of tokens; "": nothing, the head is an aid. Read it with `judge_of`: an algorithm may leave it out.
        """

    @property
    def given_rewards(self) -> GivenRewards:
        """What given answers are compared by. Read it with `given_rewards_of`: an algorithm may leave it out."""

    def advantages(self, outcomes: Outcomes) -> Tensor | Advantages:
        """One advantage for each trained token, (B, T), in the rewards' type; 0 outside the mask.

        With the returns where a value loss needs those.
        """

    def token_weight(self, tokens: int) -> float:
        """What each of a sequence's `tokens` trained tokens weighs in the sum."""

    def denominator(self, tokens: float, sequences: int) -> float:
        """What the sum is divided by, given the trained tokens, those of branches by what these weigh, and the
        sequences that have any.
        """

    def loss(self, batch: TokenBatch) -> LossSums:
        """The loss of a micro-batch, differentiable in `log_probs_K`, `entropy_K` and `values_K`."""

    def batch_figures(self) -> dict[str, float]:
        """Figures of the batch whose advantages were computed last, in place of those of the same names. Read it with
        `batch_figures_of`: an algorithm may leave it out.
        """

    def observe(self, figures: Mapping[str, float], sequences: int) -> None:
        """Hears of a committed step, on the leader: its figures, and the samples that it was learned from."""

    def state(self) -> dict[str, float]:
        """What `observe` has changed, for checkpoints and for the other ranks; empty where nothing ever changes."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on from a `state`; from an empty one as at the start."""


def balance_loss_of(algorithm: Algorithm) -> float:
    """`Algorithm.balance_loss`; 0 of one that has no such property."""
    return float(getattr(algorithm, "balance_loss", 0.0))


def bias_rate_of(algorithm: Algorithm) -> float:
    """`Algorithm.expert_bias_rate`; 0 of one that has no such property."""
    return float(getattr(algorithm, "expert_bias_rate", 0.0))


def turn_credit_of(algorithm: Algorithm) -> TurnCredit | None:
    """`Algorithm.turn_credit`; None of one that has no such property."""
    found: TurnCredit | None = getattr(algorithm, "turn_credit", None)
    return found


def judge_of(algorithm: Algorithm) -> str:
    """`Algorithm.judge`; empty of one that has no such property."""
    return str(getattr(algorithm, "judge", ""))


def given_rewards_of(algorithm: Algorithm) -> GivenRewards:
    """`Algorithm.given_rewards`; of nothing where it has no such property."""
    found = getattr(algorithm, "given_rewards", None)
    return found if isinstance(found, GivenRewards) else GivenRewards()


def batch_figures_of(algorithm: Algorithm) -> dict[str, float]:
    """`Algorithm.batch_figures`; none of one that has no such method."""
    return algorithm.batch_figures() if hasattr(algorithm, "batch_figures") else {}


def branch_weights_of(algorithm: Algorithm) -> str:
    """`Algorithm.branch_weights`; "divide" of one that has no such property."""
    return str(getattr(algorithm, "branch_weights", "divide"))


def teacher_top_of(algorithm: Algorithm) -> int:
    """Of how many words a teacher tells the log-probs in each token's place: the option `top_k` of one that has one."""
    return int(getattr(algorithm, "teacher_top", 0))


def replays_routing(algorithm: Algorithm) -> bool:
    """`Algorithm.routing_replay`; false of one that has no such property."""
    return bool(getattr(algorithm, "routing_replay", False))
