"""A run's client of a rollout instance: the calls of `RolloutService`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.fleet.instance_client import LOAD_S, QUICK_S, SLOW_S, WorkerClient
from headrace_coordinator.run.workers.clients import Published, SlotKey, in_parts, sample_key

Opening = rollout.GenerateOpen | rollout.RunEpisodesOpen
Produced = rollout.GenerateResponse | rollout.RunEpisodesResponse

KEYS_A_MESSAGE = 10_000
"""Slots that one request names at most."""


def _parts(slots: Iterable[SlotKey]) -> Iterator[list[SlotKey]]:
    """Slots, at most KEYS_A_MESSAGE at a time."""
    source = iter(slots)
    while part := list(itertools.islice(source, KEYS_A_MESSAGE)):
        yield part


def _tried(fallback: str) -> str:
    """Which transport from whom, of a text such as "shm from INCARNATION: REASON"."""
    return fallback.partition(": ")[0]


@dataclass
class Arrivals:
    """How versions came to a rollout since the last step: sums, and the longest seconds."""

    versions: int = 0
    moved_bytes: int = 0
    fallbacks: int = 0
    transfer_s: float = 0.0
    pause_s: float = 0.0

    def add(self, response: rollout.InstallPolicyResponse) -> None:
        """Counts one."""
        self.pause_s = max(self.pause_s, response.pause_time.ToNanoseconds() / 1e9)
        if response.transport == common.WEIGHT_TRANSPORT_UNSPECIFIED:
            return  # it had it
        self.versions += 1
        self.moved_bytes += response.bytes_moved
        self.fallbacks += len(response.fallbacks)
        self.transfer_s = max(self.transfer_s, response.transfer_time.ToNanoseconds() / 1e9)


def weight_figures(rollouts: Iterable[RolloutClient]) -> dict[str, float]:
    """The figures of a step about the versions that its rollouts took since the last one; they begin anew."""
    found = [each.weights for each in rollouts if each.weights.versions]
    for each in rollouts:
        each.weights = Arrivals()
    if not found:
        return {}
    return {
        "weights_bytes": float(sum(each.moved_bytes for each in found)),
        "weights_fallbacks": float(sum(each.fallbacks for each in found)),
        "weights_seconds": max(each.transfer_s for each in found),
        "weights_pause_seconds": max(each.pause_s for each in found),
    }


@dataclass
class RolloutClient(WorkerClient):
    """A rollout of one run."""

    max_concurrency: int = 1
    rank: int = 0
    """In an engine of several hosts; above 0 it follows `leader` and takes no work."""
    leader: str = ""
    """The incarnation of rank 0, of an engine of several hosts."""
    digest: str = ""
    """Digest of the installed weights."""
    endpoint_url: str = ""
    """Where clients of an online run speak with it."""
    lost_pools: list[str] = field(default_factory=list)
    """Pools of environments that answer no more, as it says."""
    weights: Arrivals = field(default_factory=Arrivals)
    _failing: set[str] = field(default_factory=set)
    """Which transport from whom failed for the last version."""

    async def open_run(self, config_json: str, leader_address: str | None = None) -> None:
        """Model architecture, tokenizer and engine, or with `leader_address` its part of one."""
        request = rollout.OpenRunRequest(config_json=config_json)
        if leader_address is not None:
            place = rollout.EngineGroup(rank=self.rank, leader=leader_address)
            request.engine_group.CopyFrom(place)
        response: rollout.OpenRunResponse = await self.call("OpenRun", request, LOAD_S)
        self.max_concurrency = 0 if self.rank else max(1, response.max_concurrency)
        self.endpoint_url = response.endpoint_url

    async def install(
        self,
        published: Published,
        sources: Sequence[common.WeightSource] = (),
        *,
        in_flight: bool = False,
    ) -> list[str]:
        """Compare-and-set to a version; `in_flight`: samples that are being made go on with it.

        `sources` are whom it asks, best first; none: the trainer. Returns which transports from whom failed that did
        not fail for the version before, with the reason.
        """
        request = rollout.InstallPolicyRequest(version=published.version, in_flight=in_flight)
        if published.files is not None:
            request.files.CopyFrom(published.files)
        response = await self._take(request, published, sources)
        self.installed, self.digest = published.version.number, response.version.digest
        return self._newly_failing(response)

    async def prefetch(self, published: Published, sources: Sequence[common.WeightSource] = ()) -> list[str]:
        """Has it receive a version while it goes on with the one it has; `install` moves no byte then."""
        request = rollout.InstallPolicyRequest(version=published.version, prefetch=True)
        return self._newly_failing(await self._take(request, published, sources))

    async def _take(
        self,
        request: rollout.InstallPolicyRequest,
        published: Published,
        sources: Sequence[common.WeightSource],
    ) -> rollout.InstallPolicyResponse:
        if published.files is None:
            request.manifest.CopyFrom(published.manifest)
            request.sources.extend(sources or [published.source])
        # The first one waits for the engine's start, which may take minutes.
        response: rollout.InstallPolicyResponse = await self.call("InstallPolicy", request, LOAD_S)
        self.weights.add(response)
        return response

    def _newly_failing(self, response: rollout.InstallPolicyResponse) -> list[str]:
        if response.transport == common.WEIGHT_TRANSPORT_UNSPECIFIED:
            return []
        before, self._failing = self._failing, {_tried(text) for text in response.fallbacks}
        return [text for text in response.fallbacks if _tried(text) not in before]

    def generate(
        self, opening: Opening, assignments: AsyncIterator[rollout.AssignGroups], timeout: float
    ) -> AsyncIterator[Produced]:
        """Trajectories of the assigned groups, piece by piece: answers or episodes, as the opening says."""
        opening.header.CopyFrom(self.header())
        episodes = isinstance(opening, rollout.RunEpisodesOpen)
        request: Any = rollout.RunEpisodesRequest if episodes else rollout.GenerateRequest

        async def requests() -> AsyncIterator[Any]:
            yield request(open=opening)
            async for assignment in assignments:
                for part in in_parts(assignment.groups):
                    yield request(assign=rollout.AssignGroups(groups=part))

        return self.instance_client.stream("RunEpisodes" if episodes else "Generate", requests(), timeout)

    async def suspend(self) -> None:
        """Pauses, then releases the device's memory."""
        self.installed, self.awake, self.kept = (
            0,
            False,
            False,
        )  # Also where a reply is lost: it may have been done.
        await self.call("Pause", rollout.PauseRequest(), QUICK_S)
        await self.call("Suspend", rollout.SuspendRequest(), SLOW_S)

    async def wake_weights(self) -> None:
        """Before an install: takes memory for the weights, where they have none."""
        if not self.awake:
            await self.call("Wake", rollout.WakeRequest(scope=rollout.WAKE_SCOPE_WEIGHTS), LOAD_S)

    async def wake_cache(self) -> None:
        """After an install: takes memory for the key-value cache, where it has none, and generates from then on."""
        if self.awake:
            return
        await self.call("Wake", rollout.WakeRequest(scope=rollout.WAKE_SCOPE_KV_CACHE), SLOW_S)
        await self.call("Resume", rollout.ResumeRequest(), QUICK_S)
        self.awake = True

    async def abort(self) -> None:
        """Ends everything that runs."""
        await self.call("Abort", rollout.AbortRequest(), QUICK_S)

    async def fetch(self, slots: Iterable[SlotKey]) -> list[common.Trajectory]:
        """Trajectories from those that it retains; unknown ones are left out."""
        found: list[common.Trajectory] = []
        for part in _parts(slots):
            request = rollout.FetchTrajectoriesRequest(samples=map(sample_key, part))
            async for response in self.stream("FetchTrajectories", request, SLOW_S):
                found += response.trajectories
        return found

    async def end_retention(self, slots: Iterable[SlotKey]) -> None:
        """Frees trajectories that the ledger has as TRAINED or DROPPED."""
        for part in _parts(slots):
            request = rollout.ReleaseTrajectoriesRequest(samples=map(sample_key, part))
            await self.call("ReleaseTrajectories", request, QUICK_S)
