"""The transformers engine: an asyncio face over one decoding thread.

Commands and decode rounds go through the same one-thread executor in turn, so a command acts between two
tokens and nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from headrace_rollout.engines.base import (
    Authority,
    Capabilities,
    Distribution,
    EngineConfig,
    Figures,
    Freed,
    Group,
    Policy,
    Refused,
    SampleKey,
    Scope,
    Stream,
    Weights,
    allowed,
)
from headrace_rollout.engines.memory_state import MemoryState
from headrace_rollout.engines.transformers.decoder import Decoder
from headrace_rollout.engines.transformers.memory import HOST, available_bytes, return_to_system, used_bytes
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.transformers.scoring import check_scored, passes, score

CAPABILITIES = Capabilities(
    position_keyed_sampling=True,
    deterministic=True,
    resume_from_prefix=True,
    inflight_update=True,
    score_processed=True,
    suspend_frees_memory=True,
)
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class TransformersEngine:
    """Implements `engines.base.Engine`; built without weights."""

    capabilities = CAPABILITIES

    def __init__(self, config: EngineConfig, kv_cache_bytes: int | None = None) -> None:
        self.figures = Figures()
        self._model = PolicyModel(config.model, config.devices[0] if config.devices else HOST)
        self._decoder = Decoder(
            self._model, config.codec, config.max_concurrency, self.figures, kv_cache_bytes
        )
        self.max_context_tokens = self._model.context_limit
        self.vocabulary_size = self._model.vocabulary_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._streams: set[Stream] = set()
        self._memory = MemoryState.COLD
        self._paused = False
        self._scheduled = False
        self._closed = False

    @property
    def policy(self) -> Policy | None:
        """The installed version."""
        return self._model.policy

    @property
    def paused(self) -> bool:
        """True from pause (or suspend) to resume (or wake)."""
        return self._paused

    @property
    def waiting_samples(self) -> int:
        """Samples that have no row yet."""
        return self._decoder.waiting

    @property
    def kv_bytes(self) -> int:
        """Memory of the running samples' keys and values."""
        return self._decoder.model.cache.size_bytes

    @property
    def kv_token_bytes(self) -> int:
        """What one token of them takes; 0 before the first samples."""
        return self._decoder.model.cache.token_bytes

    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """See Engine. While paused, groups come back at once as partial outputs."""

        def act() -> None:
            self._streams.add(stream)
            self._decoder.submit(stream, groups, accept=not self._paused)
            self._schedule()

        await self._call(act)

    async def abort(self, keys: Sequence[SampleKey] | None, *, stream: Stream | None = None) -> int:
        """See Engine."""

        def act() -> int:
            if keys is None and stream is not None:
                self._streams.discard(stream)
            return self._decoder.stop(keys, stream)

        return 0 if self._closed else await self._call(act)

    async def pause(self) -> int:
        """See Engine."""

        def act() -> int:
            self._paused = True
            return self._decoder.stop(None, None)

        return await self._call(act)

    async def resume(self) -> None:
        """See Engine."""

        def act() -> None:
            if self._memory in (MemoryState.SUSPENDED, MemoryState.WEIGHTS):
                raise Refused("SUSPENDED", "the engine's memory is released; Wake WEIGHTS and KV_CACHE first")
            self._paused = False

        await self._call(act)

    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:
        """See Engine."""
        return await self._call(lambda: self._check_install(policy, in_flight=in_flight))

    async def install(
        self, policy: Policy, weights: Weights, authority: Authority = allowed, *, in_flight: bool = False
    ) -> float:
        """See Engine."""

        def act() -> float:
            authority()
            if self._check_install(policy, in_flight=in_flight):
                return 0.0
            goes_on = in_flight and self.policy is not None
            if goes_on:
                self._decoder.begin_again()
            seconds = self._model.install(policy, weights.views())
            if not goes_on:
                self._decoder.oldest = policy.number
            if self._memory is MemoryState.COLD:
                self._memory = MemoryState.AWAKE
            return seconds

        return await self._call(act)

    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        """See Engine. Passes are bounded, so that decoding goes on between them."""
        check_scored(sequences, distribution, self.max_context_tokens, self.vocabulary_size)
        policy = self.policy
        if policy is None:
            raise Refused("POLICY_MISMATCH", "no policy is installed; call InstallPolicy first")
        results: dict[int, list[float]] = {}
        for chosen in passes(sequences):
            part = [sequences[index] for index in chosen]
            found = await self._call(partial(self._score, policy, part, distribution, authority))
            results.update(zip(chosen, found, strict=True))
        return [results[index] for index in range(len(sequences))], policy.number

    async def suspend(self) -> Freed:
        """See Engine. Released bytes are the fall of resident memory (CPU) or of the device's use."""

        def act() -> Freed:
            if not self._paused:
                raise Refused("NOT_PAUSED", "Suspend needs a paused engine; call Pause first")
            self._memory = MemoryState.SUSPENDED
            return self._free()

        return await self._call(act)

    async def release(self) -> Freed:
        """See Engine."""

        def act() -> Freed:
            self._decoder.stop(None, None)
            self._memory, self._paused = MemoryState.COLD, False
            freed = self._free()
            self._model.place(HOST)
            return freed

        return await self._call(act)

    async def wake(self, scope: Scope, authority: Authority = allowed) -> None:
        """See Engine. Once all is awake, decoding may go on without Resume."""

        def act() -> None:
            authority()
            for part in self._memory.to_take(scope, installed=self.policy is not None):
                if part is Scope.WEIGHTS:
                    self._model.take_memory()
                    self._memory = MemoryState.WEIGHTS
                else:
                    self._memory, self._paused = MemoryState.AWAKE, False

        await self._call(act)

    async def place(self, devices: tuple[torch.device, ...], threads: int) -> None:
        """See Engine. torch counts threads by the thread that asks, so the decoding thread must."""

        def act() -> None:
            torch.set_num_threads(threads)
            if devices:
                self._model.place(devices[0])

        await self._call(act)

    async def close(self) -> None:
        """See Engine."""
        await self.release()
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown)

    async def _call(self, act: Callable[[], _Result]) -> _Result:
        if self._closed:
            raise Refused("NOT_OPEN", "the run was closed; call OpenRun first")
        return await asyncio.wrap_future(self._executor.submit(act))

    def _free(self) -> Freed:
        device = self._model.device
        before = used_bytes(device)
        self._decoder.reset()
        self._model.free_memory()
        return_to_system(device)
        after = used_bytes(device)
        return Freed(max(0, before - after), available_bytes(device), after)

    def _schedule(self) -> None:
        if not self._scheduled and self._decoder.living:
            self._scheduled = True
            self._executor.submit(self._decoder.round).add_done_callback(self._after_round)

    def _after_round(self, finished: Future[bool]) -> None:
        self._scheduled = False
        error = finished.exception()
        if error is None:
            self._schedule()
            return
        _log.error("a decode round failed", exc_info=error)
        self._decoder.reset()
        for stream in self._streams:
            stream.failed(f"{type(error).__name__}: {error}")
        self._streams.clear()

    def _check_install(self, policy: Policy, *, in_flight: bool) -> bool:
        installed = self.policy
        if self._memory is MemoryState.SUSPENDED:
            raise Refused("SUSPENDED", "the weights have no room; Wake WEIGHTS first")
        if installed == policy:
            return True
        if installed is not None and policy.number <= installed.number:
            raise Refused(
                "POLICY_MISMATCH",
                f"version {policy.number} does not follow version {installed.number}, which is installed",
            )
        if (living := self._decoder.living) and not in_flight:
            raise Refused("POLICY_MISMATCH", f"{living} sequences of the installed version live; pause first")
        if installed is not None and installed.digest == policy.digest:
            # A rewind gives old weights a new number.
            self._model.policy = policy
            if not in_flight:
                self._decoder.oldest = policy.number
            return True
        return False

    def _score(
        self,
        policy: Policy,
        part: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority,
    ) -> list[list[float]]:
        authority()
        if self.policy != policy:
            raise Refused(
                "POLICY_MISMATCH", f"version {policy.number} was replaced while it scored; ask again"
            )
        return score(self._model, part, distribution)
