"""What OpenRun tells each service: the sections that it reads. The coordinator writes it, the service parses it.

The reward service reads `RewardSection` as it is.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from headrace_schema.images import Kind
from headrace_schema.sections.agent import AgentSection
from headrace_schema.sections.base import Count, CountOrZero, Section, Seed, Tokens
from headrace_schema.sections.embodied import EnvironmentSection, RoleSection
from headrace_schema.sections.generating import ModelSection, PromptSection, RolloutSection, SamplingSection
from headrace_schema.sections.learning import (
    AlgorithmSection,
    CheckpointSection,
    DraftSection,
    OptimizerSection,
    TrainerSection,
)
from headrace_schema.sections.policies import PolicySection, adapters_of
from headrace_schema.sections.running import PlacementSection
from headrace_schema.sections.weights import WeightsSection
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import WorkflowChoice


class Opening(Section):
    """A part of a run's spec."""

    @classmethod
    def of(cls, spec: RunSpec, **more: Any) -> Self:
        """The keys that this part shares with the spec, and `more` of its own; raises ValidationError."""
        shared = {key: getattr(spec, key) for key in cls.model_fields if key in RunSpec.model_fields}
        return cls.model_validate({**shared, **more})


class RolloutConfig(Opening):
    """What a rollout instance reads."""

    model: ModelSection
    workflow: WorkflowChoice = "reasoning"
    environment: EnvironmentSection | None = None
    policies: dict[str, PolicySection] = Field(default_factory=dict)
    agent: AgentSection | None = None
    endpoint_key: str = ""
    """Of an online run: what its clients show."""
    sampling: SamplingSection = SamplingSection()
    group_size: Count = 1
    agent_rewards: bool = False
    """Some scorer takes the agent's own reward: a session that ends without one has failed."""
    prompt: PromptSection = PromptSection()
    """How a conversation's messages become a prompt: `chat` and `template_arguments` of data.prompt."""
    rollout: RolloutSection = RolloutSection()
    weights: WeightsSection = WeightsSection()
    routed_experts: bool = False
    """Trajectories carry the experts that their tokens were sent to."""
    longest_prompt: Tokens | None = None
    """Samples of a longer one, in tokens, end at once; held-out ones do not."""
    images: tuple[Kind, ...] = ()
    """What images, videos or sounds prompts have."""
    raw_texts: bool = False
    """Trajectories carry their texts with special tokens: some scorer reads them."""
    adapters: dict[str, Count] = Field(default_factory=dict)
    """Rank of each policy's adapters, by its name ("" is the run's own), with rollout.enable_lora; else none."""
    draft: DraftSection | None = None
    """The head whose weights are among the model's."""
    teacher: ModelSection | None = None
    """A frozen model that reads finished answers: they carry its `teacher_top` likeliest words for each token."""
    teacher_top: CountOrZero = 0
    seed: Seed = 0
    deterministic: bool = False
    """Log-probs have the trainer's bits."""

    @classmethod
    def of(cls, spec: RunSpec, **more: Any) -> Self:
        if spec.teacher_top:
            more |= {"teacher": spec.trainer.reference, "teacher_top": spec.teacher_top}
        found = adapters_of(spec.model, spec.trainer, spec.policies) if spec.rollout.enable_lora else {}
        ranks = {name: lora.rank for name, lora in found.items()}
        return super().of(spec, adapters=ranks, draft=spec.trainer.draft, **more)


def policy_model(model: ModelSection, policy: PolicySection) -> ModelSection:
    """The model of a policy that learns beside the run's own one."""
    return policy.model or model


def role_model(model: ModelSection, role: RoleSection) -> ModelSection:
    """The frozen model that plays a role of a conversation."""
    return model.model_copy(update={"path": role.path, "revision": role.revision, "gguf_file": None})


class GivenAnswer(Section):
    """An answer that the data gives: a prompt as the rollout renders it, and what should follow."""

    chat: list[dict[str, Any]] | None = None
    text: str | None = None
    prefill: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    answer: str
    turn: dict[str, Any] | None = None
    """The answer as a message, where it is more than a text: one that calls tools."""
    steps: list[str] = Field(default_factory=list)
    """Of which the answer is made, where each of them is judged."""
    labels: list[float] = Field(default_factory=list)
    """Of the steps: 1 for a good one, 0 for a bad one."""
    images: list[str] = Field(default_factory=list)
    """Files in base64, in the order of their marks in the chat; in a trajectory their digests."""

    @model_validator(mode="after")
    def _one_prompt(self) -> GivenAnswer:
        if (self.chat is None) == (self.text is None):
            raise ValueError("warmup_examples: give exactly one of chat and text")
        return self


class TrainerConfig(Opening):
    """What a trainer instance reads. When to checkpoint is the coordinator's choice; how many to keep is not."""

    model: ModelSection
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    sampling: SamplingSection = SamplingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    placement: PlacementSection = PlacementSection()
    weights: WeightsSection = WeightsSection()
    policies: dict[str, PolicySection] = Field(default_factory=dict)
    played: dict[str, str] = Field(default_factory=dict)
    """Which of `policies` plays a role, by role."""
    seed: Seed = 0
    steps: Count = 10
    deterministic: bool = False
    installed: bool = True
    """Somebody takes the versions that are made; else their digests are made alone, and none of their bytes kept."""
    warmup_examples: list[GivenAnswer] = Field(default_factory=list)
    sees: bool = True
    """Prompts may have images, videos or sounds; without any, a model is trained as its language part alone is."""
    files: tuple[Kind, ...] = ()
    """Which of these they have; none where that is not known."""
    instruction: str = "{question}"
    """How the task of a demonstration is rendered for a policy that reads language."""

    @classmethod
    def of(cls, spec: RunSpec, **more: Any) -> Self:
        if (
            spec.rollout.enable_lora
        ):  # whole weights have no adapters to compute with: it says so as the run opens
            more["weights"] = spec.weights.model_copy(update={"lora": "adapter"})
        more["installed"] = spec.generates or spec.trainer.helpers > 0
        if spec.trains_robots and spec.has_given_answers:  # what a warm-up says of its demonstrations
            options = spec.data.options
            told: dict[str, Any] = spec.trainer.warmup.model_dump() | {
                "demonstrations": options.get("path", "")
            }
            told |= {key: options[key] for key in ("cameras", "fps", "cache_mib") if key in options}
            more["trainer"] = spec.trainer.model_dump() | {"warmup": told}
        return super().of(spec, played=spec.played, **more)

    def of_policy(self, name: str) -> TrainerConfig:
        """As one of `policies` is trained; "" is the run's own."""
        if not name:
            return self.model_copy(update={"policies": {}, "played": {}})
        section, more = self.policies[name], dict[str, Any]()
        if section.algorithm is not None:
            own = {"name": section.algorithm.name, "options": section.algorithm.options}
            more["algorithm"] = self.algorithm.model_copy(update=own)
        if section.trainer is not None:
            own = {key: getattr(section.trainer, key) for key in type(section.trainer).model_fields}
            more["trainer"] = self.trainer.model_copy(update=own)
        if section.optimizer is not None:
            more["optimizer"] = section.optimizer
        model = policy_model(self.model, section)
        return self.model_copy(update={**more, "model": model, "policies": {}, "played": {}})

    def adapter_scales(self) -> dict[str, float]:
        """alpha / rank of each policy's adapters, by its name, where all are of one base; else none."""
        found = adapters_of(self.model, self.trainer, self.policies)
        return {name: lora.alpha / lora.rank for name, lora in found.items()}
