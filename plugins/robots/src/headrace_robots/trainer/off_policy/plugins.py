"""The algorithms that learn off policy, with their options. Knows no torch: options are read before a run starts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from headrace_servicekit.registry import Options, Plugin
from headrace_trainer.algorithms.plugins import OFF_POLICY, Count
from pydantic import Field, PositiveFloat, model_validator

from headrace_robots.trainer.algorithms.plugins import ScoreOptions

PERSON = "person"
"""In place of an expert's directory: who intervenes at a real robot."""
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1)]


class ReplayOptions(Options):
    """What every algorithm that learns off policy takes."""

    capacity: Annotated[int, Field(ge=2)] = Field(
        default=1_000_000,
        description="chunks of actions that the replay store keeps, over all ranks, one more for each episode; beyond "
        "it the oldest episodes go",
    )
    draws: Literal["uniform", "prioritised", "recent"] = Field(
        default="uniform",
        description="which chunks are learned from: all alike, those with the largest temporal differences more often, "
        "or the newest more often",
    )
    priority_exponent: Share = Field(
        default=0.6, description="of prioritised draws: 0 draws all alike, 1 in proportion to the difference"
    )
    importance_exponent: Share = Field(
        default=0.4,
        description="of prioritised draws: how far their weights make up for being drawn more often",
    )
    recency: Annotated[float, Field(ge=1)] = Field(
        default=2.0,
        description="of recent draws: 1 draws all alike; 2 draws the newer half in 71 of 100 draws",
    )
    batch_size: Count = Field(default=256, description="transitions of an optimizer step, over all ranks")
    updates_per_action: NotNegative = Field(
        default=1.0,
        description="optimizer steps for each chunk of actions that was added: the update-to-data ratio, which holds "
        "over the whole run",
    )
    learning_starts: Annotated[int, Field(ge=0)] = Field(
        default=100,
        description="chunks of the run before its first optimizer step, for which none is made later",
    )
    demonstrations_share: Share = Field(
        default=0.0,
        description="share of each batch that is drawn from trainer.warmup.demonstrations; 0.5 is half and half",
    )
    reward_scale: PositiveFloat = Field(default=1.0, description="factor of the rewards")


class ValueOptions(ReplayOptions, ScoreOptions):
    """What those that learn values take."""

    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.99, description="discount of the reward from chunk to chunk"
    )
    n_step: Annotated[int, Field(ge=1, le=100)] = Field(
        default=1, description="chunks whose rewards a target has before the next value"
    )
    critic_hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        default=(256, 256), description="units of each layer of a critic"
    )
    layer_norm: bool = Field(default=False, description="normalise each layer of a critic")
    critic_lr: PositiveFloat | None = Field(
        default=None, description="learning rate of the critics; none: optimizer.lr"
    )


class CriticOptions(ValueOptions):
    """What those with critics of actions take."""

    critics: Annotated[int, Field(ge=1, le=100)] = Field(
        default=2, description="critics that learn side by side"
    )
    least_of: Annotated[int, Field(ge=1, le=100)] = Field(
        default=2, description="critics, drawn anew for each batch, of whose targets the least is taken"
    )
    tau: Rate = Field(default=0.005, description="how far the target networks follow at each update")
    actor_every: Count = Field(default=1, description="updates of the critics for one of the policy")

    @model_validator(mode="after")
    def _some_of_them(self) -> Self:
        if self.least_of > self.critics:
            raise ValueError(f"least_of: {self.least_of} of {self.critics} critics; give at most critics")
        return self


class SacOptions(CriticOptions):
    """`algorithm.options` of sac."""

    temperature: Literal["auto"] | PositiveFloat = Field(
        default="auto",
        description="weight of the entropy; auto: it is learned, so that the entropy is target_entropy",
    )
    first_temperature: PositiveFloat = Field(default=1.0, description="with auto: what it begins with")
    target_entropy: float | None = Field(
        default=None,
        description="with auto, in nats; none: minus the numbers of a chunk's actions, or of categories 0.6 times the "
        "largest there can be",
    )
    actor_critics: Literal["least", "mean"] = Field(
        default="least", description="what of the critics' values the policy raises"
    )


class RlpdOptions(SacOptions):
    """`algorithm.options` of rlpd: the paper's."""

    critics: Annotated[int, Field(ge=1, le=100)] = Field(
        default=10, description=CriticOptions.model_fields["critics"].description
    )
    layer_norm: bool = Field(default=True, description=CriticOptions.model_fields["layer_norm"].description)
    demonstrations_share: Share = Field(
        default=0.5, description=ReplayOptions.model_fields["demonstrations_share"].description
    )
    updates_per_action: NotNegative = Field(
        default=20.0, description=ReplayOptions.model_fields["updates_per_action"].description
    )
    actor_every: Count = Field(default=20, description=CriticOptions.model_fields["actor_every"].description)
    actor_critics: Literal["least", "mean"] = Field(
        default="mean", description=SacOptions.model_fields["actor_critics"].description
    )


class CrossQOptions(SacOptions):
    """`algorithm.options` of crossq: the paper's. There are no target networks."""

    critic_hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        default=(1024, 1024), description=CriticOptions.model_fields["critic_hidden"].description
    )
    actor_every: Count = Field(default=3, description=CriticOptions.model_fields["actor_every"].description)
    norm_momentum: Rate = Field(
        default=0.01, description="how far a critic's batch statistics follow a batch"
    )
    norm_warmup: Annotated[int, Field(ge=0)] = Field(
        default=100_000,
        description="updates before batches are renormalised by the statistics that are followed",
    )


class Td3BcOptions(CriticOptions):
    """`algorithm.options` of td3_bc."""

    actor_every: Count = Field(default=2, description=CriticOptions.model_fields["actor_every"].description)
    bc_alpha: PositiveFloat | None = Field(
        default=2.5,
        description="weight of the critic's value against the imitation of the actions in the store; none: no "
        "imitation, which is TD3",
    )
    target_noise: NotNegative = Field(default=0.2, description="width of the noise in the target's actions")
    target_noise_clip: NotNegative = Field(default=0.5, description="most noise in the target's actions")


class IqlOptions(CriticOptions):
    """`algorithm.options` of iql."""

    expectile: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.7, description="of the values: above 0.5 they lean to the best actions of the store"
    )
    inverse_temperature: NotNegative = Field(
        default=3.0, description="how much more an action with a larger advantage is imitated; 0: all alike"
    )
    most_weight: PositiveFloat = Field(default=100.0, description="largest weight of an action")


class DaggerOptions(ReplayOptions):
    """`algorithm.options` of dagger."""

    expert: str = Field(
        default="",
        description="directory of a policy, where the trainer runs, whose actions are imitated in what the policy saw; "
        "person: what whoever intervened at a real robot did, and nothing else (HG-DAgger)",
    )


class CloningOptions(ReplayOptions, ScoreOptions):
    """`algorithm.options` of success_cloning."""

    weigh: Literal["success", "return"] = Field(
        default="success",
        description="whose actions are imitated: of episodes that succeeded, or of all, those of larger returns more",
    )
    inverse_temperature: PositiveFloat = Field(
        default=1.0,
        description="with return: an episode weighs exp of this times its return's distance from the mean, in standard "
        "deviations",
    )

    @model_validator(mode="after")
    def _scores_are_read(self) -> Self:
        if self.score != "none" and self.weigh == "success":
            raise ValueError(
                f"score: {self.score} changes rewards, and weigh: success reads none; set weigh: return"
            )
        return self


class RecapOptions(ValueOptions):
    """`algorithm.options` of recap."""

    n_step: Annotated[int, Field(ge=1, le=100)] = Field(
        default=10, description="chunks whose rewards an advantage has before the next value"
    )
    better_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.4,
        description="share of the policy's own actions in a batch that count as better than most: those of the largest "
        "advantages; demonstrations and what a person did always do",
    )
    dropped_share: Share = Field(
        default=0.3,
        description="share of a batch of which the policy is told nothing, so that it can be guided",
    )


_HERE = "headrace_robots.trainer.off_policy.algorithm"
SAC = Plugin(
    f"{_HERE}:Sac",
    SacOptions,
    "soft actor-critic: off policy, from the replay store, with a temperature that keeps the entropy",
    features=OFF_POLICY,
)
RLPD = Plugin(
    f"{_HERE}:Rlpd",
    RlpdOptions,
    "soft actor-critic with an ensemble, layer norm, many updates, and half of each batch from demonstrations",
    features=OFF_POLICY,
)
CROSSQ = Plugin(
    f"{_HERE}:CrossQ",
    CrossQOptions,
    "soft actor-critic without target networks: critics normalise a batch and what follows it together",
    features=OFF_POLICY,
)
TD3_BC = Plugin(
    f"{_HERE}:Td3Bc",
    Td3BcOptions,
    "a deterministic policy that raises its critic's value and imitates the store; TD3 without the imitation",
    features=OFF_POLICY,
)
IQL = Plugin(
    f"{_HERE}:Iql",
    IqlOptions,
    "implicit Q-learning: values of the store's own actions, of which the better ones are imitated more",
    features=OFF_POLICY,
)
DAGGER = Plugin(
    f"{_HERE}:Dagger",
    DaggerOptions,
    "imitates what an expert policy would have done in what the policy saw",
    features=OFF_POLICY,
)
SUCCESS_CLONING = Plugin(
    f"{_HERE}:SuccessCloning",
    CloningOptions,
    "imitates the policy's own episodes that succeeded, or all by their returns, and demonstrations",
    features=OFF_POLICY,
)
RECAP = Plugin(
    f"{_HERE}:Recap",
    RecapOptions,
    "imitates everything, told by a value function which actions were better than most; acts as told so",
    features=OFF_POLICY,
)
