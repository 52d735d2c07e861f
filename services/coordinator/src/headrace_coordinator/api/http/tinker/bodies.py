"""JSON bodies of Tinker's client, 0.38. A key that is not known here is refused: nothing is silently left out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

UNSUPPORTED = "not supported by this fleet; leave it out"


class Body(BaseModel):
    """One request."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    type: str = ""


class Loose(Body):
    """A request of which only some keys matter here."""

    model_config = ConfigDict(extra="ignore")


class OfSession(Loose):
    """About a client's session."""

    session_id: str


class OfModel(Loose):
    """About a model."""

    model_id: str


class Retrieve(Loose):
    """Asks for the result of a request."""

    request_id: str


class OfPath(Loose):
    """About a checkpoint."""

    tinker_path: str


class Lora(Body):
    """What is trained: adapters of a rank, or with rank 0 all weights."""

    rank: int = Field(ge=0, le=4096)
    seed: NonNegativeInt | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """Makes a model from a base model."""

    session_id: str
    model_seq_id: NonNegativeInt
    base_model: str = Field(min_length=1)
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class LoadWeights(Body):
    """Makes a model from a checkpoint (`session_id`), or loads one into a model (`model_id`)."""

    model_id: str | None = None
    seq_id: PositiveInt | None = None
    session_id: str | None = None
    model_seq_id: NonNegativeInt | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None


class OptimStep(Body):
    """One step of the optimizer."""

    model_id: str
    seq_id: PositiveInt
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    """Saves a model under a name, for training or for sampling; without a name, to sample from it now."""

    model_id: str
    seq_id: PositiveInt
    path: str | None = None
    sampling_session_seq_id: NonNegativeInt | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class CreateSampler(Body):
    """Something to sample from."""

    session_id: str
    sampling_session_seq_id: NonNegativeInt
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Loose):
    """A piece of a prompt."""

    type: str
    tokens: list[int] = []


class Prompt(Body):
    """What the model reads."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """How to sample."""

    max_tokens: PositiveInt | None = None
    seed: NonNegativeInt | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class Sample(Body):
    """Asks for samples of a prompt."""

    sampling_session_id: str
    seq_id: NonNegativeInt
    num_samples: PositiveInt = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: NonNegativeInt = 0
    prompt_logprobs_last_n: PositiveInt | None = None
    topk_sample_logprobs: Literal[0] = Field(default=0, description=UNSUPPORTED)
    target_prompt_logprobs: None = Field(default=None, description=UNSUPPORTED)
    prompt_alt_tokens_k: Literal[0] = Field(default=0, description=UNSUPPORTED)
    record_stability_info: Literal[False] | None = Field(default=None, description=UNSUPPORTED)
