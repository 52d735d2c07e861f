"""A simulated rollout: the contract without a model."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_servicekit.rpc.digests import trajectory_digest

from headrace_simulation.fleet.disk import Disk
from headrace_simulation.fleet.instances import Instance
from headrace_simulation.fleet.simulator import Simulator

PREFILL_MS = 20
BROKEN = 0.05
"""Share of installs in flight that fail half way."""
COLD, SUSPENDED, WEIGHTS, AWAKE = "COLD", "SUSPENDED", "WEIGHTS", "AWAKE"
"""States of the engine's memory: nothing taken yet, released, weights alone, all."""


TURN_REWARDS = (0.25, -0.5)
"""What an environment gives for the two turns of a conversation."""


@dataclass
class Rollout(Instance):
    """Generates pseudo-tokens that depend on (prompt, sample) only, keeps retention, obeys installs.

    An install in flight sometimes fails half way: answers then come back, and the next install repairs it.
    """

    KIND: ClassVar[str] = "rollout"
    MAX_OPEN_RUNS: ClassVar[int] = 1
    disk: Disk = field(default_factory=Disk)
    peers: dict[str, Instance] = field(default_factory=dict)
    """All instances by address: the simulators are called there."""
    version: common.PolicyVersion = field(default_factory=common.PolicyVersion)
    oldest: int = 0
    """The first of the versions whose streams are served: later ones were installed in flight."""
    retention: dict[tuple[int, int], common.Trajectory] = field(default_factory=dict)
    paused: bool = False
    running: int = 0
    stops: int = 0
    memory: str = COLD
    rank: int = 0
    """In an engine that spans hosts: above 0 it makes no answers."""

    async def OpenRun(self, request: rollout.OpenRunRequest) -> rollout.OpenRunResponse:
        told = f"{request.config_json} {request.engine_group}"
        await self.open_run(request.header, told, self.take_time, self._end)
        self.rank = request.engine_group.rank
        return rollout.OpenRunResponse(max_concurrency=0 if self.rank else 8, max_context_tokens=512)

    async def CloseRun(self, request: rollout.CloseRunRequest) -> rollout.CloseRunResponse:
        await self.close_run(request.header)
        return rollout.CloseRunResponse()

    async def _end(self) -> None:
        self.revoked()
        self.retention.clear()

    def revoked(self) -> None:
        """The engine is as before its first install."""
        self.stop()
        self.version, self.paused, self.memory = common.PolicyVersion(), False, COLD

    def rested(self) -> None:
        """Ends its samples; weights and cache stay."""
        self.stop()

    def drained(self) -> None:
        """Sends partial outputs, so that others can continue them."""
        self.paused = True
        self.stop()

    async def InstallPolicy(self, request: rollout.InstallPolicyRequest) -> rollout.InstallPolicyResponse:
        self.fence(request.header, lease=True)
        if request.prefetch:
            await asyncio.sleep(0.05 * self.pace)
            return rollout.InstallPolicyResponse(version=request.version)
        if not self._installed(request.version, request.in_flight):
            await asyncio.sleep(0.05 * self.pace)
            if not self._installed(request.version, request.in_flight):
                if request.HasField("files"):
                    request.version.digest = self._read(request.files.checkpoint)
                if request.in_flight and self.rng.random() < BROKEN:
                    self.stop()
                    self.version = common.PolicyVersion()
                    raise CallRefused(self.incarnation, "BROKEN", "the install failed half way")
                goes_on = request.in_flight and self.version.number
                self.oldest = self.oldest if goes_on else request.version.number
                self.version = request.version
                self.memory = AWAKE if self.memory == COLD else self.memory
        return rollout.InstallPolicyResponse(version=self.version)

    def _read(self, checkpoint: str) -> str:
        """The digest of a checkpoint's weights, or of the model's own."""
        if not checkpoint:
            return "of the model"
        directory, _, name = checkpoint.partition("/checkpoints/")
        stored = self.disk.find(directory, name)
        if stored is None or stored.damage:
            raise CallRefused(self.incarnation, "MODEL_NOT_READABLE", f"checkpoint: {name} cannot be read")
        return stored.version.digest

    def _installed(self, version: common.PolicyVersion, in_flight: bool) -> bool:
        if self.memory == SUSPENDED:
            raise CallRefused(self.incarnation, "SUSPENDED", "the weights have no room; Wake WEIGHTS first")
        if self.version.number == version.number:
            return True
        if version.number < self.version.number:
            raise CallRefused(self.incarnation, "POLICY_MISMATCH", "a later version is installed")
        if self.running and not in_flight:
            raise CallRefused(self.incarnation, "POLICY_MISMATCH", "sequences of another version live")
        return False

    def Generate(
        self, requests: AsyncIterator[rollout.GenerateRequest]
    ) -> AsyncIterator[rollout.GenerateResponse]:
        return self._produce(requests, rollout.GenerateResponse)

    def RunEpisodes(
        self, requests: AsyncIterator[rollout.RunEpisodesRequest]
    ) -> AsyncIterator[rollout.RunEpisodesResponse]:
        return self._produce(requests, rollout.RunEpisodesResponse)

    async def _produce(self, requests: AsyncIterator[Any], response: Any) -> AsyncIterator[Any]:
        opening = (await anext(aiter(requests))).open
        self.fence(opening.header, lease=True)
        if not self.version.number or not self.oldest <= opening.policy_number <= self.version.number:
            raise CallRefused(self.incarnation, "POLICY_MISMATCH", "another version is installed")
        if self.paused:
            raise CallRefused(self.incarnation, "PAUSED", "the engine is paused; call Resume first")
        done: asyncio.Queue[common.Trajectory | rollout.PartialSample] = asyncio.Queue()
        work: set[asyncio.Future[None]] = set()
        reading = asyncio.ensure_future(
            self._take(self.while_open(opening.header.run, requests), opening, done, work)
        )
        revoked = self.revocations[opening.header.lease_epoch]
        revoking = asyncio.ensure_future(revoked.wait())
        try:
            while not ((reading.done() or revoked.is_set()) and not work and done.empty()):
                waiting = asyncio.ensure_future(done.get())
                pending: set[asyncio.Future[Any]] = {waiting}
                pending.update(work)
                pending.update(task for task in (reading, revoking) if not task.done())
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                work -= {task for task in work if task.done()}
                if waiting.done():
                    made = waiting.result()
                    if isinstance(made, rollout.PartialSample):
                        yield response(partials=[made], **self._lost(opening))
                        continue
                    chunk = common.TrajectoryChunk(sample=made.sample, attempt=made.attempt, finished=made)
                    yield response(chunks=[chunk], **_prefill(response))
                else:
                    waiting.cancel()
            if revoked.is_set():
                yield response(revoked=True)
        finally:
            revoking.cancel()
            for task in (reading, *work):
                task.cancel()

    async def _take(
        self,
        requests: AsyncIterator[Any],
        opening: Any,
        done: asyncio.Queue[common.Trajectory | rollout.PartialSample],
        work: set[asyncio.Future[None]],
    ) -> None:
        async for request in requests:
            for group in request.assign.groups:
                for sample in group.samples:
                    made = self._make(opening, group, sample, done)
                    work.add(asyncio.ensure_future(made))

    async def _make(
        self,
        opening: Any,
        group: rollout.GroupAssignment,
        sample: rollout.SampleAssignment,
        done: asyncio.Queue[common.Trajectory | rollout.PartialSample],
    ) -> None:
        prompt, episode = group.prompt_ordinal, isinstance(opening, rollout.RunEpisodesOpen)
        pools = [pool for pool in opening.pools if pool.task == group.prompt.episode.task]
        acts = bool(opening.pools)
        mine = pools[(prompt + sample.sample_index) % len(pools)] if pools else None
        length = 1 + zlib.crc32(f"{opening.seed}/{prompt}/{sample.sample_index}".encode()) % 12
        key = common.SlotKey(prompt_ordinal=prompt, sample_index=sample.sample_index)
        stops = self.stops
        made = [(span.policy_number, span.token_count) for span in sample.resume.version_spans]
        self.running += 1
        try:
            for _ in range(len(sample.resume.token_ids), length):
                # What is assigned as a revocation comes finds an engine without weights.
                if self.paused or not self.version.number:
                    done.put_nowait(_partial(key, sample.attempt, () if episode or mine else made))
                    return
                number = self.version.number  # A pause waits for the token in hand, which is of this version.
                await asyncio.sleep(self.rng.uniform(0.05, 0.2))
                if self.stops != stops or (mine and not self._stands(mine)):
                    done.put_nowait(_partial(key, sample.attempt, () if episode or mine else made))
                    return
                last, count = made[-1] if made else (0, 0)
                if last == number:
                    made[-1] = last, count + 1
                else:
                    made.append((number, 1))
        finally:
            self.running -= 1
        failed = (acts and mine is None) or (not opening.evaluation and self.rng.random() < 0.01)
        trajectory = common.Trajectory(
            sample=key,
            attempt=sample.attempt,
            finish_reason=common.FINISH_REASON_ERROR
            if failed
            else common.FINISH_REASON_TERMINATED
            if acts
            else common.FINISH_REASON_EOS,
            producer=self.incarnation,
        )
        if acts and not episode:
            trajectory.conversation.messages.add(role="assistant", content=f"{length} words")
            trajectory.conversation.failure = "the environment raised an error" if failed else ""
            for reward, tokens in zip(TURN_REWARDS, (length - 1, 1), strict=True):
                trajectory.conversation.turns.add(tokens=tokens, reward=reward)
        first, branch = 0, trajectory.branches.add()
        for number, count in made:
            segment = branch.segments.add(policy_number=number)
            if episode:
                segment.actions.valid_mask.data = b"\x01" * count
            else:
                segment.tokens.token_ids.extend(range(first, first + count))
                segment.tokens.log_probs.extend([-1.0] * count)
                segment.tokens.distribution.temperature = (
                    0.0 if sample.greedy else opening.distribution.temperature
                )
            first += count
        trajectory.body_digest = trajectory_digest(trajectory)
        if not opening.evaluation and not failed and self.live_leases():
            self.retention[prompt, sample.sample_index] = trajectory
        done.put_nowait(trajectory)

    def _stands(self, pool: rollout.EnvironmentPool) -> bool:
        """Whether the simulator that takes turns with this rollout can be reached."""
        peer = self.peers.get(pool.address)
        return isinstance(peer, Simulator) and peer.stands(pool.pool, pool.header)

    def _lost(self, opening: Any) -> dict[str, list[str]]:
        return {"lost_pools": [pool.pool for pool in opening.pools if not self._stands(pool)]}

    async def Pause(self, request: rollout.PauseRequest) -> rollout.PauseResponse:
        self.fence(request.header, lease=False)
        self.paused = True
        self.stop()
        while self.running:  # noqa: ASYNC110 - virtual time: a look costs nothing
            await asyncio.sleep(0.02)
        return rollout.PauseResponse()

    async def Resume(self, request: rollout.ResumeRequest) -> rollout.ResumeResponse:
        self.fence(request.header, lease=False)
        if self.memory in (SUSPENDED, WEIGHTS):
            raise CallRefused(self.incarnation, "SUSPENDED", "the engine's memory is released")
        self.paused = False
        return rollout.ResumeResponse()

    async def Abort(self, request: rollout.AbortRequest) -> rollout.AbortResponse:
        self.fence(request.header, lease=False)
        self.stop()
        return rollout.AbortResponse()

    async def Suspend(self, request: rollout.SuspendRequest) -> rollout.SuspendResponse:
        self.fence(request.header, lease=False)
        if not self.paused:
            raise CallRefused(self.incarnation, "NOT_PAUSED", "pause first")
        self.stop()  # What has not noticed the pause would go on after the next wake.
        self.version, self.memory = common.PolicyVersion(), SUSPENDED
        return rollout.SuspendResponse()

    async def Wake(self, request: rollout.WakeRequest) -> rollout.WakeResponse:
        self.fence(request.header, lease=True)
        cache_only = request.scope == rollout.WAKE_SCOPE_KV_CACHE
        if self.memory == SUSPENDED:
            if cache_only:
                raise CallRefused(self.incarnation, "SUSPENDED", "the weights have no room yet")
            self.memory = WEIGHTS
        if self.memory == WEIGHTS and request.scope != rollout.WAKE_SCOPE_WEIGHTS:
            if cache_only and not self.version.number:
                raise CallRefused(
                    self.incarnation, "POLICY_MISMATCH", "install a policy before Wake KV_CACHE"
                )
            self.memory, self.paused = AWAKE, False
        return rollout.WakeResponse()

    async def ListInventory(self, request: rollout.ListInventoryRequest) -> rollout.ListInventoryResponse:
        self.fence(request.header, lease=False)
        return rollout.ListInventoryResponse(
            items=[
                rollout.InventoryItem(sample=b.sample, attempt=b.attempt, body_digest=b.body_digest)
                for b in self.retention.values()
            ]
        )

    async def FetchTrajectories(
        self, requests: AsyncIterator[rollout.FetchTrajectoriesRequest]
    ) -> AsyncIterator[rollout.FetchTrajectoriesResponse]:
        request = await anext(aiter(requests))
        self.fence(request.header, lease=False)
        keys = [(key.prompt_ordinal, key.sample_index) for key in request.samples]
        yield rollout.FetchTrajectoriesResponse(
            trajectories=[self.retention[key] for key in keys if key in self.retention]
        )

    async def ReleaseTrajectories(
        self, request: rollout.ReleaseTrajectoriesRequest
    ) -> rollout.ReleaseTrajectoriesResponse:
        self.fence(request.header, lease=False)
        for key in request.samples:
            self.retention.pop((key.prompt_ordinal, key.sample_index), None)
        return rollout.ReleaseTrajectoriesResponse()

    def stop(self) -> None:
        """Returns samples in work as partial outputs: a lease was renewed too late, or a drain begins."""
        self.stops += 1


def _prefill(response: Any) -> dict[str, Any]:
    """Times of prefill: each answer's prompt was computed just before it was sent."""
    if response is not rollout.GenerateResponse:
        return {}
    span = rollout.Prefill()
    span.began_ago.FromMilliseconds(PREFILL_MS)
    span.lasted.FromMilliseconds(PREFILL_MS)
    return {"prefills": [span]}


def _partial(key: common.SlotKey, attempt: int, made: Sequence[tuple[int, int]]) -> rollout.PartialSample:
    length = sum(count for _, count in made)
    state = common.ResumeState(token_ids=range(length), log_probs=[-1.0] * length, rng_position=length)
    if length:
        state.cache.MergeFrom(common.CachedContext(form="simulated", tokens=length - 1))
    for number, count in made:
        state.version_spans.add(policy_number=number, token_count=count)
    return rollout.PartialSample(sample=key, attempt=attempt, state=state)
