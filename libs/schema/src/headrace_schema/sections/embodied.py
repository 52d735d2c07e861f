"""The section of what robots act in, and of what language models speak with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from headrace_schema.sections.base import (
    FEW,
    MANY,
    Count,
    CountOrZero,
    Helpers,
    Seconds,
    Section,
    Thousands,
    Tokens,
    VariableName,
)


class RoleSection(Section):
    """Who plays a role of a conversation: the policy, another one that learns, or a frozen model."""

    path: str = Field(
        default="",
        description="local directory or Hugging Face id of a frozen model that plays it, such as what another run "
        "exported; empty: the policy does",
    )
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    policy: str = Field(
        default="",
        description="which of `policies` plays it, and learns from it; empty: the run's own policy",
    )
    learns: bool = Field(
        default=True,
        description="whether the policy learns from this role's turns; a frozen model's are never learned from",
    )
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="of a role that is not learned from; default: sampling.temperature"
    )
    max_new_tokens: Tokens | None = Field(
        default=None, description="of a role that is not learned from; default: sampling.max_new_tokens"
    )
    stop: list[str] | None = Field(
        max_length=FEW,
        default=None,
        description="texts that end a turn of a role that is not learned from; default: sampling.stop",
    )
    own_devices: bool = Field(
        default=False,
        description="whether a frozen model has its own devices in each rollout instance (the same number as the "
        "policy's engine), or shares that one's",
    )

    @property
    def trained(self) -> bool:
        """Whether its turns are learned from."""
        return self.learns and not self.path


class VideosSection(Section):
    """Which training episodes are recorded: their pictures, beside actions and rewards."""

    every: Count = Field(default=10, description="record every N-th step, and the first")
    starts: Count = Field(
        default=1,
        description="start states of such a step that are recorded, each with all episodes of its group",
    )
    mib: Count = Field(default=256, description="room of a run's videos; beyond it the oldest are removed")


class EnvironmentSection(Section):
    """The environments of an embodied or agentic run, which simulator instances hold."""

    backend: str = Field(
        default="gymnasium",
        description="name in the simulator's registry: gymnasium, metaworld, maniskill, libero, isaaclab; of an "
        "agentic run: conversation, or a plug-in's, such as container, openenv, nemo_gym and web",
    )
    tasks: list[str] = Field(
        min_length=1,
        max_length=MANY,
        description="names of environments in the backend, or a file of one's own: path/to/file.py:NAME",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the environment")
    env: list[VariableName] = Field(
        max_length=FEW,
        default_factory=list,
        description="variables of the simulator's environment that environments, tools and agents get; without it they "
        "get none that holds a secret",
    )
    variants: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        max_length=MANY,
        description="variants by name, each as `options.variant` says one: TASK@NAME among the tasks is the task in it",
    )
    count: Thousands = Field(default=16, description="environments at work, over all tasks and simulators")
    alternating: Thousands = Field(
        default=2,
        description="parts that a rollout's environments are split into: the policy acts for one while the others are "
        "simulated",
    )
    max_episode_steps: CountOrZero = Field(
        default=0,
        description="actions after which an episode is cut, or turns after which a conversation is; 0: the "
        "environment's own limit",
    )
    horizon: CountOrZero = Field(
        default=0,
        description="actions of an episode that a slot has at most: the rest is worth what the critic says, and the "
        "environment goes on with the episode in the next slot that it takes, in place of that one's start state; 0: "
        "whole episodes",
    )
    max_episode_s: NonNegativeFloat = Field(
        default=0.0,
        description="seconds after which a conversation, or an agent, is cut; 0: no limit; default with agent: 600",
    )
    max_episode_tokens: CountOrZero = Field(
        default=0,
        description="tokens that the policy may sample in a conversation, or an agent's session; the turn that reaches "
        "them is its last one; 0: no limit",
    )
    on_overflow: Literal["end", "truncate", "summarise"] = Field(
        default="end",
        description="of a conversation whose context is nearly full: it ends, or goes on in a new branch with its "
        "beginning and the newest turns that fit half of it (truncate), or with a summary that the policy writes then, "
        "as a turn that is learned (summarise)",
    )
    reward: Literal["default", "dense", "sparse"] = Field(
        default="default", description="reward of a step; sparse: 1 where the task succeeds"
    )
    stop_on_success: bool = Field(
        default=False, description="an episode ends with its first success, as if by itself"
    )
    step_timeout_s: Seconds = Field(
        default=30.0, description="limit of one action or turn; beyond it the environment is made anew"
    )
    processes: Helpers = Field(default=0, description="child processes of a pool; 0: the simulator's choice")
    vectorized: bool = Field(
        default=False,
        description="the environments of a process are stepped in one call, as simulators on a GPU are; there is then "
        "one process, unless `processes` says more, and `alternating` is best the same number",
    )
    state: list[str] | None = Field(
        default=None,
        max_length=MANY,
        description="observations that are the policy's state, one after the other; default: all that are no images",
    )
    cameras: dict[str, str] | None = Field(
        max_length=FEW,
        default=None,
        description="observation by camera as the policy calls it; default: all images, by their own names",
    )
    instructions: dict[str, str] = Field(
        max_length=MANY,
        default_factory=dict,
        description="what a task asks for, in words, by task; default: what the environment says",
    )
    videos: VideosSection | None = Field(
        default=None,
        description="training episodes that are recorded, to be watched in the dashboard; default: none",
    )

    rewritten_turns: Literal["refuse", "append"] = Field(
        default="refuse",
        description="of an agentic run whose chat template rewrites earlier turns once another one follows: refuse it, "
        "or append to what was sampled, which then stays in the context as it is",
    )

    roles: dict[str, RoleSection] = Field(
        default_factory=dict,
        max_length=FEW,
        description="of an agentic run whose environment has roles: who plays them, by role; default: the policy plays "
        "all, and learns from each",
    )

    def variant_of(self, task: str) -> tuple[str, str]:
        """The task as the backend names it, and its variant; "" for none."""
        name, _, variant = task.rpartition("@")
        return (name, variant) if name and variant in self.variants else (task, "")

    def options_of(self, task: str) -> dict[str, Any]:
        """The options of a task's environment."""
        _, variant = self.variant_of(task)
        return {**self.options, "variant": self.variants[variant]} if variant else self.options

    def instruction_of(self, task: str) -> str:
        """What the spec says that a task asks for; a variant's own words go first."""
        name, _ = self.variant_of(task)
        return self.instructions.get(task) or self.instructions.get(name, "")
