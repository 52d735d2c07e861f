"""The sections of a run that reach the trainer, as typed and frozen configs. Knows no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from headrace_modelkit.config import ModelConfig
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


class Section(BaseModel):
    """A part of the config; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingConfig(Section):
    """The distribution that answers were drawn from; the trainer scores under the same one."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: PositiveFloat = 1.0
    max_new_tokens: PositiveInt = 64
    stop: list[str] = Field(default_factory=list)


class AlgorithmConfig(Section):
    """How rewards become a gradient."""

    name: str = "grpo"
    group_size: PositiveInt = 8
    prompts_per_step: PositiveInt = 4
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    normalize_std: bool = True
    loss_aggregation: Aggregation = "token-mean"
    truncated: Literal["keep", "mask"] = "keep"
    importance_cap: PositiveFloat | None = None
    max_staleness: Count = 0


class ScheduleConfig(Section):
    """The learning rate over steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    total_steps: PositiveInt | None = None
    final_fraction: Fraction = 0.0


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: PositiveFloat = 1.0
    schedule: ScheduleConfig = ScheduleConfig()


class WarmupConfig(Section):
    """Supervised steps on reference answers before the first RL step."""

    steps: Count = 0
    lr: PositiveFloat = 1e-3
    batch: PositiveInt = 64


class BackendConfig(Section):
    """The `trainer` section: which backend, how it packs and what it keeps in memory."""

    backend: str = "fsdp"
    ranks: PositiveInt = 1
    micro_batch_tokens: PositiveInt = 2048
    gradient_checkpointing: bool = False
    warmup: WarmupConfig = WarmupConfig()
    shared_prefix: bool | None = Field(
        default=None,
        description="compute a group's common beginning once, exactly; default: where the model's attention can, "
        "true: refuse another model",
    )
    reshard_micro_batches: bool = Field(
        default=False,
        description="reduce and reshard after every micro-batch: less memory, more communication",
    )


class CheckpointConfig(Section):
    """Durability. When to save is the coordinator's choice; how many to keep is ours."""

    interval_steps: Count = 0
    time_budget: Annotated[float, Field(gt=0, le=1)] = 0.05
    max_interval_s: PositiveFloat = 600.0
    keep: PositiveInt = 2
    enabled: bool = True


class WarmupExample(Section):
    """One reference answer: a prompt as the rollout renders it, and what should follow."""

    chat: list[dict[str, str]] | None = None
    text: str | None = None
    prefill: str = ""
    answer: str

    @model_validator(mode="after")
    def _one_prompt(self) -> WarmupExample:
        if (self.chat is None) == (self.text is None):
            raise ValueError("warmup_examples: give exactly one of chat and text")
        return self


class TrainerConfig(Section):
    """Everything OpenRun says."""

    model: ModelConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: BackendConfig = BackendConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: int = 0
    steps: PositiveInt = 10
    deterministic: bool = False
    warmup_examples: list[WarmupExample] = Field(default_factory=list)

    @model_validator(mode="after")
    def _combinations(self) -> TrainerConfig:
        sampling = self.sampling
        if sampling.top_p < 1 or sampling.top_k or sampling.min_p or sampling.repetition_penalty != 1:
            raise ValueError(
                "sampling.top_p / top_k / min_p / repetition_penalty: the kept set does not travel, so "
                "log-probs under truncated sampling cannot be compared; set top_p: 1, top_k: 0, min_p: 0, "
                "repetition_penalty: 1"
            )
        if self.trainer.warmup.steps and not self.warmup_examples:
            raise ValueError(
                "trainer.warmup.steps: warm-up needs reference answers, and warmup_examples is empty; "
                "set trainer.warmup.steps: 0 or use a data source that has answers"
            )
        return self
