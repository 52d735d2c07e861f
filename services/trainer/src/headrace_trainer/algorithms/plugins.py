"""The built-in algorithms with their options. Knows no torch: names and options are asked for before a run starts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from headrace_servicekit.registry import Options, Plugin
from pydantic import Field, PositiveFloat, model_validator

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
Count = Annotated[int, Field(ge=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Refills = Annotated[int, Field(ge=0, le=100)]
REFILLS = "a step takes further groups in place of dropped ones, up to this many times prompts_per_step"


class PolicyOptions(Options):
    """What every policy-gradient algorithm takes. An option that the others leave without effect is refused."""

    ratio_options: ClassVar[frozenset[str]] = frozenset()
    """Options that act on the ratio of new to old policy only."""

    importance_cap: PositiveFloat | None = Field(
        default=None,
        description="cap of the truncated importance weight trainer/engine per token; none: no correction",
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

    @property
    def several(self) -> bool:
        """Whether a commit makes several optimizer steps."""
        return self.epochs * self.minibatches > 1

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
    def _used(self) -> Self:
        idle = sorted(self.model_fields_set & self.ratio_options)
        if not self.several and idle:
            raise ValueError(
                f"{idle[0]}: with one optimizer step a commit the ratio to the old policy is 1, and {', '.join(idle)} "
                "would have no effect; leave it out, or set epochs or minibatches to 2 or more"
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


class PpoOptions(ClipOptions, AggregationOptions):
    """Those with PPO's clip whose aggregation is open; `algorithm.options` of distill."""


class GroupPpoOptions(PpoOptions, GroupOptions):
    """`algorithm.options` of opo."""


class GrpoOptions(PpoOptions, StdOptions):
    """`algorithm.options` of grpo and passk_grpo."""


class KlRewardOptions(PolicyOptions):
    """Those whose rewards may lose the KL to the reference, token by token."""

    kl_reward_coef: NotNegative = Field(
        default=0.0, description="what a token's reward loses for its KL to the reference model; 0: nothing"
    )


class RewardedOptions(PpoOptions, KlRewardOptions):
    """`algorithm.options` of reinforce and remax; those of ppo and reinforce_pp begin with them."""


class GroupRewardedOptions(RewardedOptions, GroupOptions):
    """`algorithm.options` of rloo and reinforce_pp_baseline."""


class DrGrpoOptions(ClipOptions, GroupOptions):
    """`algorithm.options` of dr_grpo."""

    norm_length: Count = Field(
        default=1,
        description="constant that each answer's sum is divided by, such as sampling.max_new_tokens",
    )


class DapoOptions(ClipOptions, StdOptions):
    """`algorithm.options` of dapo."""

    clip_high: NotNegative = Field(default=0.28, description="the ratio is clipped above 1 + clip_high")
    drop_equal: bool = Field(
        default=True, description="drop a group whose rewards are all equal; it counts as no failure"
    )
    max_refill: Refills = Field(default=3, description=REFILLS)
    overlong_buffer: Count | None = Field(
        default=None,
        description="last tokens before sampling.max_new_tokens over which a reward sinks; none: rewards as they are",
    )
    overlong_factor: PositiveFloat = Field(
        default=1.0, description="what the longest answers lose; needs overlong_buffer"
    )

    @model_validator(mode="after")
    def _shaped(self) -> Self:
        if self.overlong_buffer is None and "overlong_factor" in self.model_fields_set:
            raise ValueError(
                "overlong_factor: has no effect without overlong_buffer; set that too, or leave it out"
            )
        return self


class ReinforcePpOptions(RewardedOptions):
    """`algorithm.options` of reinforce_pp."""

    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="discount of the reward from token to token"
    )


class ActorCriticOptions(RewardedOptions):
    """`algorithm.options` of ppo."""

    ratio_options: ClassVar[frozenset[str]] = RewardedOptions.ratio_options | {"value_clip"}

    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="discount of the reward from token to token"
    )
    lam: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="GAE's lambda: 1 trusts the rewards, 0 the next token's value"
    )
    whiten: bool = Field(default=True, description="whiten advantages over the batch's trained tokens")
    critic: Literal["head", "model"] = Field(
        default="head", description="a value head on the policy's last hidden states, or a model of its own"
    )
    critic_path: str | None = Field(
        default=None, description="model that a critic of its own begins as; none: same as policy"
    )
    critic_lr: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None, description="learning rate of the critic's own weights; none: optimizer.lr"
    )
    critic_warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="first steps of the run in which the critic's own weights learn alone"
    )
    value_coefficient: PositiveFloat = Field(
        default=0.5, description="weight of the value loss beside the policy's"
    )
    value_clip: PositiveFloat | None = Field(
        default=0.2, description="values are clipped to this distance from the old ones; none: no clipping"
    )
    value_huber: PositiveFloat | None = Field(
        default=None, description="beyond this error the value loss is linear; none: squared everywhere"
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="an answer cut by the length limit goes on, by the critic's value of its end",
    )

    @model_validator(mode="after")
    def _has_model(self) -> Self:
        if self.critic == "head" and self.critic_path is not None:
            raise ValueError(
                "critic_path: a value head reads the policy's own hidden states; leave it out, or set critic: model"
            )
        return self


class GspoOptions(GrpoOptions):
    """`algorithm.options` of gspo."""

    loss_aggregation: Aggregation = Field(
        default="seq-mean-token-mean", description="what tokens and sequences weigh in the loss"
    )
    clip_low: BelowOne = Field(default=3e-4, description="the answer's ratio is clipped below 1 - clip_low")
    clip_high: NotNegative = Field(
        default=4e-4, description="the answer's ratio is clipped above 1 + clip_high"
    )


class GmpoOptions(StdOptions):
    """`algorithm.options` of gmpo."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high"})

    clip_low: NotNegative = Field(default=0.4, description="log-ratios are clipped below -clip_low")
    clip_high: NotNegative = Field(default=0.4, description="log-ratios are clipped above clip_high")


class CispoOptions(AggregationOptions, StdOptions):
    """`algorithm.options` of cispo."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high"})

    clip_low: BelowOne | None = Field(
        default=None, description="a token's weight is at least 1 - clip_low; none: no such bound"
    )
    clip_high: NotNegative = Field(default=0.2, description="a token's weight is at most 1 + clip_high")


class SapoOptions(AggregationOptions, StdOptions):
    """`algorithm.options` of sapo."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"tau_positive", "tau_negative"})

    loss_aggregation: Aggregation = Field(
        default="seq-mean-token-mean", description="what tokens and sequences weigh in the loss"
    )
    tau_positive: PositiveFloat = Field(
        default=1.0, description="how sharply the gate closes where the advantage is positive"
    )
    tau_negative: PositiveFloat = Field(
        default=1.05, description="how sharply the gate closes where the advantage is negative"
    )


class GpgOptions(AggregationOptions, GroupOptions):
    """`algorithm.options` of gpg."""

    alpha: PositiveFloat | None = Field(
        default=None,
        description="scale of advantages; none: samples of the step over those whose reward is not 0",
    )


class ClipCovOptions(GrpoOptions):
    """`algorithm.options` of clip_cov."""

    cov_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="share of the step's tokens that are drawn, at least one token"
    )
    cov_low: float = Field(default=1.0, description="tokens are drawn from those of higher covariance")
    cov_high: float = Field(default=5.0, description="tokens are drawn from those of lower covariance")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low: {self.cov_low} is not below cov_high: {self.cov_high}")
        return self


class KlCovOptions(AggregationOptions, StdOptions):
    """`algorithm.options` of kl_cov."""

    ratio_options: ClassVar[frozenset[str]] = frozenset({"cov_fraction", "cov_coef"})

    cov_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="share of the step's tokens that pay, those of highest covariance"
    )
    cov_coef: NotNegative = Field(
        default=1.0, description="what such a token pays for its distance from the old policy"
    )


_HERE = "headrace_trainer.algorithms"
GRPO = Plugin(
    f"{_HERE}.group_relative.grpo:Grpo", GrpoOptions, "group relative policy optimisation, without a critic"
)
PASSK_GRPO = Plugin(
    f"{_HERE}.group_relative.passk_grpo:PassKGrpo",
    GrpoOptions,
    "GRPO that rewards the best answer of a group alone",
)
DR_GRPO = Plugin(
    f"{_HERE}.group_relative.dr_grpo:DrGrpo",
    DrGrpoOptions,
    "GRPO without its biases by answer length and by spread of rewards",
)
DAPO = Plugin(
    f"{_HERE}.group_relative.dapo:Dapo",
    DapoOptions,
    "GRPO with clip-higher, token mean, dynamic sampling and overlong shaping",
)
RLOO = Plugin(
    f"{_HERE}.reinforce.rloo:Rloo", GroupRewardedOptions, "a reward against the mean of its group's others"
)
OPO = Plugin(
    f"{_HERE}.reinforce.opo:Opo", GroupPpoOptions, "a reward against its group's mean by answer length"
)
REINFORCE_PP = Plugin(
    f"{_HERE}.reinforce.reinforce_pp:ReinforcePp",
    ReinforcePpOptions,
    "returns whitened over the batch, without groups",
)
REINFORCE_PP_BASELINE = Plugin(
    f"{_HERE}.reinforce.reinforce_pp:ReinforcePpBaseline",
    GroupRewardedOptions,
    "group-centred rewards whitened over the batch",
)
PPO = Plugin(
    f"{_HERE}.ppo:Ppo",
    ActorCriticOptions,
    "generalised advantages of a critic: a value head or a model of its own",
)
GSPO = Plugin(f"{_HERE}.group_relative.gspo:Gspo", GspoOptions, "GRPO with one ratio for each answer")
GMPO = Plugin(
    f"{_HERE}.group_relative.gmpo:Gmpo",
    GmpoOptions,
    "GRPO with the geometric mean of an answer's clipped ratios",
)
CISPO = Plugin(
    f"{_HERE}.group_relative.cispo:Cispo",
    CispoOptions,
    "GRPO whose clip bounds a token's weight, not its gradient",
)
SAPO = Plugin(f"{_HERE}.group_relative.sapo:Sapo", SapoOptions, "GRPO with a soft gate in place of the clip")
GPG = Plugin(f"{_HERE}.reinforce.gpg:Gpg", GpgOptions, "group-centred rewards without a ratio and a clip")
REINFORCE = Plugin(
    f"{_HERE}.reinforce.reinforce:Reinforce", RewardedOptions, "raw rewards, without a baseline"
)
REMAX = Plugin(
    f"{_HERE}.reinforce.remax:Remax", RewardedOptions, "a reward against that of the prompt's greedy answer"
)
DISTILL = Plugin(
    f"{_HERE}.distill:Distill", PpoOptions, "on-policy distillation from the teacher trainer.reference"
)
CLIP_COV = Plugin(
    f"{_HERE}.group_relative.clip_cov:ClipCov", ClipCovOptions, "GRPO without a few tokens of high covariance"
)
KL_COV = Plugin(
    f"{_HERE}.group_relative.clip_cov:KlCov",
    KlCovOptions,
    "GRPO whose tokens of highest covariance stay near the old policy",
)
