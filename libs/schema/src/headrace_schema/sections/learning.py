"""Sections of what learns: algorithm, optimizer, trainer, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PositiveFloat, Tag, model_validator

from headrace_schema.sections.base import (
    FEW,
    MANY,
    Count,
    CountOrZero,
    Helpers,
    Processes,
    Rate,
    Seconds,
    Section,
)
from headrace_schema.sections.generating import ModelSection


class AlgorithmSection(Section):
    """How rewards become a gradient."""

    name: str = Field(default="grpo", description="name in the trainer's registry")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the algorithm")
    group_size: Count = Field(default=8, description="samples of one prompt")
    prompts_per_step: Count = Field(default=4, description="groups of one step")
    truncated: Literal["keep", "mask"] = Field(
        default="keep", description="answers cut by the length limit: train or mask"
    )
    max_staleness: Annotated[int, Field(strict=True, ge=0, le=16)] = Field(
        default=0,
        description="policy versions that a token may lag behind the one that learns from it. 0: a step's answers are "
        "made by the version that it begins with. k: answers of the next k steps are made while a step is learned",
    )


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
    """How a step moves the weights."""

    name: Literal["adamw", "adamw_8bit", "muon"] = Field(
        default="adamw",
        description="adamw; adamw_8bit: with the moments of matrices in a byte each, a quarter of the memory; "
        "muon: hidden matrices step in orthogonal directions, with one fp32 moment, and embeddings, heads and "
        "vectors as with adamw",
    )
    lr: Rate = Field(default=1e-6, description="learning rate at the peak")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, description="decay of muon's moment of a matrix"
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="decay of the first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="decay of the second moment")
    eps: PositiveFloat = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="decoupled weight decay")
    grad_clip: PositiveFloat = Field(default=1.0, description="largest norm of a step's gradient")
    schedule: ScheduleSection = ScheduleSection()


class WarmupSection(Section):
    """Supervised steps before the first RL step, on reference answers or on demonstrations; reported as such."""

    steps: CountOrZero = Field(default=0, description="supervised steps")
    lr: Rate = Field(default=1e-3, description="learning rate of these steps")
    batch: Count = Field(
        default=64, description="examples of one such step: answers, or moments of demonstrations"
    )
    demonstrations: str = Field(
        default="",
        description="directory of a LeRobot v3 data set, which a robot policy imitates; a language model learns from "
        "the answers of `data`",
    )
    episodes: CountOrZero = Field(
        default=0, description="demonstrations that are imitated, from the first on; 0: all"
    )
    cameras: dict[str, str] = Field(
        default_factory=dict,
        max_length=FEW,
        description="image feature of the demonstrations by camera of the policy, as {front: observation.images.top}; "
        "default: the one of the camera's own name",
    )
    fps: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="steps a second that demonstrations must have; 0: any, the policy acts at their rate",
    )
    cache_mib: Count = Field(
        default=2048,
        description="most memory for decoded pictures of demonstrations on each rank; others are decoded when drawn",
    )


LayerNames = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MANY)]


def _form(given: Any) -> str:
    return "<list>" if isinstance(given, list) else "<name>"


def _no_lone_name(given: Any) -> Any:
    if isinstance(given, str) and given != "all-linear":
        raise ValueError("a name alone is no list of names: put it in brackets, or write all-linear")
    return given


class LoraSection(Section):
    """LoRA: the model's weights are frozen, and adapters of low rank beside its linear layers learn."""

    rank: Count = Field(default=16, description="rank R of an adapter B·A")
    alpha: PositiveFloat = Field(default=32.0, description="an adapter counts alpha / rank times")
    targets: Annotated[
        Annotated[Literal["all-linear"], Tag("<name>")] | Annotated[LayerNames, Tag("<list>")],
        Discriminator(_form),
        BeforeValidator(_no_lone_name),
    ] = Field(
        default="all-linear",
        description="layers that get an adapter: all-linear (linear ones but the head), or a list of names: [q_proj, "
        "experts]",
    )
    quantization: Literal["nf4", "int8", "fp8"] | None = Field(
        default=None,
        description="frozen weights of linear layers with an adapter as codes with a scale for each 64, whole on each "
        "rank: nf4 (QLoRA) in half a byte, int8 and fp8 in one. They are decoded for each product, and the run's "
        "model is the decoded one; default: as they are",
    )


class DraftSection(Section):
    """A head that drafts tokens for the engine learns beside the policy, and is part of its versions."""

    form: Literal["eagle3", "mtp"] = Field(
        default="eagle3",
        description="eagle3: a head that reads three hidden states; mtp: the layer of the checkpoint itself that "
        "predicts one token more (DeepSeek V3, GLM-4.5, Qwen3-Next), which an export has under the checkpoint's names",
    )
    path: str | None = Field(
        default=None,
        description="Hugging Face id or local directory of a head that was made for this model, as vLLM and SpecForge "
        "read it; default: a new one of the shape of the model's layers",
    )
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    lr: PositiveFloat = Field(default=1e-4, description="learning rate of the head alone")
    unrolled: Annotated[int, Field(ge=1, le=8)] = Field(
        default=3,
        description="tokens one behind the other that it learns to draft from its own hidden states",
    )
    every: Count = Field(
        default=1,
        description="optimizer steps of which the head learns in one: its versions change as often, and an engine that "
        "takes changes alone is sent none of it in between",
    )

    @model_validator(mode="after")
    def _of_the_model(self) -> Self:
        if self.form == "mtp" and (self.path, self.revision) != (None, None):
            raise ValueError("path: a layer of form mtp is read from model.path; remove path and revision")
        return self


class TrainerSection(Section):
    """The learning side."""

    backend: str = Field(default="fsdp", description="name in the trainer's registry")
    ranks: Processes = Field(default=1, description="ranks of the trainer group, one trainer instance each")
    min_ranks: Processes | None = Field(
        default=None,
        description="a run that has lost trainers goes on with as few ranks as these; default: it waits for others",
    )
    max_ranks: Processes | None = Field(
        default=None,
        description="between two steps the trainer group takes free trainers up to this number of ranks; default: none",
    )
    helpers: Helpers = Field(
        default=0,
        description="trainer instances beside the group that help within a step: while the last answers decode, and "
        "in disaggregated placement until all is learned, devices that rollouts give back compute the gradient of "
        "whole groups",
    )
    micro_batch_tokens: Count = Field(default=2048, description="most tokens of one packed forward")
    gradient_checkpointing: bool | None = Field(
        default=None,
        description="recompute activations in the backward pass: less memory, more time; default: with fsdp where "
        "the model fits in no other way, with megatron never",
    )
    shared_prefix: bool | None = Field(
        default=None,
        description="compute a group's common beginning once, exactly; default: where the model's attention can, "
        "true: refuse another model",
    )
    reference: ModelSection | None = Field(
        default=None,
        description="frozen model that KL terms compare with, or the teacher of distillation; default: the run's "
        "initial policy",
    )
    freeze: list[str] | None = Field(
        max_length=MANY,
        default=None,
        description="parts of the model that do not learn and get no adapter: vision, the tower with its projection "
        "(vision-language models); vision, projector, language (openvla, openvla_oft); vision, language, expert "
        "(pi0, pi05, smolvla, groot, wall); vision, vae, transformer (act); vision, unet (diffusion); "
        "[]: everything learns; default: vision of a "
        "vision-language model, nothing of a robot policy",
    )
    lora: LoraSection | None = Field(
        default=None,
        description="train adapters of low rank and no other weight; {} takes the defaults; default: train all weights",
    )
    draft: DraftSection | None = Field(
        default=None,
        description="a head learns to draft tokens for the engine transformers; {} takes the defaults; default: none",
    )
    backend_options: dict[str, Any] = Field(default_factory=dict, description="options of the backend")
    warmup: WarmupSection = WarmupSection()

    @property
    def freezes_vision(self) -> bool:
        """Whether a vision-language model keeps its tower and projection as they were read."""
        return self.freeze is None or "vision" in self.freeze


class CheckpointSection(Section):
    """Durability."""

    interval_steps: CountOrZero = Field(default=0, description="steps between checkpoints; 0: by time budget")
    time_budget: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.05, description="share of wall time for checkpoints"
    )
    max_interval_s: Seconds = Field(default=600.0, description="longest time between checkpoints")
    keep: Count = Field(default=2, description="checkpoints kept")
    enabled: bool = Field(default=True, description="false: no checkpoints; a lost trainer then begins anew")
