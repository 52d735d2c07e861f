"""Sections of what generates: model, data, sampling, rollout, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from headrace_schema.sections.base import (
    FEW,
    MANY,
    Count,
    CountOrZero,
    Helpers,
    Processes,
    Section,
    Seed,
    Share,
    Thousands,
    Tokens,
)

MAX_UNANSWERED = (
    "share of answers that an environment, an engine or a scorer may fail at; they count for nothing"
)
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
"""Options of an engine by which one model spans several GPUs."""
HOSTS = "rollout.engine_options.hosts"


def engine_gpus(options: Mapping[str, Any]) -> int:
    """GPUs that one engine spans, from its options: the product of its parallel sizes, 1 where it names none.

    A size that is no whole number from 1 counts as 1 here: the engine's own options refuse it.

    >>> engine_gpus({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}), engine_gpus({})
    (8, 1)
    """
    sizes = [options.get(name) for name in PARALLEL_SIZES]
    return prod(size for size in sizes if type(size) is int and size > 0)


def engine_hosts(options: Mapping[str, Any]) -> int:
    """Hosts that one engine spans: so many rollout instances make it.

    >>> engine_hosts({"hosts": 2}), engine_hosts({})
    (2, 1)
    """
    hosts = options.get("hosts")
    return hosts if type(hosts) is int and hosts > 0 else 1


def instance_gpus(options: Mapping[str, Any]) -> int:
    """GPUs that a rollout instance holds for its engine, or for its part of one.

    >>> instance_gpus({"tensor_parallel_size": 8, "hosts": 2})
    4
    """
    return max(1, engine_gpus(options) // engine_hosts(options))


def engines_apart(spec: Mapping[str, Any]) -> int:
    """Models that have devices of their own in each rollout instance, beside the policy's; `spec`: as JSON.

    >>> engines_apart({"policies": {"b": {"own_devices": True}}}), engines_apart({})
    (1, 0)
    """
    roles = ((spec.get("environment") or {}).get("roles") or {}).values()
    frozen = {(role.get("path"), role.get("revision")) for role in roles if role.get("own_devices")}
    return len(frozen) + sum(bool(each.get("own_devices")) for each in (spec.get("policies") or {}).values())


KV_TYPE = "kv_cache_dtype"
"""Argument of vLLM and SGLang that names the type of keys and values."""


def quantized(options: Mapping[str, Any]) -> str:
    """What an engine computes with fewer bits than the trainer, from its options; "" where it does not.

    >>> quantized({"quantization": "fp8"}), quantized({"engine_args": {"kv_cache_dtype": "fp8_e5m2"}}), quantized({})
    ('fp8 weights', 'fp8_e5m2 keys and values', '')
    """
    arguments = options.get("engine_args")
    kept = arguments.get(KV_TYPE) if isinstance(arguments, Mapping) else None
    named = [f"{weights} weights"] if (weights := options.get("quantization")) else []
    if kept and kept not in ("auto", "bfloat16", "float16", "half", "float32"):
        named.append(f"{kept} keys and values")
    return " and ".join(named)


def drafts(options: Mapping[str, Any]) -> str:
    """The method by which an engine drafts tokens before it samples them (ngram, draft); "" where it does not."""
    found = options.get("speculative")
    return str(found.get("method", "")) if isinstance(found, Mapping) else ""


def dividing_sizes(heads: int, key_heads: int) -> list[int]:
    """Tensor parallel sizes that divide a model's attention heads.

    Heads of keys and values are divided too, or each of them lies on as many devices.

    >>> dividing_sizes(14, 2), dividing_sizes(12, 8)
    ([1, 2, 14], [1, 2, 4])
    """
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)
    ]


class VideoSection(Section):
    """Which frames of a video a model sees: at even times, as many a second or as many in all."""

    fps: Annotated[float, Field(gt=0, le=120)] | None = Field(
        default=None, description="frames for each second of a video; default: 2, or what `frames` makes"
    )
    frames: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="frames of each video, however long it is, in place of `fps`"
    )
    max_frames: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=32, description="most frames of a video: longer ones are seen at fewer frames a second"
    )
    max_pixels: Annotated[int, Field(ge=784, le=4096 * 2304)] = Field(
        default=768 * 28 * 28, description="most pixels of a frame: larger ones are made smaller"
    )

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.fps is not None and self.frames is not None:
            raise ValueError("give fps or frames, not both")
        return self


class ModelSection(Section):
    """The policy: a Hugging Face id or a local directory (read by rollout and trainer), or a new robot policy."""

    path: str = Field(
        default="",
        description="Hugging Face id or local directory of the model; of a robot policy: a directory with policy.json",
    )
    policy: dict[str, Any] | None = Field(
        default=None,
        description="a new robot policy in place of `path`: its `kind` (mlp, cnn) and options. Sizes and bounds that "
        "it leaves out are the environment's",
    )
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    trust_remote_code: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{40}$",
        description="commit of a Hugging Face id whose own code (`auto_map`) runs in rollout and trainer, where their "
        "hosts allow it: HEADRACE_REMOTE_CODE lists such commits. The model is read at it too",
    )
    gguf_file: str | None = Field(
        default=None, description="GGUF file inside the directory, dequantised on load"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="type of the forward pass in both services"
    )
    max_context: Count | None = Field(
        default=None, description="context limit in tokens; default: the model's own"
    )
    video: VideoSection = Field(default=VideoSection(), description="which frames of videos it sees")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.path) == (self.policy is not None):
            raise ValueError("give path or, for a new robot policy, policy")
        if self.trust_remote_code is not None and self.revision not in (None, self.trust_remote_code):
            raise ValueError("trust_remote_code is a commit, at which the model is read: leave revision out")
        return self


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
    longest: Tokens | None = Field(
        default=None,
        description="tokens of the longest prompt that is trained: longer ones are dropped in their turn, and replaced "
        "as algorithm.options.max_refill says; default: what model.max_context takes",
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="given to the chat template beside the messages, such as enable_thinking or tools",
    )


class CurriculumSection(Section):
    """Which prompts are worth their samples: those whose last group passed about so often."""

    min_pass_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="lowest share of passed answers in an item's last group"
    )
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="highest share of passed answers in an item's last group"
    )
    revisit: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="share of items outside the window that are drawn all the same"
    )

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate: {self.min_pass_rate} is above max_pass_rate: {self.max_pass_rate}; swap them"
            )
        return self


class DataSection(Section):
    """Where prompts come from."""

    source: str = Field(
        description="name of a data source: jsonl, parquet, huggingface, reasoning_gym, mixture, lerobot, copy_digits, "
        "episodes"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the source")
    prompt: PromptSection = PromptSection()
    heldout: CountOrZero = Field(
        default=0,
        description="items set aside for evaluation, never trained; of demonstrations whole episodes",
    )
    heldout_seed: Seed = Field(
        default=1, description="seed of the choice of held-out items; independent of `seed`"
    )
    exclude: list[str] = Field(
        max_length=MANY,
        default_factory=list,
        description="questions kept out of both parts (few-shot examples)",
    )
    curriculum: CurriculumSection | None = Field(
        default=None, description="prefer prompts by their observed pass rate; none: every item once an epoch"
    )


class LengthStage(Section):
    """Steps whose answers are shorter than `sampling.max_new_tokens`."""

    until_step: Count = Field(description="the step from which on the next stage holds; the first step is 0")
    max_new_tokens: Tokens = Field(description="longest answer in tokens before that step")


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
    max_new_tokens: Tokens = Field(
        default=64,
        description="longest answer in tokens; with `stages` that of the last one, for which all is sized",
    )
    stages: list[LengthStage] = Field(
        default_factory=list,
        max_length=FEW,
        description="shorter answers at first, one stage after the other: [{until_step: 200, max_new_tokens: 8192}]. "
        "Held-out answers have the full length",
    )
    stop: list[str] = Field(
        default_factory=list, max_length=FEW, description="texts that end an answer and are cut off"
    )

    def longest_at(self, step: int) -> int:
        """Most tokens of an answer of a step, from 0.

        >>> found = SamplingSection(max_new_tokens=9, stages=[LengthStage(until_step=2, max_new_tokens=4)])
        >>> [found.longest_at(step) for step in range(4)]
        [4, 4, 9, 9]
        """
        return next(
            (each.max_new_tokens for each in self.stages if step < each.until_step), self.max_new_tokens
        )


class RolloutSection(Section):
    """The generating side."""

    engine: str = Field(
        default="transformers",
        description="name in the rollout's registry; auto: by what is installed, the devices and the model, told in "
        "the run's events",
    )
    engine_options: dict[str, Any] = Field(default_factory=dict, description="options of the engine")
    instances: Processes = Field(default=1, description="rollout instances the run takes")
    helpers: Helpers = Field(
        default=0,
        description="rollout instances beside these that help within a step of disaggregated placement: while the "
        "trainer has nothing to learn yet, they decode on its devices",
    )
    max_concurrency: Count = Field(default=64, description="sequences decoded together by one instance")
    chunk_tokens: CountOrZero = Field(default=0, description="tokens of a streamed chunk; 0: whole answers")
    enable_lora: bool = Field(
        default=False,
        description="with trainer.lora: whether engines compute with adapters beside the frozen weights (vLLM's "
        "enable_lora), which are there once for all policies of the run, in one engine. Default: adapters are merged, "
        "to the trainer's bits, each policy's into an engine of its own",
    )
    install: Literal["in_flight", "drain", "abort_and_resume"] | None = Field(
        default=None,
        description="with algorithm.max_staleness above 0, how a rollout that makes answers takes a new version. "
        "in_flight: answers go on with it, and say which version made which token; their keys and values are computed "
        "again. drain: answers in hand end first. abort_and_resume: they stop, and go on from what they have. Default: "
        "in_flight; drain for episodes and conversations of two policies, each of which is made with one version",
    )


class EvaluationData(Section):
    """Other data than the run's, on which it is evaluated too. Its items are not kept out of training."""

    source: str = Field(description="name of a data source, as data.source")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the source")
    prompt: PromptSection | None = Field(default=None, description="default: data.prompt")
    limit: Count | None = Field(
        default=None, description="number of items to ask, always the same ones; default: all"
    )


SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]


class EvaluationSection(Section):
    """Evaluation within the run: of held-out items, and of other data."""

    every: CountOrZero = Field(default=0, description="steps between evaluations; 0: only first and last")
    data: dict[SetName, EvaluationData] = Field(
        default_factory=dict,
        max_length=FEW,
        description="other items to evaluate on, by a name of your own; each has its figure",
    )
    greedy: bool = Field(default=True, description="the likeliest token each time; false samples")
    temperature: PositiveFloat = Field(default=1.0, description="temperature when not greedy")
    samples: Thousands = Field(default=1, description="answers a held-out prompt; more than one gives pass@k")
    pass_reward: float = Field(default=1.0, description="reward from which an answer counts as passed")
    max_new_tokens: Tokens | None = Field(default=None, description="default: as in sampling")
    max_unanswered: Share = Field(default=0.25, description=MAX_UNANSWERED)
    baseline_prefill: str | None = Field(
        default=None, description="also evaluate the untrained model with its answer begun by this text"
    )
