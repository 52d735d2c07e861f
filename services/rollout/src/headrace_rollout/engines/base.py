"""What an engine is: it turns groups into events, between tokens it takes commands.

Knows no tensors, no gRPC and no run: only prompts as ids, samples, distributions, versions and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headrace_schema.images import Kind
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection

from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.samples import Distribution, Group, SlotKey, Stream

if TYPE_CHECKING:
    import torch
    from headrace_modelkit.tokenizer import TextCodec

    from headrace_rollout.engines.hosts import Hosts


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from, beside its validated options.

    `devices` are the lease's, as many as one model spans; none yet: it touches none until `place`.
    """

    model: ModelSection
    codec: TextCodec
    max_concurrency: int
    devices: tuple[torch.device, ...] = ()
    routed_experts: bool = False
    """Prefixes of ended samples carry `routes`."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Ranks of adapters that it computes with beside the model, by name: each stream names one. None: the weights that
    are installed are whole, or are merged with their one adapter.
    """
    hosts: Hosts | None = None
    """The other hosts of the engine, where it spans several."""
    deterministic: bool = False
    """A token's log-prob has the trainer's bits, whatever is computed beside it."""
    draft: DraftSection | None = None
    """The head that drafts, whose weights are among the model's."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine offers beyond generating; a spec that needs what is missing is refused."""

    position_keyed_sampling: bool = False
    """A token's randomness depends on (seed, prompt, sample, position) alone, not on the batch or on a resume."""
    deterministic: bool = False
    """With `EngineConfig.deterministic` a token has the trainer's log-prob to the bit, whatever its batch."""
    resume_from_prefix: bool = False
    """Goes on behind tokens that were sampled elsewhere; without it a sample begins again at token 0."""
    resume_from_cache: bool = False
    """Hands out the cache of a sample that moves, and goes on with one of another engine with the same weights."""
    score_processed: bool = False
    """Scores given tokens under any distribution; without it under the model's own alone."""
    inflight_update: bool = False
    """Installs a version while sequences of the one before live; see `Prefix.spans`."""
    suspend_frees_memory: bool = False
    """Suspend gives the memory of weights and cache back on the devices of this build."""
    tensor_parallel: bool = False
    """One model may span several devices."""
    routed_experts: bool = False
    """Tells the experts that tokens were sent to, where `EngineConfig.routed_experts` asks for them."""
    lora: bool = False
    """Computes with several adapters beside one model, where `EngineConfig.adapters` names them."""
    images: tuple[str, ...] = ()
    """Families of models (model_type) whose images of prompts it takes."""
    files: tuple[Kind, ...] = ("image",)
    """What files it takes of these families."""
    top_p_after_others: bool = True
    """Top-p counts the mass that top-k and min-p left; without it, top-p is refused together with them."""
    penalty_counts_prompt: bool = True
    """The repetition penalty counts the tokens of the prompt too; without it, one other than 1 is refused."""
    learned_drafts: bool = False
    """Drafts by a head that is part of a version."""
    likeliest: bool = False
    """Tells the likeliest words in the place of given tokens, as `TellsLikeliest`."""


@dataclass(frozen=True)
class Policy:
    """An installed version: its number and the digest of its weights."""

    number: int
    digest: str
    any_order: bool = field(default=False, compare=False)
    """It may be installed in place of a later one: a loop of one's own samples from any that it has."""


@dataclass(frozen=True)
class WeightView:
    """One tensor of a version as bytes; `dtype` is a numpy name such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    on_device: torch.Tensor | None = None
    """The same bytes in the memory of a GPU."""
    adapter: tuple[WeightView, WeightView, float] | None = None
    """A, B and their scale: `data` is a frozen weight, which they have yet to change."""


@dataclass(frozen=True)
class WeightEntry:
    """Where one tensor of a version lies in its body; `dtype` as in WeightView, `digest` of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    digest: str


class Lent(Protocol):
    """A body in the memory of another process's GPU.

    `memory`: the verified bytes, where the engine computes in this process; `handle` and `sums` are for its own ones.
    """

    @property
    def held(self) -> bool:
        """Whether its owner still lends it."""

    @property
    def memory(self) -> torch.Tensor | None: ...

    @property
    def handle(self) -> Mapping[str, Any]: ...

    @property
    def sums(self) -> Sequence[int]: ...


@dataclass(frozen=True, eq=False)
class Weights:
    """A verified version: `body` is mapped here; `path`, if any, is the same body for other processes of this host.

    The bytes stay as they are for as long as `body` is referenced. With `adapter`, they are those of the frozen
    weights below it, and the version is both merged. With `beside`, they are below several adapters, by name, which an
    engine computes with beside them.
    """

    entries: tuple[WeightEntry, ...]
    body: memoryview
    path: Path | None = None
    adapter: Adapter | None = None
    lent: Lent | None = None
    beside: Mapping[str, Adapter] = field(default_factory=dict)
    digest: str = ""
    """Of these bytes' manifest, where it is known."""

    def of(self, adapter: str) -> Weights:
        """The version of one of the adapters that it has beside it, to be merged."""
        return replace(self, adapter=self.beside[adapter], beside={})

    def parts(self) -> list[WeightView]:
        """The tensors, in order; adapters stand beside those that they change. As long as `lent` holds, they are on the
        GPU as well.
        """
        flat = self.lent.memory if self.lent is not None else None
        beside = {view.name: view for view in self.adapter.weights.parts()} if self.adapter else {}
        return [
            WeightView(
                entry.name,
                entry.dtype,
                entry.shape,
                self.body[entry.offset : entry.offset + entry.size],
                flat[entry.offset : entry.offset + entry.size] if flat is not None else None,
                (beside[name], beside[f"{entry.name}.lora_B"], self.adapter.scale)
                if self.adapter and (name := f"{entry.name}.lora_A") in beside
                else None,
            )
            for entry in self.entries
        ]


@dataclass(frozen=True, eq=False)
class Adapter:
    """Adapters of low rank: "W.lora_A" (R, I) and "W.lora_B" (O, R) in fp32 make W + scale · B A of a weight W.

    `base`: the digest of all W.
    """

    weights: Weights
    scale: float
    base: str = ""


def adapters_differ(given: Collection[str], wanted: Collection[str]) -> str:
    """Says that a version has not the adapters that an engine was built for."""
    told = [
        ", ".join(name or "the own policy's" for name in sorted(each)) or "none" for each in (wanted, given)
    ]
    return (
        f"rollout.enable_lora: the engine computes with adapters ({told[0]}), and the version has {told[1]}"
    )


@dataclass(frozen=True)
class Freed:
    """What a suspend gave back, what is now free on the device, and what the engine's processes still use there."""

    released_bytes: int
    free_bytes: int
    used_bytes: int


def allowed() -> None:
    """The authority of a caller that needs no lease: allows everything."""


Authority = Callable[[], None]
"""Raises where the caller's lease is not held; called in the engine's thread, right before the effect."""


class Scope(Enum):
    """What Wake takes."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    ALL = "all"


class Refused(Exception):
    """A command that the engine's state does not allow; `reason` is an upper-case constant.

    BROKEN: an install failed halfway and the version before could not be put back; the next install repairs it.
    ENGINE_FAILED: the engine's process ended or hung and could not be started again.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PolicyHolder(Protocol):
    """What holds a policy, of text or of a robot, on its devices.

    Commands act between two pieces of work and raise Refused where state forbids them.
    """

    @property
    def policy(self) -> Policy | None: ...

    @property
    def paused(self) -> bool: ...

    async def pause(self) -> int:
        """Stops the work; everything comes back as partial outputs. Returns how many."""

    async def resume(self) -> None:
        """Goes on after pause."""

    async def abort(self, keys: Sequence[SlotKey] | None) -> int:
        """Stops samples (None: all); their partial outputs go out."""

    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:
        """True when the digest is there already (its number is taken). POLICY_MISMATCH while others live.

        INVALID for `in_flight` where samples cannot go on with another version.
        """

    async def install(
        self, policy: Policy, weights: Weights, authority: Authority = allowed, *, in_flight: bool = False
    ) -> float:
        """Swaps all weights or none; returns the seconds that the work stood still.

        Refused while samples live, unless `in_flight`: they then go on with the new version, and their spans
        say where; streams of the versions before take groups as before. ValueError: names or shapes are not the
        model's; what was installed serves on.
        """

    async def suspend(self) -> Freed:
        """Gives memory back; NOT_PAUSED unless paused."""

    async def release(self) -> Freed:
        """Ends everything with partial outputs and gives all memory back: as built, nothing installed, no device."""

    async def wake(self, scope: Scope, authority: Authority = allowed) -> None:
        """Takes memory again, WEIGHTS before KV_CACHE; awake already is no error."""

    async def place(self, devices: tuple[torch.device, ...], threads: int) -> None:
        """Uses these devices and `threads` threads from now on; on another device, nothing is installed.

        Without devices only the number of threads changes.
        """

    async def close(self) -> None:
        """Ends the holder's thread and frees its memory."""


class Engine(PolicyHolder, Protocol):
    """One language model on its devices: on the first of them, or with `capabilities.tensor_parallel` on all."""

    capabilities: Capabilities
    max_context_tokens: int
    vocabulary_size: int
    figures: Figures

    @property
    def prefills(self) -> Sequence[Prefills]:
        """When prompts were computed, by model; empty where the engine cannot tell it from decoding.

        An engine may leave it out: read it with `prefills_of`.
        """

    @property
    def oldest(self) -> int | None:
        """Number of the first version whose streams are served: later ones were installed in flight.

        An engine that installs between samples only may leave it out: read it with `oldest_of`.
        """
        return None

    @property
    def waiting_samples(self) -> int: ...

    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """Queues groups in order. POLICY_MISMATCH when the stream's version is not installed."""

    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        """As PolicyHolder's, of `stream` alone when given."""

    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        """Log-probs of the ids from each start on, and the version that scored."""


Likeliest = tuple[list[int], list[float]]
"""Words and their log-probs, likeliest first."""


@runtime_checkable
class TellsLikeliest(Protocol):
    """What an engine can do besides when it tells which tokens are the likeliest at a position."""

    async def likeliest(
        self, sequences: Sequence[tuple[Sequence[int], int]], top: int, authority: Authority = allowed
    ) -> list[list[Likeliest]]:
        """The `top` likeliest words in each place from each start on, by the model's own distribution."""


def device_of(holder: PolicyHolder, *, maps: bool = False) -> torch.device | None:
    """The device on which the holder computes in this process, or, with `maps`, where it maps memory that is lent.

    None where it does neither: an engine of another package need not say it.
    """
    found: torch.device | None = getattr(holder, "device", None)
    if found is None and maps:
        found = getattr(holder, "maps_on", None)
    return found


def oldest_of(holder: PolicyHolder) -> int | None:
    """`holder.oldest`; None where it serves the streams of its installed version alone."""
    found: int | None = getattr(holder, "oldest", None)
    return found


def prefills_of(engine: Engine) -> Sequence[Prefills]:
    """`engine.prefills`; empty where an engine of another package has none."""
    found: Sequence[Prefills] = getattr(engine, "prefills", ())
    return found
