"""Options that algorithms share: what every one takes, clips, aggregation, groups, KL. Knows no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat, model_validator

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
Correction = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]
BOUNDS: dict[str, tuple[float, float]] = {"truncate": (0.0, 2.0), "mask": (0.5, 5.0)}
"""Of each correction, where its options do not say: those of the papers (TIS, IcePop)."""
Count = Annotated[int, Field(ge=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Refills = Annotated[int, Field(ge=0, le=100)]
REFILLS = "a step takes further groups in place of dropped ones, up to this many times prompts_per_step"


class PolicyOptions(Options):
    """What every policy-gradient algorithm takes. An option that the others leave without effect is refused."""

    ratio_options: ClassVar[frozenset[str]] = frozenset()
    """Options that act on the ratio of new to old policy only."""

    kl_reward_by_token: ClassVar[bool] = False
    """Whether a KL reward reaches all tokens before it, those of earlier turns too."""

    has_ratio: ClassVar[bool] = True
    """Whether its loss compares the policy with an old one."""

    old_log_probs: Literal["base", "engine"] = Field(
        default="base",
        description="what the ratio of new to old policy is taken against: base, the trainer's log-probs under the "
        "weights at which the step began (decoupled PPO's proximal policy); engine, those told at sampling",
    )
    correction: Correction | None = Field(
        default=None,
        description="weight base/engine of what was sampled: truncate clips it, mask drops what lies outside the "
        "bounds (IcePop), none takes 1; default: truncate where algorithm.max_staleness is above 0, else none",
    )
    correction_level: Level = Field(
        default="token",
        description="whose ratio the correction looks at: a token's, the product over an answer, or its geometric mean",
    )
    correction_low: NotNegative | None = Field(
        default=None, description="lower bound of the correction's ratio; default: truncate 0, mask 0.5"
    )
    correction_high: PositiveFloat | None = Field(
        default=None, description="upper bound of the correction's ratio; default: truncate 2, mask 5"
    )
    off_policy_mask: PositiveFloat | None = Field(
        default=None,
        description="tokens of negative advantage are dropped from an answer whose mean log(engine/base) is above "
        "this; none: no such mask",
    )
    credit: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description="what a reward is credited to, in agentic runs: trajectory, all turns of a conversation alike; "
        "turn, each turn by what is earned from it on",
    )
    turn_discount: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="discount of a reward from turn to turn; needs credit: turn"
    )
    branch_weights: Literal["divide", "whole"] = Field(
        default="divide",
        description="what each branch of an agent's session weighs: divide, one by their number, so that a session "
        "weighs no more for having several; whole, 1",
    )
    epochs: Count = Field(default=1, description="passes over the step's batch")
    minibatches: Count = Field(
        default=1, description="optimizer steps of a pass, each from its share of the groups"
    )
    target_kl: PositiveFloat | None = Field(
        default=None,
        description="after the first pass, no optimizer step follows a minibatch whose approx_kl is above this",
    )
    kl_loss_coef: NotNegative = Field(
        default=0.0, description="weight of the KL to the reference model in the loss; 0: no such term"
    )
    kl_estimator: Estimator | None = Field(
        default=None,
        description="estimate of that KL; with + it has the gradient of k2; none: k3 in the loss, k1 in rewards",
    )
    kl_target: PositiveFloat | None = Field(
        default=None, description="KL to the reference that the coefficient is steered to; none: it is fixed"
    )
    kl_horizon: PositiveFloat = Field(
        default=10_000.0, description="samples over which the coefficient is steered; needs kl_target"
    )
    entropy_coef: NotNegative = Field(
        default=0.0, description="weight of the entropy bonus in the loss; 0: no such term"
    )

    balance_loss_coef: NotNegative = Field(
        default=0.0,
        description="weight of the load-balance loss of a model with experts, in each of its layers; 0: no such term",
    )
    expert_bias_rate: NotNegative = Field(
        default=0.0,
        description="what the bias by which a router chooses an expert rises after each optimizer step where fewer "
        "tokens than an equal share went to it, and falls where more did (DeepSeek V3: 0.001); 0: it stays",
    )
    routing_replay: bool = Field(
        default=False,
        description="a token goes to the experts that the engine sent it to (rollout routing replay, R3), in a model "
        "with experts",
    )

    @property
    def several(self) -> bool:
        """Whether a commit makes several optimizer steps."""
        return self.epochs * self.minibatches > 1

    @property
    def moves(self) -> bool:
        """Whether the loss's ratio can differ from 1."""
        return self.several or self.old_log_probs == "engine"

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the correction's ratio, (low, high)."""
        low, high = BOUNDS[self.correction or "none"]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    def for_staleness(self, steps: int) -> Self:
        """With the correction that a run takes whose samples may lag `steps` steps behind, where none is named."""
        if not steps or self.correction is not None or self.old_log_probs == "engine":
            return self
        return self.model_copy(update={"correction": "truncate"})

    @property
    def kl_reward(self) -> float:
        """Weight of the KL in the rewards, where there is such an option."""
        found: float = getattr(self, "kl_reward_coef", 0.0)
        return found

    @model_validator(mode="after")
    def _kl_used(self) -> Self:
        wanted = [key for key in ("kl_loss_coef", "kl_reward_coef") if getattr(self, key, 0.0)]
        keys = " or ".join(key for key in ("kl_loss_coef", "kl_reward_coef") if hasattr(self, key))
        for key in ("kl_estimator", "kl_target"):
            if key in self.model_fields_set and not wanted:
                raise ValueError(
                    f"{key}: has no effect without a KL term; set {keys} above 0, or leave it out"
                )
        if "kl_horizon" in self.model_fields_set and self.kl_target is None:
            raise ValueError("kl_horizon: has no effect without kl_target; set that too, or leave it out")
        if self.kl_target is not None and len(wanted) > 1:
            raise ValueError("kl_target: steers one coefficient; set kl_loss_coef or kl_reward_coef to 0")
        if wanted == ["kl_reward_coef"] and self.kl_estimator is not None and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"kl_estimator: {self.kl_estimator} differs in its gradient alone, and a reward has none; use "
                f"{self.kl_estimator.removesuffix('+')}"
            )
        return self

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        if self.old_log_probs == "engine":
            if not self.has_ratio:
                raise ValueError(
                    "old_log_probs: this algorithm has no ratio to an old policy; leave it out, and set correction"
                )
            if self.correction in BOUNDS:
                raise ValueError(
                    "correction: with old_log_probs: engine the ratio is that to the policy that sampled already; "
                    "leave one of the two out"
                )
        keys = ("correction_level", "correction_low", "correction_high")
        idle = [key for key in keys if key in self.model_fields_set]
        if idle and self.correction not in BOUNDS:
            raise ValueError(f"{idle[0]}: has no effect without correction; set that to truncate or mask")
        if self.correction in BOUNDS and self.bounds[0] >= self.bounds[1]:
            raise ValueError(
                f"correction_low: {self.bounds[0]:g} is not below correction_high, {self.bounds[1]:g}"
            )
        return self

    @model_validator(mode="after")
    def _credited(self) -> Self:
        if "turn_discount" in self.model_fields_set and self.credit != "turn":
            raise ValueError(
                "turn_discount: has no effect without credit: turn; set that too, or leave it out"
            )
        if self.credit == "turn" and self.kl_reward and not self.kl_reward_by_token:
            raise ValueError(
                "kl_reward_coef: with credit: turn a turn would not pay for the KL of those after it; use "
                "kl_loss_coef, or algorithm.name: ppo"
            )
        return self

    @model_validator(mode="after")
    def _used(self) -> Self:
        idle = sorted(self.model_fields_set & self.ratio_options)
        if not self.moves and idle:
            raise ValueError(
                f"{idle[0]}: with one optimizer step a commit the ratio to the old policy is 1, and {', '.join(idle)} "
                "would have no effect; leave it out, set epochs or minibatches to 2 or more, or old_log_probs to engine"
            )
        if self.epochs == 1 and self.target_kl is not None:
            raise ValueError(
                "target_kl: has no effect in the first pass; leave it out, or set epochs to 2 or more"
            )
        return self


class AggregationOptions(PolicyOptions):
    """Those that leave open what tokens and sequences weigh."""

    loss_aggregation: Aggregation = Field(
        default="token-mean", description="what tokens and sequences weigh in the loss"
    )


class ClipOptions(PolicyOptions):
    """Those whose objective clips the ratio of new to old policy on both sides."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high", "dual_clip"})

    clip_low: BelowOne = Field(default=0.2, description="the ratio is clipped below 1 - clip_low")
    clip_high: NotNegative = Field(default=0.2, description="the ratio is clipped above 1 + clip_high")
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="bound of the ratio where the advantage is negative; none: no bound"
    )


class GroupOptions(PolicyOptions):
    """Those that compare the samples of a group, and learn nothing of it where all rewards are equal."""

    drop_equal: bool = Field(
        default=False, description="drop a group whose rewards are all equal; it counts as no failure"
    )
    max_refill: Refills = Field(default=0, description=REFILLS)


class StdOptions(GroupOptions):
    """Those that compare a reward with its group's mean, and may divide by its spread."""

    normalize_std: bool = Field(
        default=True, description="divide group-centred rewards by their standard deviation"
    )


class KlRewardOptions(PolicyOptions):
    """Those whose rewards may lose the KL to the reference, token by token."""

    kl_reward_coef: NotNegative = Field(
        default=0.0, description="what a token's reward loses for its KL to the reference model; 0: nothing"
    )
