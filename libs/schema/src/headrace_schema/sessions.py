"""What a loop of one's own asks of a session run (`workflow: session`), and what it is answered.

The same in the Python client, over HTTP and within the coordinator. Knows no wire. Losses are sums over tokens: the
log-prob of `targets[i]` is that of the model which has read `tokens[: i + 1]`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
"""What a `Datum` is learned by; lp are the log-probs of the targets, q those of `log_probs`, A the `advantages`.

cross_entropy: -sum(weights * lp). importance_sampling: -sum(exp(lp - q) * A). ppo: -sum(min(r * A, clip(r) * A)) with
r = exp(lp - q). cispo: -sum(detached clip(r) * A * lp). dro: -sum(lp * A - beta / 2 * (lp - q)^2). All but the first
multiply each token's term with its weight where `weights` are given.
"""
LOSSES: tuple[str, ...] = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
"""Options of each loss with their defaults; thresholds are of the ratio itself."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
CheckpointName = Annotated[str, Field(pattern=NAME)]


def _tagged(schema: dict[str, Any]) -> None:
    """Who sends a message says which it is."""
    if "kind" in schema.get("properties", {}):
        schema["required"] = sorted({*schema.get("required", []), "kind"})


class Message(BaseModel):
    """Unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=_tagged)


class Datum(Message):
    """One sequence. `targets`, and the others where they are given, have as many values as `tokens`."""

    tokens: list[int] = Field(min_length=1, description="ids that the model reads")
    targets: list[int] = Field(description="the id whose log-prob is taken at each position")
    weights: list[float] = Field(default=[], description="what each position counts; default: 1 each")
    advantages: list[float] = Field(default=[], description="of all losses but cross_entropy")
    log_probs: list[float] = Field(
        default=[],
        description="those under the policy that sampled the targets, of all losses but cross_entropy",
    )


class Forward(Message):
    """Log-probs and loss under the weights of the moment; changes nothing."""

    kind: Literal["forward"] = "forward"
    data: list[Datum] = Field(min_length=1)
    loss: Loss = "cross_entropy"
    options: dict[str, float] = Field(default={}, description="of the loss, see LOSS_OPTIONS")


class ForwardBackward(Message):
    """As `Forward`, and adds the loss's gradient to what the next `OptimStep` applies."""

    kind: Literal["forward_backward"] = "forward_backward"
    data: list[Datum] = Field(min_length=1)
    loss: Loss = "cross_entropy"
    options: dict[str, float] = Field(default={}, description="of the loss, see LOSS_OPTIONS")


class OptimStep(Message):
    """One step of AdamW with the accumulated gradient, which is then empty. Makes a policy version."""

    kind: Literal["optim_step"] = "optim_step"
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0, description="largest norm of the gradient; 0: any")


class Save(Message):
    """Keeps weights and optimizer state under a name, until they are deleted."""

    kind: Literal["save"] = "save"
    name: CheckpointName
    overwrite: bool = Field(
        default=False, description="replace the checkpoint of another version that has this name"
    )


class Load(Message):
    """Goes on from a checkpoint that was saved by name, of this session or (SESSION/NAME) of another one."""

    kind: Literal["load"] = "load"
    checkpoint: str
    optimizer: bool = Field(
        default=True, description="Adam's moments come with the weights; false: they begin at zero"
    )


class Publish(Message):
    """Makes the weights of the moment those of `Weights.latest` for samples that are asked for from then on."""

    kind: Literal["publish"] = "publish"


class Refuse(Message):
    """A call that who speaks for the loop could not read: its number is used up, and its result is this failure."""

    kind: Literal["refuse"] = "refuse"
    message: str
    key: str = ""


Operation = Annotated[
    Forward | ForwardBackward | OptimStep | Save | Load | Publish | Refuse, Field(discriminator="kind")
]
"""What changes a session or reads its weights, in the order of sequence numbers."""


class Sample(Message):
    """Asks for samples of one prompt. Not numbered: any number of them is in work at once."""

    prompt: list[int] = Field(min_length=1)
    weights: str = Field(
        default="latest",
        description="latest (the version that was published last), base (the model's own), a version's number that "
        "is still published, or a checkpoint: NAME or SESSION/NAME",
    )
    samples: int = Field(default=1, ge=1, le=4096)
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0, description="0: the likeliest token each time")
    top_k: int = Field(default=0, ge=0, description="0: all tokens")
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(
        default=None, description="the same seed gives the same samples of the same weights"
    )
    stop: list[str] = Field(default=[], description="texts that end a sample, and are cut off")
    stop_ids: list[int] | None = Field(
        default=None, description="ids that end a sample, and are kept; default: the model's end; []: none"
    )
    prompt_log_probs: bool = False
    top_prompt_log_probs: int = Field(default=0, ge=0, le=20)


class ForwardResult(Message):
    """Of `Forward` and `ForwardBackward`."""

    model_config = ConfigDict(allow_inf_nan=True)
    kind: Literal["forward", "forward_backward"]
    log_probs: list[list[float]] = Field(description="of each datum's targets")
    metrics: dict[str, float] = Field(description='"loss:sum", "tokens:sum" (with a weight), …')


class OptimStepResult(Message):
    """A policy version is made and in the ledger."""

    model_config = ConfigDict(allow_inf_nan=True)
    kind: Literal["optim_step"] = "optim_step"
    version: int
    step: int = Field(description="optimizer steps of the session so far")
    metrics: dict[str, float] = Field(description="grad_norm, learning_rate, …")


class SaveResult(Message):
    """The checkpoint is durable."""

    kind: Literal["save"] = "save"
    checkpoint: str = Field(description="SESSION/NAME")
    version: int


class LoadResult(Message):
    """The session goes on from there, as a new version."""

    kind: Literal["load"] = "load"
    version: int


class PublishResult(Message):
    """The version can be sampled from."""

    kind: Literal["publish"] = "publish"
    version: int


class SampledSequence(Message):
    """One sample."""

    model_config = ConfigDict(allow_inf_nan=True)
    tokens: list[int]
    log_probs: list[float] = Field(description="of each, under the distribution that it was drawn from")
    stop_reason: Literal["stop", "length"]


class SampleResult(Message):
    """All samples of one `Sample`."""

    model_config = ConfigDict(allow_inf_nan=True)
    kind: Literal["sample"] = "sample"
    version: int = Field(
        description="policy version that sampled; 0: weights of the model or of a checkpoint"
    )
    sequences: list[SampledSequence]
    prompt_log_probs: list[float | None] = Field(
        default=[], description="of each token; null for the first one"
    )
    top_prompt_log_probs: list[list[tuple[int, float]] | None] = Field(
        default=[], description="(id, log-prob) of the likeliest ids at each position; null for the first one"
    )


class Failure(Message):
    """The call has no result, and a retry would have none."""

    kind: Literal["failure"] = "failure"
    category: Literal["user", "server"] = Field(description="whose mistake it is")
    message: str
    key: str = Field(default="", description="of the call or of the spec, that it is about")


class Pending(Message):
    """No result yet."""

    kind: Literal["pending"] = "pending"
    waits_for: Literal["active", "queue", "predecessor", "paused"] = Field(
        description="active: in work or next; queue: for devices; predecessor: for a call with a lower number"
    )


Result = Annotated[
    ForwardResult
    | OptimStepResult
    | SaveResult
    | LoadResult
    | PublishResult
    | SampleResult
    | Failure
    | Pending,
    Field(discriminator="kind"),
]
"""What a future holds."""


class CheckpointView(Message):
    """A checkpoint that was saved by name."""

    name: str
    checkpoint: str = Field(description="SESSION/NAME")
    step: int
    version: int
    size_bytes: int
    created: float = Field(description="Unix time")


class SessionView(Message):
    """A session run as its loop sees it."""

    session: str = Field(description="the run's id")
    state: str = Field(description="of the run: QUEUED, RUNNING, PAUSED, …")
    reason: str
    model: str = Field(description="model.path of its spec")
    lora_rank: int = Field(description="0: all weights learn")
    max_tokens: int = Field(description="longest sequence that the model reads")
    step: int
    version: int
    published: int = Field(description="version of `latest`; 0: none yet")
    next_seq: int = Field(description="lowest number that no call has used")
