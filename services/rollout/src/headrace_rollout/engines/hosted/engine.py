"""The adapter: an Engine over a backend whose engine runs in processes of its own.

Commands run one at a time on the engine's loop; requests run beside them. What the engine does in its own
processes between two messages is not seen: a command acts once the engine has answered it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_modelkit.loading import context_limit, load_architecture
from typing_extensions import override

from headrace_rollout.engines.base import (
    Authority,
    Engine,
    EngineConfig,
    Freed,
    Likeliest,
    Policy,
    Refused,
    Scope,
    Weights,
    adapters_differ,
    allowed,
)
from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.hosted.backend import Backend, Deadlines, Hung, Start, within
from headrace_rollout.engines.hosted.installing import Installer, check_entries, shapes_of
from headrace_rollout.engines.hosted.process import EngineProcess, LoopThread
from headrace_rollout.engines.hosted.processes import Watermark, gpus_among
from headrace_rollout.engines.hosted.requests import Requests
from headrace_rollout.engines.hosts import BackendFailed
from headrace_rollout.engines.policy_state import MemoryState, is_installed, require_installed
from headrace_rollout.engines.rows import Rows
from headrace_rollout.engines.samples import Distribution, Group, SlotKey, Stream
from headrace_rollout.engines.trajectory import Bounds, check_scored

if TYPE_CHECKING:
    import torch

_Result = TypeVar("_Result")


class HostedEngine(Engine):
    """Built without weights and without a process."""

    def __init__(self, backend: Backend, config: EngineConfig, deadlines: Deadlines | None = None) -> None:
        architecture = load_architecture(config.model)
        self.capabilities = backend.capabilities
        self.max_context_tokens = context_limit(config.model, architecture)
        self.vocabulary_size = int(architecture.get_text_config().vocab_size)
        self.figures = Figures()
        self._shapes, self._adapters = shapes_of(config.model), config.adapters.keys()
        self._backend = backend
        self._deadlines = deadlines or Deadlines()
        self._policy: Policy | None = None
        self._oldest = 0
        self._memory = MemoryState.COLD
        self._paused = False
        self._broken = ""
        self._installer = Installer(backend, self._deadlines.install_s)
        self._process = EngineProcess(backend, self._deadlines, self._lost, self._restored, self.figures)
        bounds = Bounds(self.max_context_tokens, self.vocabulary_size, config.codec.eos_ids)
        self._requests = Requests(
            self._process,
            config.codec,
            bounds,
            Rows(config.max_concurrency, "rollout.engine_options.gpu_memory_utilization"),
            self.figures,
            lambda: self._policy,
            self._deadlines.command_s,
        )
        self._relays = tempfile.TemporaryDirectory(prefix="headrace-relays-", ignore_cleanup_errors=True)
        self._thread = LoopThread(backend.name)
        self._maps = getattr(backend, "maps_device_memory", False)
        self._turn = asyncio.Lock()

    @property
    def maps_on(self) -> torch.device | None:
        """The GPU for which its processes map memory that is lent."""
        gpus = gpus_among(self._process.devices) if self._maps else []
        return gpus[0] if gpus else None

    def relays(self) -> Path | None:
        """Where its workers listen that take part in broadcasts; None while it is not up."""
        return Path(self._relays.name) if self._process.up else None

    @property
    def policy(self) -> Policy | None:
        """The installed version."""
        return self._policy

    @property
    def paused(self) -> bool:
        """True from pause (or suspend) to resume (or wake)."""
        return self._paused

    @property
    @override
    def prefills(self) -> Sequence[Prefills]:
        """VLLM and SGLang compute prompts and tokens in the same passes."""
        return []

    @property
    @override
    def oldest(self) -> int:
        return self._oldest

    @property
    def waiting_samples(self) -> int:
        """Samples that have no request yet."""
        return self._requests.waiting

    @override
    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """While paused, groups come back at once as partial outputs."""
        self._check_distribution(stream.distribution)

        async def act() -> None:
            policy = self._require(stream.policy_number)
            accept = not self._paused and stream.holds()
            if accept:
                await self._process.ready()
            self._requests.add(stream, groups, policy, accept=accept)

        await self._command(act)

    @override
    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        """Beside other commands: it must not wait for a start."""
        if self._thread.closed:
            return 0
        return await self._thread.call(lambda: self._requests.stop(keys, stream))

    @override
    async def pause(self) -> int:

        async def act() -> int:
            self._paused = True
            return await self._requests.stop(None, None)

        return await self._thread.call(act)

    @override
    async def resume(self) -> None:

        async def act() -> None:
            self._memory.check_resume()
            self._paused = False

        await self._command(act)

    @override
    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:

        async def act() -> bool:
            return self._check_install(policy, in_flight=in_flight)

        return await self._command(act)

    @override
    async def install(
        self, policy: Policy, weights: Weights, authority: Authority = allowed, *, in_flight: bool = False
    ) -> float:

        async def act() -> float:
            authority()
            if self._check_install(policy, in_flight=in_flight):
                return 0.0
            check_entries(self._shapes, weights.entries)
            if weights.beside.keys() != self._adapters:
                raise ValueError(adapters_differ(weights.beside, self._adapters))
            await self._process.ready()
            authority()  # a start takes long
            await self._process.wake(Scope.WEIGHTS)
            started = time.perf_counter()
            goes_on = in_flight and self._policy is not None
            await self._put(policy, weights, freeze=in_flight and self._requests.living > 0)
            self._oldest = self._oldest if goes_on else policy.number
            if self._memory is MemoryState.COLD:
                await self._process.wake(Scope.KV_CACHE)
                self._memory = MemoryState.AWAKE
            return time.perf_counter() - started

        return await self._command(act)

    @override
    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        check_scored(sequences, distribution, self.max_context_tokens, self.vocabulary_size)
        if not self.capabilities.score_processed and distribution != Distribution():
            raise Refused(
                "INVALID",
                f"distribution: rollout.engine: {self._backend.name} scores given tokens under the model's own "
                "distribution alone; ask for log_prob_kind RAW or temperature 1 without top_p, top_k and min_p",
            )

        async def act() -> tuple[list[list[float]], int]:
            authority()
            policy = self._require(None)
            await self._process.ready()
            found = [
                await self._scored(self._backend.score(ids, start, distribution)) for ids, start in sequences
            ]
            return found, policy.number

        return await self._command(act)

    async def likeliest(
        self, sequences: Sequence[tuple[Sequence[int], int]], top: int, authority: Authority = allowed
    ) -> list[list[Likeliest]]:
        """As `TellsLikeliest`."""
        if not self.capabilities.likeliest:
            reason = f"rollout.engine: {self._backend.name} does not tell the likeliest words"
            raise Refused("UNIMPLEMENTED", reason)
        check_scored(sequences, Distribution(), self.max_context_tokens, self.vocabulary_size)
        most = min(top, self.vocabulary_size)

        async def act() -> list[list[Likeliest]]:
            authority()
            self._require(None)
            await self._process.ready()
            return [await self._scored(self._backend.likeliest(ids, start, most)) for ids, start in sequences]

        return await self._command(act)

    @override
    async def suspend(self) -> Freed:
        """What the engine frees is measured in its processes."""

        async def act() -> Freed:
            if not self._paused:
                raise Refused("NOT_PAUSED", "Suspend needs a paused engine; call Pause first")
            mark = self._watermark()
            await self._process.sleep()
            self._memory = MemoryState.SUSPENDED
            self._nothing_installed()
            return mark.freed()

        return await self._command(act)

    @override
    async def release(self) -> Freed:
        """The engine's processes sleep until the next lease, where that gives the devices back."""
        await self._thread.call(self._process.cancel_start)  # an install that waits for a start has the turn
        return await self._command(lambda: self._end(self._process.release))

    @override
    async def wake(self, scope: Scope, authority: Authority = allowed) -> None:
        """Once all is awake, decoding may go on without Resume."""

        async def act() -> None:
            authority()
            for part in self._memory.to_take(scope, installed=self._policy is not None):
                await self._process.ready()
                await self._process.wake(part)
                if part is Scope.WEIGHTS:
                    self._memory = MemoryState.WEIGHTS
                else:
                    self._memory, self._paused = MemoryState.AWAKE, False

        await self._command(act)

    @override
    async def place(self, devices: tuple[torch.device, ...], threads: int) -> None:
        """The engine's process starts in the background, unless one sleeps that was made for these."""

        async def act() -> None:
            if not devices:
                await self._process.bind(threads)
            elif not await self._process.place(Start(devices, threads, self._relays.name)):
                self._nothing_installed()

        await self._command(act)

    @override
    async def close(self) -> None:
        if self._thread.closed:
            return
        await self._thread.call(self._process.cancel_start)
        await self._command(lambda: self._end(self._process.stop))
        await self._thread.close()
        self._relays.cleanup()

    async def _command(self, act: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        async def in_turn() -> _Result:
            async with self._turn:
                return await act()

        return await self._thread.call(in_turn)

    async def _end(self, end: Callable[[], Awaitable[None]]) -> Freed:
        await self._requests.stop(None, None)
        mark = self._watermark()
        await end()
        self._memory, self._paused = MemoryState.COLD, False
        self._nothing_installed()
        return mark.freed()

    async def _scored(self, scoring: Awaitable[_Result]) -> _Result:
        try:
            return await within(self._deadlines.command_s, f"score of {self._backend.name}", scoring)
        except BackendFailed as error:
            if isinstance(error, Hung) or not self._backend.alive:
                self._process.died(str(error))
            raise Refused("ENGINE_FAILED", f"score failed: {error}") from error

    async def _put(self, policy: Policy, weights: Weights, *, freeze: bool) -> None:
        if freeze:
            await self._process.call("freeze", self._backend.freeze())
        try:
            await self._installer.install(policy, weights)
            self._policy, self._broken = policy, ""
        except Refused as error:
            if error.reason == "BROKEN":
                self._broken = str(error)
                self._policy = self._policy if self._installer.holds else None
                self._process.died(str(error))
            raise
        finally:
            if freeze and self._process.up:
                await self._process.call("thaw", self._backend.thaw())

    def _require(self, number: int | None) -> Policy:
        """The installed version, which must be `number`, or have taken over its streams, where one is given."""
        policy = self._policy
        if policy is None and self._broken:
            raise Refused("BROKEN", f"{self._broken}; install again")
        return require_installed(policy, number, self._oldest)

    def _check_distribution(self, wanted: Distribution) -> None:
        """Raises Refused INVALID for a distribution that the engine would sample otherwise."""
        able, name = self.capabilities, self._backend.name
        if wanted.top_p < 1 and (wanted.top_k or wanted.min_p) and not able.top_p_after_others:
            raise Refused(
                "INVALID",
                f"distribution.top_p: rollout.engine: {name} counts top-p over all tokens and not over those that "
                "top_k and min_p leave; set top_p: 1, or top_k: 0 and min_p: 0",
            )
        if wanted.repetition_penalty != 1 and not able.penalty_counts_prompt:
            raise Refused(
                "INVALID",
                f"distribution.repetition_penalty: rollout.engine: {name} counts no tokens of the prompt; set 1",
            )

    def _check_install(self, policy: Policy, *, in_flight: bool) -> bool:
        if in_flight and not self.capabilities.inflight_update:
            raise Refused(
                "INVALID",
                f"in_flight: rollout.engine: {self._backend.name} installs between samples only; pause first",
            )
        living = self._requests.living
        found = is_installed(policy, self._policy, self._memory, living, in_flight=in_flight)
        if found and policy != self._policy:
            self._policy = policy  # a rewind gives old weights a new number
            self._oldest = self._oldest if in_flight else policy.number
        return found

    def _nothing_installed(self) -> None:
        self._policy, self._broken = None, ""
        self._installer.forget()

    def _watermark(self) -> Watermark:
        pids = list(self._backend.pids) if self._process.up else []
        return Watermark(self._process.devices, pids, self._process.others_bytes)

    def _lost(self, reason: str) -> None:
        self._requests.fail(f"{self._backend.name}: {reason}")

    async def _restored(self) -> None:
        """A new process takes the version that the one before had."""
        try:
            await self._installer.restore()
        except BackendFailed as error:
            self._policy = None
            self._broken = f"the weights could not be put into a new engine: {error}"
            raise Refused("BROKEN", f"{self._broken}; install again") from error
