"""What an engine is: it turns groups into events, between tokens it takes commands.

Knows no tensors, no gRPC and no run: only prompts as ids, samples, distributions, versions and devices.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace_schema.sections.generating import ModelSection

if TYPE_CHECKING:
    import torch
    from headrace_modelkit.tokenizer import TextCodec


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from, beside its validated options.

    `devices` are the lease's, as many as one model spans; none yet: it touches none until `place`.
    """

    model: ModelSection
    codec: TextCodec
    max_concurrency: int
    devices: tuple[torch.device, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What an engine offers beyond generating; a spec that needs what is missing is refused."""

    position_keyed_sampling: bool = False
    """A token's randomness is a function of (seed, prompt, sample, position): batches and resumes change none."""
    deterministic: bool = False
    """Waves by ordinal; the same seed gives the same tokens."""
    resume_from_prefix: bool = False
    """Goes on behind tokens that were sampled elsewhere; without it a sample begins again at token 0."""
    resume_from_cache: bool = False
    """Gives away what it computed of a sample that moves, and goes on with it where the weights are the same."""
    score_processed: bool = False
    """Scores given tokens under any distribution; without it under the model's own alone."""
    inflight_update: bool = False
    """Installs a version while sequences of the one before live; see `Prefix.spans`."""
    suspend_frees_memory: bool = False
    """Suspend gives the memory of weights and cache back on the devices of this build."""
    tensor_parallel: bool = False
    """One model may span several devices."""
    top_p_after_others: bool = True
    """Top-p counts the mass that top-k and min-p left; without it, top-p is refused together with them."""
    penalty_counts_prompt: bool = True
    """The repetition penalty counts the tokens of the prompt too; without it, one other than 1 is refused."""


@dataclass(frozen=True)
class Distribution:
    """What tokens are sampled from; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def greedy(self) -> Distribution:
        """The same at temperature 0."""
        return replace(self, temperature=0.0)


@dataclass(frozen=True)
class Policy:
    """An installed version: its number and the digest of its weights."""

    number: int
    digest: str


@dataclass(frozen=True)
class WeightView:
    """One tensor of a version as bytes; `dtype` is a numpy name such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class WeightEntry:
    """Where one tensor of a version lies in its body; `dtype` as in WeightView, `digest` of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    digest: str


@dataclass(frozen=True, eq=False)
class Weights:
    """A verified version: `body` is mapped here; `path`, if any, is the same body for other processes of this host.

    The bytes stay as they are for as long as `body` is referenced.
    """

    entries: tuple[WeightEntry, ...]
    body: memoryview
    path: Path | None = None

    def views(self) -> list[WeightView]:
        """The tensors, in order."""
        return [
            WeightView(
                entry.name, entry.dtype, entry.shape, self.body[entry.offset : entry.offset + entry.size]
            )
            for entry in self.entries
        ]


class Finish(Enum):
    """Why a sample ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    PROMPT_TOO_LONG = "prompt_too_long"
    ERROR = "error"


@dataclass(frozen=True)
class SampleKey:
    """The slot that a sample fills."""

    prompt_ordinal: int
    sample_index: int


@dataclass(frozen=True)
class Prefix:
    """Tokens that were sampled elsewhere, with their original log-probs and the versions that made them.

    Of a finished exchange, version 0 stands for tokens that were given, such as replies.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class CachedContext:
    """What an engine has computed of a context's first `tokens`: `form` says how it lies in `data`, and by whom."""

    form: str
    tokens: int
    data: bytes | memoryview


@dataclass(frozen=True)
class Sample:
    """One sample to make."""

    sample_index: int
    attempt: int
    prefix: Prefix | None = None
    greedy: bool = False
    """The likeliest token each time, whatever the stream's temperature."""
    cache: CachedContext | None = None
    """Of the prompt and the prefix, as another engine has left it; of any form."""


@dataclass(frozen=True)
class Group:
    """Samples of one prompt."""

    prompt_ordinal: int
    prompt_ids: Sequence[int]
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Output:
    """What happened to a sample: new tokens, its end, or its stop from outside.

    `token_ids` and `log_probs` begin at `offset` and hold what was not sent before; all are of version
    `policy_number` (with stop strings, a few that they held back may be of the one before). An end (`finish`) or a
    stop (`stopped`) carries the whole answer in `whole`, with the version of each token as spans.
    """

    key: SampleKey
    attempt: int
    offset: int
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    policy_number: int
    prompt_ids: Sequence[int]
    finish: Finish | None = None
    stopped: bool = False
    whole: Prefix | None = None
    greedy: bool = False
    text_from: int = 0
    """Where in `whole` the text begins that scorers judge."""
    cache: CachedContext | None = None
    """Of a stopped sample whose stream is `moving`, where the engine can give it away."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Where outputs go and what holds for all samples of one Generate call.

    `sink` and `holds` are called from the engine's thread; they must not block. `holds` says whether the
    stream's lease is held: without it no token is made, and its samples come back as partial outputs.
    """

    policy_number: int
    distribution: Distribution
    max_new_tokens: int
    seed: int
    sink: Callable[[list[Output]], None]
    failed: Callable[[str], None]
    stop: tuple[str, ...] = ()
    chunk_tokens: int = 0
    deterministic: bool = False
    holds: Callable[[], bool] = lambda: True
    moving: threading.Event = field(default_factory=threading.Event)
    """Set: its samples go on elsewhere, and may take along what was computed of them."""


@dataclass(frozen=True)
class Freed:
    """What a suspend gave back, what is now free on the device, and what this process still uses there."""

    released_bytes: int
    free_bytes: int
    used_bytes: int


def allowed() -> None:
    """The authority of a caller that needs none."""


Authority = Callable[[], None]
"""Raises what tells the caller that its lease is not held; called in the engine's thread, before the effect."""


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


@dataclass
class Figures:
    """What an engine has done since it was built."""

    busy_s: float = 0.0
    decode_steps: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    shared_prompt_tokens: int = 0
    moved_tokens: int = 0
    sampled_tokens: int = 0
    samples: int = 0


class Prefills:
    """When an engine computed prompts, by `time.perf_counter()`: written in its thread, read in others.

    The newest `KEPT` spans alone: nobody asks for those before the message before.
    """

    KEPT = 4096

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=self.KEPT)
        self._lock = threading.Lock()

    def add(self, start: float, end: float) -> None:
        """Prompts were computed from `start` to `end`, and this model decoded nothing."""
        with self._lock:
            self._spans.append((start, end))

    def ended_after(self, mark: float) -> list[tuple[float, float]]:
        """(start, end) of those that ended later, in order."""
        with self._lock:
            return [span for span in self._spans if span[1] > mark]


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

    async def abort(self, keys: Sequence[SampleKey] | None) -> int:
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

        Read by `prefills_of`: an engine of another package may have been made before this was a part of one.
        """

    @property
    def waiting_samples(self) -> int: ...

    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """Queues groups in order. POLICY_MISMATCH when the stream's version is not installed."""

    async def abort(self, keys: Sequence[SampleKey] | None, *, stream: Stream | None = None) -> int:
        """As PolicyHolder's, of `stream` alone when given."""

    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        """Log-probs of the ids from each start on, and the version that scored."""


def prefills_of(engine: Engine) -> Sequence[Prefills]:
    """When an engine's prompts were computed, by model; empty where it does not tell."""
    found: Sequence[Prefills] = getattr(engine, "prefills", ())
    return found
