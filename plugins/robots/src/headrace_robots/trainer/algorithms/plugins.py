"""The algorithms of episodes with their options. Knows no torch: options are asked for before a run starts.

An option that an algorithm of answers has under the same name means the same here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from headrace_servicekit.registry import Options, Plugin
from headrace_trainer.algorithms.options import Aggregation
from headrace_trainer.algorithms.plugins import (
    OFF_POLICY,
    ActorCriticOptions,
    Count,
    GrpoOptions,
    PolicyOptions,
)
from pydantic import ConfigDict, Field, PositiveFloat, model_validator

KL = frozenset({"kl_loss_coef", "kl_estimator", "kl_target", "kl_horizon", "kl_reward_coef"})
CRITIC = frozenset({"critic", "critic_path", "bootstrap_truncated"})
NOT_HERE = KL | CRITIC
"""Options of answers' algorithms that episodes have not: no reference model, and the critic is the policy's own."""


def _without(schema: dict[str, Any]) -> None:
    for name in NOT_HERE:
        schema["properties"].pop(name, None)


class EpisodeOptions(PolicyOptions):
    """What every algorithm of episodes takes."""

    model_config = ConfigDict(json_schema_extra=_without)

    level: Literal["token", "action", "chunk"] = Field(
        default="action",
        description="what has one ratio: a number of an action, an action, or a chunk of actions",
    )
    minibatch_size: Count | None = Field(
        default=None,
        description="most chunks of a minibatch, in place of minibatches; drawn from all episodes of the step",
    )

    @property
    def several(self) -> bool:
        """Whether a commit makes several optimizer steps."""
        return super().several or self.minibatch_size is not None

    @model_validator(mode="before")
    @classmethod
    def _applies(cls, given: Any) -> Any:
        if isinstance(given, dict) and (other := sorted(NOT_HERE & given.keys())):
            reason = (
                "episodes are always worth what their critic says at a time limit"
                if other[0] == "bootstrap_truncated"
                else "the critic is the policy's own"
                if other[0] in CRITIC
                else "episodes are compared with no reference model"
            )
            raise ValueError(f"{other[0]}: is for answers; {reason}; leave it out")
        return given

    @model_validator(mode="after")
    def _one_split(self) -> Self:
        if self.minibatch_size is not None and "minibatches" in self.model_fields_set:
            raise ValueError("minibatches: give this or minibatch_size, not both")
        return self


class ScoreOptions(Options):
    """What algorithms take that learn from rewards of single actions."""

    score: Literal["none", "add", "replace"] = Field(
        default="none",
        description="what the scorers' reward of an episode does to the environment's rewards: nothing, it is added to "
        "that of the last action, or it is all that the last action earns, and the others earn nothing",
    )


class EpisodePpoOptions(EpisodeOptions, ScoreOptions, ActorCriticOptions):
    """`algorithm.options` of ppo for episodes."""

    ratio_options: ClassVar[frozenset[str]] = ActorCriticOptions.ratio_options

    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.99, description="discount of the reward from chunk to chunk"
    )
    lam: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.95, description="GAE's lambda: 1 trusts the rewards, 0 the next chunk's value"
    )
    whiten: bool = Field(default=True, description="whiten advantages over the batch's executed actions")
    reward_scale: PositiveFloat = Field(default=1.0, description="factor of the rewards")


class EpisodeGrpoOptions(EpisodeOptions, GrpoOptions):
    """`algorithm.options` of grpo for episodes."""

    ratio_options: ClassVar[frozenset[str]] = GrpoOptions.ratio_options

    until_success: bool = Field(
        default=True, description="learn from no action behind the first that succeeded"
    )


class ImitationOptions(Options):
    """`algorithm.options` of sft for robot policies."""

    loss_aggregation: Aggregation = Field(
        default="token-mean", description="what actions and moments weigh in the loss"
    )


_HERE = "headrace_robots.trainer.algorithms"
PPO = Plugin(
    f"{_HERE}.ppo:EpisodePpo",
    EpisodePpoOptions,
    "generalised advantages of the policy's critic, over chunks, with its value of what a time limit cut",
    features=OFF_POLICY,
)
GRPO = Plugin(
    f"{_HERE}.grpo:EpisodeGrpo",
    EpisodeGrpoOptions,
    "an episode's reward against the other episodes of its start state, without a critic",
    features=OFF_POLICY,
)
SFT = Plugin(
    "headrace_trainer.algorithms.supervised:Sft",
    ImitationOptions,
    "the policy's own imitation loss of demonstrations (workflow: supervised)",
)
