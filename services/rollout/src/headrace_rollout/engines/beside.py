"""A policy's engine with other models beside it, on its devices or their own: all are placed, woken and suspended
together.

Others are frozen, or policies that learn too: a version of the run then is one of all of them. Samples go to the run's
own policy's engine; who wants another model asks its engine itself. Knows no run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from headrace_rollout.engines.base import (
    Authority,
    Engine,
    Freed,
    Policy,
    Scope,
    Weights,
    allowed,
    oldest_of,
    prefills_of,
)
from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.samples import Distribution, Group, SlotKey, Stream

if TYPE_CHECKING:
    import torch

FROZEN_NUMBER = 1
"""Version number of a frozen model in its engine."""
ReadWeights = Callable[[], tuple[str, Weights]]
"""Digest and weights of a frozen model, from the disk."""


@dataclass(eq=False)
class Frozen:
    """A model that never changes, in an engine of its own."""

    engine: Engine
    read: ReadWeights
    _weights: tuple[str, Weights] | None = None
    _installing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def install(self) -> None:
        """Installs it, if it is not; it is read once."""
        async with self._installing:
            if self.engine.policy is None:
                if self._weights is None:
                    self._weights = await asyncio.to_thread(self.read)
                digest, weights = self._weights
                await self.engine.install(Policy(FROZEN_NUMBER, digest), weights)


class EngineBeside(Engine):
    """The policy's engine, and those of frozen models, and by their names those of other policies that learn.

    Those `apart` have devices of their own, as many as the policy's engine.
    """

    def __init__(
        self,
        speaker: Engine,
        frozen: Sequence[Frozen],
        learning: Mapping[str, Engine] | None = None,
        apart: Sequence[Engine] = (),
    ) -> None:
        self._speaker, self._frozen, self._learning = speaker, frozen, dict(learning or {})
        self._apart = apart
        self.capabilities = speaker.capabilities
        self.max_context_tokens = speaker.max_context_tokens
        self.vocabulary_size = speaker.vocabulary_size

    @property
    @override
    def figures(self) -> Figures:  # type: ignore[override]
        """What those that learn have done."""
        found = [asdict(engine.figures) for engine in (self._speaker, *self._learning.values())]
        return Figures(**{name: sum(each[name] for each in found) for name in found[0]})

    @property
    @override
    def prefills(self) -> Sequence[Prefills]:
        """Of all models, where all can tell."""
        found = [prefills_of(engine) for engine in self._engines]
        return [each for one in found for each in one] if all(found) else []

    @property
    @override
    def oldest(self) -> int | None:
        return oldest_of(self._speaker)

    @property
    def policy(self) -> Policy | None:
        """The installed version of the policy that learns."""
        return self._speaker.policy

    @property
    @override
    def paused(self) -> bool:
        return self._speaker.paused

    @property
    def waiting_samples(self) -> int:
        """Samples that have no row yet."""
        return sum(engine.waiting_samples for engine in self._engines)

    @property
    def _engines(self) -> list[Engine]:
        return [self._speaker, *self._learning.values(), *(each.engine for each in self._frozen)]

    @override
    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        await self._speaker.submit(stream, groups)

    @override
    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        engines = self._engines if stream is None else [self._speaker]
        return sum([await engine.abort(keys, stream=stream) for engine in engines])

    @override
    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        return await self._speaker.score(sequences, distribution, authority)

    @override
    async def pause(self) -> int:
        return sum([await engine.pause() for engine in self._engines])

    @override
    async def resume(self) -> None:
        for engine in self._engines:
            await engine.resume()

    @override
    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:
        """Frozen models are installed, if they are not."""
        await self._install_frozen()
        installed = [
            await engine.check_install(policy, in_flight=in_flight) for engine in self._learning.values()
        ]
        return await self._speaker.check_install(policy, in_flight=in_flight) and all(installed)

    @override
    async def install(
        self, policy: Policy, weights: Weights, authority: Authority = allowed, *, in_flight: bool = False
    ) -> float:
        """The run's own policy comes last: once it is there, all are."""
        if await self.check_install(policy, in_flight=in_flight):
            return 0.0
        own = _by_policy(weights)
        if not self._learning:
            own = {"": weights}  # one engine has all
        elif missing := self._learning.keys() ^ (own.keys() - {""}):
            raise ValueError(f"the weights are not of this run's policies: {min(missing)} differs")
        seconds = 0.0
        for name, engine in (*self._learning.items(), ("", self._speaker)):
            seconds += await engine.install(policy, own[name], authority, in_flight=in_flight)
        return seconds

    async def _install_frozen(self) -> None:
        for each in self._frozen:
            await each.install()

    @override
    async def suspend(self) -> Freed:
        return _summed([await engine.suspend() for engine in self._engines])

    @override
    async def release(self) -> Freed:
        await self.abort(None)
        return _summed([await engine.release() for engine in self._engines])

    @override
    async def wake(self, scope: Scope, authority: Authority = allowed) -> None:
        for engine in (self._speaker, *self._learning.values()):
            await engine.wake(scope, authority)
        for each in self._frozen:
            if scope is not Scope.KV_CACHE:
                await each.engine.wake(Scope.WEIGHTS, authority)
            if scope is not Scope.WEIGHTS:
                await each.install()
                await each.engine.wake(Scope.KV_CACHE, authority)

    @override
    async def place(self, devices: tuple[torch.device, ...], threads: int) -> None:
        """Devices are divided into equal parts in their order: the first is the policy's, then one for each apart.

        CPU slots are one device; there the threads are divided.
        """
        parts = 1 + len(self._apart)
        each = len(devices) // parts
        for engine in self._engines:
            part = self._apart.index(engine) + 1 if engine in self._apart else 0
            own = devices[part * each : (part + 1) * each] if each else devices
            await engine.place(own, max(1, threads // parts))

    @override
    async def close(self) -> None:
        await self.abort(None)
        for engine in self._engines:
            await engine.close()


def _summed(freed: Sequence[Freed]) -> Freed:
    """The released bytes of all; what is free and used now was measured by the last one."""
    return replace(freed[-1], released_bytes=sum(each.released_bytes for each in freed))


def _by_policy(weights: Weights) -> dict[str, Weights]:
    """Each policy's version: its own weights, or its adapters on those of all."""
    if weights.beside:
        return {name: weights.of(name) for name in weights.beside}
    from headrace_rollout.engines.merging import by_policy

    return by_policy(weights)
