"""A rollout at work for a run: the calls of `RolloutService`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.fleet.worker_client import LOAD_S, QUICK_S, SLOW_S, WorkerClient
from headrace_coordinator.run.workers.clients import Published, SlotKey, sample_key

Opening = rollout.GenerateOpen | rollout.RunEpisodesOpen
Produced = rollout.GenerateResponse | rollout.RunEpisodesResponse

KEYS_A_MESSAGE = 10_000
"""Slots that one request names."""


def _parts(slots: Iterable[SlotKey]) -> Iterator[list[SlotKey]]:
    """Slots by the message."""
    source = iter(slots)
    while part := list(itertools.islice(source, KEYS_A_MESSAGE)):
        yield part


@dataclass
class RolloutClient(WorkerClient):
    """A rollout instance."""

    max_concurrency: int = 1
    digest: str = ""
    """Of the installed weights."""
    max_context_tokens: int = 0
    lost_pools: list[str] = field(default_factory=list)
    """Pools of environments that it says answer no more."""
    lost_repliers: list[rollout.LostReplier] = field(default_factory=list)
    """Instances that it says reply no more."""

    async def open_run(self, config_json: str) -> None:
        """Model architecture, tokenizer and engine."""
        request = rollout.OpenRunRequest(header=self.header(), config_json=config_json)
        response: rollout.OpenRunResponse = await self.instance_client.call("OpenRun", request, LOAD_S)
        self.max_concurrency = max(1, response.max_concurrency)
        self.max_context_tokens = response.max_context_tokens

    async def install(self, published: Published) -> rollout.InstallPolicyResponse:
        """Compare-and-set to a version."""
        request = rollout.InstallPolicyRequest(header=self.header(), version=published.version)
        if published.files is not None:
            request.files.CopyFrom(published.files)
        else:
            request.manifest.CopyFrom(published.manifest)
            request.sources.append(published.source)
        # The first one waits for the engine's start, which may take minutes.
        response: rollout.InstallPolicyResponse = await self.instance_client.call(
            "InstallPolicy", request, LOAD_S
        )
        self.installed, self.digest = published.version.number, response.version.digest
        return response

    def generate(
        self, opening: Opening, assignments: AsyncIterator[rollout.AssignGroups], timeout: float
    ) -> AsyncIterator[Produced]:
        """Groups in, chunks out: answers, or episodes, as the opening says."""
        opening.header.CopyFrom(self.header())
        episodes = isinstance(opening, rollout.RunEpisodesOpen)
        request: Any = rollout.RunEpisodesRequest if episodes else rollout.GenerateRequest

        async def requests() -> AsyncIterator[Any]:
            yield request(open=opening)
            async for assignment in assignments:
                yield request(assign=assignment)

        return self.instance_client.stream("RunEpisodes" if episodes else "Generate", requests(), timeout)

    async def suspend(self) -> None:
        """Pause, then give the memory back."""
        self.installed, self.awake, self.kept = (
            0,
            False,
            False,
        )  # Also where a reply is lost: what it did then is not known.
        await self.instance_client.call("Pause", rollout.PauseRequest(header=self.header()), QUICK_S)
        await self.instance_client.call("Suspend", rollout.SuspendRequest(header=self.header()), SLOW_S)

    async def make_room(self) -> None:
        """Before an install: the weights' room, where they have none."""
        if not self.awake:
            weights = rollout.WakeRequest(header=self.header(), scope=rollout.WAKE_SCOPE_WEIGHTS)
            await self.instance_client.call("Wake", weights, LOAD_S)

    async def go_on(self) -> None:
        """After an install: the cache's room, where it has none (PROTOCOL, Versions)."""
        if self.awake:
            return
        cache = rollout.WakeRequest(header=self.header(), scope=rollout.WAKE_SCOPE_KV_CACHE)
        await self.instance_client.call("Wake", cache, SLOW_S)
        await self.instance_client.call("Resume", rollout.ResumeRequest(header=self.header()), QUICK_S)
        self.awake = True

    async def abort(self) -> None:
        """Ends everything that runs."""
        await self.instance_client.call("Abort", rollout.AbortRequest(header=self.header()), QUICK_S)

    async def inventory(self) -> Sequence[rollout.InventoryItem]:
        """Trajectories in what it retains."""
        request = rollout.ListInventoryRequest(header=self.header())
        response: rollout.ListInventoryResponse = await self.instance_client.call(
            "ListInventory", request, QUICK_S
        )
        return response.items

    async def fetch(self, slots: Iterable[SlotKey]) -> list[common.Trajectory]:
        """Bodies from what it retains; unknown ones are left out."""
        found: list[common.Trajectory] = []
        for part in _parts(slots):
            request = rollout.FetchTrajectoriesRequest(header=self.header(), samples=map(sample_key, part))
            async for response in self.instance_client.listen("FetchTrajectories", request, SLOW_S):
                found += response.trajectories
        return found

    async def end_retention(self, slots: Iterable[SlotKey]) -> None:
        """The ledger says TRAINED or DROPPED."""
        for part in _parts(slots):
            request = rollout.ReleaseTrajectoriesRequest(header=self.header())
            for prompt, sample in part:
                request.samples.add(prompt_ordinal=prompt, sample_index=sample)
            await self.instance_client.call("ReleaseTrajectories", request, QUICK_S)
