"""The run spec: what a user submits, as typed sections.

Validates shapes and combinations that need no fleet. What only the fleet knows (which scorers,
engines and devices exist) is checked at submission by `admission`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from headrace_schema.problems import Impossible
from headrace_schema.spec_rules import impossible_combinations

# Strict: `true` and "8" are no numbers. Bounded: every count fits the wire's int32 (bytes: int64).
Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**48)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the spec; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The policy: a Hugging Face id or a local directory (read by rollout and trainer)."""

    path: str = Field(description="Hugging Face id or local directory of the model")
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    gguf_file: str | None = Field(
        default=None, description="GGUF file inside the directory, dequantised on load"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="type of the forward pass in both services"
    )
    max_context: Count | None = Field(
        default=None, description="context limit in tokens; default: the model's own"
    )


class PromptSection(Section):
    """How a data item becomes a prompt. Text fields may use {question} and the item's other fields."""

    template: str = Field(default="{question}", description="text of the prompt (the user's turn of a chat)")
    system: str | None = Field(default=None, description="system message of the chat")
    chat: bool = Field(
        default=True, description="use the tokenizer's chat template; false feeds the text as it is"
    )
    prefill: str = Field(
        default="", description="text that begins the assistant's answer and counts as prompt"
    )


class DataSection(Section):
    """Where prompts come from."""

    source: str = Field(description="name of a data source: reasoning_gym, jsonl, copy_digits")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the source")
    prompt: PromptSection = PromptSection()
    heldout: CountOrZero = Field(default=0, description="items set aside for evaluation, never trained")
    heldout_seed: Seed = Field(
        default=1, description="seed of the choice of held-out items; independent of `seed`"
    )
    exclude: list[str] = Field(
        default_factory=list, description="questions kept out of both parts (few-shot examples)"
    )


class SamplingSection(Section):
    """The distribution that answers are drawn from."""

    temperature: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="divides the logits; log-probs are of the divided ones"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="refused unless 1: the kept set does not travel"
    )
    top_k: CountOrZero = Field(default=0, description="refused unless 0")
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="refused unless 0")
    repetition_penalty: PositiveFloat = Field(default=1.0, description="refused unless 1")
    max_new_tokens: Count = Field(default=64, description="longest answer in tokens")
    stop: list[str] = Field(default_factory=list, description="texts that end an answer and are cut off")


class AlgorithmSection(Section):
    """How rewards become a gradient."""

    name: str = Field(default="grpo", description="name in the trainer's registry")
    group_size: Count = Field(default=8, description="samples of one prompt")
    prompts_per_step: Count = Field(default=4, description="groups of one step")
    clip_low: PositiveFloat = Field(
        default=0.2, description="the probability ratio is clipped below at 1 - clip_low"
    )
    clip_high: PositiveFloat = Field(default=0.2, description="and above at 1 + clip_high")
    normalize_std: bool = Field(
        default=True, description="divide group-centred rewards by their standard deviation"
    )
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = Field(
        default="token-mean", description="what tokens and sequences weigh in the loss"
    )
    truncated: Literal["keep", "mask"] = Field(
        default="keep", description="answers cut by the length limit: train or mask"
    )
    importance_cap: PositiveFloat | None = Field(
        default=None,
        description="cap of the truncated importance weight trainer/engine per token; none: no correction",
    )
    max_staleness: Literal[0] = Field(default=0, description="steps that a sample may lag behind its base")


class ScheduleSection(Section):
    """The learning rate over steps."""

    name: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="shape after the warm-up"
    )
    warmup_steps: CountOrZero = Field(default=0, description="steps of a linear rise from 0")
    total_steps: Count | None = Field(
        default=None, description="steps until the final rate; default: the run's steps"
    )
    final_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="final rate as a share of lr"
    )


class OptimizerSection(Section):
    """AdamW."""

    lr: PositiveFloat = Field(default=1e-6, description="learning rate at the peak")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="decay of the first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="decay of the second moment")
    eps: PositiveFloat = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="decoupled weight decay")
    grad_clip: PositiveFloat = Field(default=1.0, description="largest norm of a step's gradient")
    schedule: ScheduleSection = ScheduleSection()


class WarmupSection(Section):
    """Supervised steps on reference answers before the first RL step; reported as such."""

    steps: CountOrZero = Field(default=0, description="supervised steps")
    lr: PositiveFloat = Field(default=1e-3, description="learning rate of these steps")
    batch: Count = Field(default=64, description="examples of one such step")


class TrainerSection(Section):
    """The learning side."""

    backend: str = Field(default="fsdp", description="name in the trainer's registry")
    ranks: Count = Field(default=1, description="ranks of the gang, one trainer instance each")
    micro_batch_tokens: Count = Field(default=2048, description="most tokens of one packed forward")
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, more time"
    )
    shared_prefix: bool = Field(
        default=True,
        description="compute a group's common beginning once, exactly, where attention allows it",
    )
    warmup: WarmupSection = WarmupSection()


class RolloutSection(Section):
    """The generating side."""

    engine: str = Field(default="transformers", description="name in the rollout's registry")
    instances: Count = Field(default=1, description="rollout instances the run takes")
    max_concurrency: Count = Field(default=64, description="sequences decoded together by one instance")
    chunk_tokens: CountOrZero = Field(default=0, description="tokens of a streamed chunk; 0: whole answers")


class ScorerSection(Section):
    """One scorer with its weight."""

    name: str = Field(description="a built-in scorer, or path/to/file.py:function")
    weight: float = Field(default=1.0, description="factor of its score; 0: shown, not counted")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the scorer")


class RewardSection(Section):
    """What answers are worth."""

    scorers: list[ScorerSection] = Field(
        min_length=1, description="the reward is the sum of weights times scores"
    )
    evaluation: list[ScorerSection] = Field(
        default_factory=list, description="scorers of held-out answers; default: the same scorers"
    )
    timeout_s: PositiveFloat = Field(
        default=5.0, description="limit of one answer; beyond it the answer failed"
    )
    failed_reward: float = Field(
        default=0.0, description="reward of an answer that makes a scorer fail or run out of time"
    )
    truncated_reward: float | None = Field(
        default=None, description="reward of answers cut by the length limit; none: scored"
    )


class PlacementSection(Section):
    """Which devices generate and learn. Names as `headrace instances` shows them, without the host."""

    mode: Literal["collocated", "disaggregated"] = Field(
        default="collocated", description="take turns on the same devices, or side by side, streamed"
    )
    rollout: list[str] = Field(
        default_factory=list, description="devices that generate; default: by the mode"
    )
    trainer: list[str] = Field(default_factory=list, description="devices that learn; default: by the mode")


class EvaluationSection(Section):
    """Held-out evaluation."""

    every: CountOrZero = Field(default=0, description="steps between evaluations; 0: only first and last")
    greedy: bool = Field(default=True, description="the likeliest token each time; false samples")
    temperature: PositiveFloat = Field(default=1.0, description="temperature when not greedy")
    samples: Count = Field(default=1, description="answers a held-out prompt")
    max_new_tokens: Count | None = Field(default=None, description="default: as in sampling")
    baseline_prefill: str | None = Field(
        default=None, description="also evaluate the untrained model with its answer begun by this text"
    )


class CheckpointSection(Section):
    """Durability."""

    interval_steps: CountOrZero = Field(default=0, description="steps between checkpoints; 0: by time budget")
    time_budget: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.05, description="share of wall time for checkpoints"
    )
    max_interval_s: PositiveFloat = Field(default=600.0, description="longest time between checkpoints")
    keep: Count = Field(default=2, description="checkpoints kept")
    enabled: bool = Field(default=True, description="false: no checkpoints; a lost trainer then begins anew")


class LimitsSection(Section):
    """Bounds that fail a run rather than let it rot."""

    max_drop_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="share of slots that may be dropped"
    )
    step_timeout_s: PositiveFloat = Field(default=1800.0, description="longest time of one step")
    instance_timeout_s: PositiveFloat = Field(
        default=120.0, description="longest wait for an instance or a lease"
    )
    in_flight_bytes: Bytes = Field(
        default=64 * 1024 * 1024, description="bodies that the coordinator relays at once"
    )
    recoveries: Count = Field(
        default=20, description="recoveries without a finished step before the run fails"
    )


class RunSpec(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = Field(
        default="run", description="begins the run's id"
    )
    workflow: Literal["reasoning"] = Field(default="reasoning", description="the graph of stages")
    steps: Count = Field(default=10, description="policy updates")
    seed: Seed = Field(default=0, description="of the order of items and of all sampling")
    deterministic: bool = Field(
        default=False, description="same seed, same final weights, also over crashes; slower"
    )
    export: bool = Field(default=True, description="write the final weights as a Hugging Face directory")
    model: ModelSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection
    placement: PlacementSection = PlacementSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    limits: LimitsSection = LimitsSection()

    @property
    def slots_per_step(self) -> int:
        """B: slots of one step."""
        return self.algorithm.group_size * self.algorithm.prompts_per_step

    @model_validator(mode="after")
    def _combinations(self) -> RunSpec:
        problems = list(impossible_combinations(self))
        if problems:
            raise Impossible(problems)
        return self
