"""headrace.rollout.v1.RolloutService: messages in, the run's engine and retention do the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_modelkit.devices import bound_memory
from headrace_schema.openings import RolloutConfig
from headrace_servicekit.config import parse_config
from headrace_servicekit.instance import Instance, host_memory
from headrace_servicekit.lease.devices import bind_cpu
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.rpc.addresses import advertised_host, split_address
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_enum, check_name, check_number
from headrace_servicekit.session_marks import mark_of
from headrace_servicekit.weights.versions import base_name

from headrace_rollout.endpoint.server import Endpoint
from headrace_rollout.engines.base import Authority, Refused, Scope, TellsLikeliest, oldest_of
from headrace_rollout.engines.hosts import Hosts
from headrace_rollout.engines.policy_state import require_installed
from headrace_rollout.moving import MovedCaches
from headrace_rollout.runs.installing import PolicyInstaller
from headrace_rollout.runs.opened import OnlineRun, OpenedRun, TextRun
from headrace_rollout.runs.opening import Place, devices_of, memory_on, open_run, place_in
from headrace_rollout.streams.base import RESPONSE_BYTES, Opening, ResponseT, SampleStream, Serving
from headrace_rollout.streams.generation import Generation
from headrace_rollout.wire import distribution_of, invalid, keys_of, refusals

REPORT_EVERY_S = 2.0

Context = grpc.aio.ServicerContext[Any, Any]
SCOPES = {
    rollout_pb2.WAKE_SCOPE_UNSPECIFIED: Scope.ALL,
    rollout_pb2.WAKE_SCOPE_WEIGHTS: Scope.WEIGHTS,
    rollout_pb2.WAKE_SCOPE_KV_CACHE: Scope.KV_CACHE,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """One instance with at most one open run. Registers itself for the instance's lease events."""

    def __init__(self, instance: Instance, caches: MovedCaches) -> None:
        self._instance, self._caches = instance, caches
        self._run: OpenedRun | None = None
        self._hosts: Hosts | None = None
        self._leases: dict[int, tuple[str, ...]] = {}
        self._reported = 0.0
        # Opening, closing and installing change what the other calls find; one at a time.
        self._changing = asyncio.Lock()
        self._endpoint = Endpoint(
            split_address(instance.config.listen)[0],
            advertised_host(instance.config.listen, instance.config.advertise),
        )
        self._installer = PolicyInstaller(instance.weights, instance.token, self._changing)
        instance.open_runs.limit = 1
        instance.on_grant = self.on_grant
        instance.on_revoke = self.on_revoke
        instance.on_quiesce = self.on_quiesce
        instance.on_drain = self.on_drain

    async def OpenRun(
        self, request: rollout_pb2.OpenRunRequest, context: Context
    ) -> rollout_pb2.OpenRunResponse:
        """Builds engine and tokenizer. The same run with the same config is a repetition."""
        header, group = request.header, request.engine_group
        self._instance.fence.check(header, lease=False, opening=False)
        name = check_name("header.run", header.run)
        config = parse_config(RolloutConfig, request.config_json, "config_json of OpenRun")
        place = place_in(request, name, config, self._instance.config)
        told, build = (config, group.rank, group.leader), partial(self._build, name, config, place)
        run: OpenedRun = await self._instance.open_run(header, told, build, self._end)
        return rollout_pb2.OpenRunResponse(
            max_concurrency=0 if group.rank else config.rollout.max_concurrency,
            max_context_tokens=run.max_context_tokens,
            endpoint_url=await self._endpoint.url() if isinstance(run, OnlineRun) else "",
        )

    async def CloseRun(
        self, request: rollout_pb2.CloseRunRequest, context: Context
    ) -> rollout_pb2.CloseRunResponse:
        """Aborts what runs and closes engine and retention; a run that is not open stays closed."""
        await self._instance.close_run(request.header)
        return rollout_pb2.CloseRunResponse()

    async def Follow(
        self, request_iterator: AsyncIterator[rollout_pb2.FollowRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.FollowResponse]:
        """A part of the engine that this instance leads."""
        async for first in request_iterator:
            run, hosts = self._opened(common_pb2.CommandHeader(run=first.run)), self._hosts
            if hosts is None:
                reason = f"run: this instance leads no engine of {run.name}"
                raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER", reason)
            async with aclosing(hosts.serve(first, request_iterator)) as responses:
                async for response in responses:
                    yield response
            break

    async def _build(self, name: str, config: RolloutConfig, place: Place | None = None) -> OpenedRun:
        shm_dir, token = self._instance.config.shm_dir, self._instance.token
        opening = asyncio.to_thread(open_run, name, config, self._leased, shm_dir, token, place)
        building = asyncio.ensure_future(opening)
        try:
            run = await asyncio.shield(building)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: what it builds is released before the run counts as closed.
            await (await building).close()
            raise
        self._run, self._hosts = run, place.hosts if place else None
        if isinstance(run, OnlineRun):
            run.desk.mark = mark_of(await self._endpoint.url())
            self._endpoint.desk = run.desk
        self._caches.blobs.address = self._instance.address
        run.retention.blobs = self._caches.blobs
        await self._place()
        return run

    async def _end(self) -> None:
        """Ends the run's streams with their partial outputs, then frees engine, weights and trajectories."""
        run, self._run, self._hosts = self._run, None, None
        if run is None:
            return
        self._endpoint.desk = None
        await run.engine.abort(None)
        await run.end_streams()
        async with self._changing:  # An install at work ends first: what it receives must not stay.
            await self._endpoint.close()
            await run.close()
            run.retention.clear()
            for name in (run.name, base_name(run.name)):
                self._instance.weights.keep(name, set())

    async def Generate(
        self, request_iterator: AsyncIterator[rollout_pb2.GenerateRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Fills groups; see Generation."""
        opening = await _opening(request_iterator)
        run = self._ready_run(opening).text
        stream = Generation(run, opening, self._serving(run))
        async for response in self._serve(run, stream, request_iterator):
            yield response

    async def RunEpisodes(
        self, request_iterator: AsyncIterator[rollout_pb2.RunEpisodesRequest], context: Context
    ) -> AsyncIterator[rollout_pb2.RunEpisodesResponse]:
        """Runs episodes, as the workload of the run's policy does."""
        opening = await _opening(request_iterator)
        run = self._ready_run(opening)
        stream = run.run_episodes(opening, self._serving(run))
        async for response in self._serve(run, stream, request_iterator):
            yield response

    def _ready_run(self, opening: Opening) -> OpenedRun:
        """The run that a stream opens on, with the version that it names."""
        self._instance.fence.check(opening.header, lease=True)
        run = self._opened(opening.header)
        with refusals():
            _check_ready(run, opening.policy_number)
        self._instance.open_runs.applied(opening.header)
        return run

    def _serving(self, run: OpenedRun) -> Serving:
        instance = self._instance
        return Serving(
            instance.config.incarnation,
            instance.fence,
            lambda: self._report(run),
            self._caches,
            self._endpoint,
        )

    async def _serve(
        self, run: OpenedRun, stream: SampleStream[Any, ResponseT], requests: AsyncIterator[Any]
    ) -> AsyncIterator[ResponseT]:
        async with aclosing(stream.responses(requests)) as responses:
            async for response in responses:
                yield response
        self._report(run, now=True)

    async def Score(self, request: rollout_pb2.ScoreRequest, context: Context) -> rollout_pb2.ScoreResponse:
        """Log-probs of given tokens; RAW asks for the model's own distribution."""
        self._instance.fence.check(request.header, lease=True)
        run = self._opened(request.header).text
        check_enum("distribution.log_prob_kind", common_pb2.LogProbKind, request.distribution.log_prob_kind)
        check_number("top", request.top)
        wanted = request.distribution
        if wanted.log_prob_kind == common_pb2.LOG_PROB_KIND_RAW:
            wanted = common_pb2.SamplingDistribution(temperature=1.0)
        sequences = [(list(sequence.token_ids), sequence.start) for sequence in request.sequences]
        top = await self._top(run, sequences, request) if request.top else [[] for _ in sequences]
        with refusals():
            scored, number = await run.engine.score(
                sequences, distribution_of(wanted), self._authority(request.header)
            )
        return rollout_pb2.ScoreResponse(
            sequences=[
                rollout_pb2.ScoredSequence(log_probs=values, top=likeliest)
                for values, likeliest in zip(scored, top, strict=True)
            ],
            policy_number=number,
        )

    async def _top(
        self, run: TextRun, sequences: list[tuple[list[int], int]], request: rollout_pb2.ScoreRequest
    ) -> list[list[rollout_pb2.TopTokens]]:
        """The likeliest ids of each position that is scored."""
        if not (run.engine.capabilities.likeliest and isinstance(run.engine, TellsLikeliest)):
            name = run.config.rollout.engine
            reason = f"rollout.engine: {name} does not tell the likeliest tokens; use transformers or vllm"
            raise ServiceError(grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", reason)
        with refusals():
            found = await run.engine.likeliest(sequences, request.top, self._authority(request.header))
        return [
            [rollout_pb2.TopTokens(token_ids=ids, log_probs=values) for ids, values in own] for own in found
        ]

    async def InstallPolicy(
        self, request: rollout_pb2.InstallPolicyRequest, context: Context
    ) -> rollout_pb2.InstallPolicyResponse:
        """Takes, verifies and swaps a version; what is installed already moves no byte."""
        self._instance.fence.check(request.header, lease=True)
        run, version = self._opened(request.header), request.version
        if version.number < 1 or not (version.digest or request.HasField("files")):
            raise invalid("version: give a number from 1 and the manifest's digest")
        return await self._installer.install(run, request, self._authority(request.header))

    async def Pause(self, request: rollout_pb2.PauseRequest, context: Context) -> rollout_pb2.PauseResponse:
        """Stops decoding; partial outputs go out on their streams."""
        self._instance.fence.check(request.header, lease=False)
        run = self._opened(request.header)
        stopped = await run.engine.pause()
        run.stop_waiting()
        return rollout_pb2.PauseResponse(partial_count=stopped)

    async def Resume(
        self, request: rollout_pb2.ResumeRequest, context: Context
    ) -> rollout_pb2.ResumeResponse:
        """Goes on after Pause."""
        self._instance.fence.check(request.header, lease=False)
        with refusals():
            await self._opened(request.header).engine.resume()
        return rollout_pb2.ResumeResponse()

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Context) -> rollout_pb2.AbortResponse:
        """Ends samples with their partial outputs."""
        self._instance.fence.check(request.header, lease=False)
        keys, run = keys_of(request.samples) or None, self._opened(request.header)
        stopped = await run.engine.abort(keys)
        run.stop_waiting()
        return rollout_pb2.AbortResponse(aborted_count=stopped)

    def _release_weights(self, run: OpenedRun) -> None:
        for name in (run.name, base_name(run.name)):
            self._instance.weights.release(name)

    async def Suspend(
        self, request: rollout_pb2.SuspendRequest, context: Context
    ) -> rollout_pb2.SuspendResponse:
        """Gives the memory of weights and cache back."""
        self._instance.fence.check(request.header, lease=False)
        run = self._opened(request.header)
        with refusals():
            self._release_weights(run)
            freed = await run.engine.suspend()
        return rollout_pb2.SuspendResponse(
            released_bytes=freed.released_bytes, free_memory_bytes=freed.free_bytes
        )

    async def Wake(self, request: rollout_pb2.WakeRequest, context: Context) -> rollout_pb2.WakeResponse:
        """Takes memory again."""
        self._instance.fence.check(request.header, lease=True)
        check_enum("scope", rollout_pb2.WakeScope, request.scope)
        with refusals():
            await self._opened(request.header).engine.wake(
                SCOPES[request.scope], self._authority(request.header)
            )
        return rollout_pb2.WakeResponse()

    async def ListInventory(
        self, request: rollout_pb2.ListInventoryRequest, context: Context
    ) -> rollout_pb2.ListInventoryResponse:
        """What is retained."""
        self._instance.fence.check(request.header, lease=False)
        return rollout_pb2.ListInventoryResponse(items=self._opened(request.header).retention.items())

    async def FetchTrajectories(
        self, request: rollout_pb2.FetchTrajectoriesRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.FetchTrajectoriesResponse]:
        """Trajectories that are retained, in responses of bounded size."""
        self._instance.fence.check(request.header, lease=False)
        for response in self._opened(request.header).retention.fetch(request.samples, RESPONSE_BYTES):
            yield response

    async def ReleaseTrajectories(
        self, request: rollout_pb2.ReleaseTrajectoriesRequest, context: Context
    ) -> rollout_pb2.ReleaseTrajectoriesResponse:
        """Ends retention."""
        self._instance.fence.check(request.header, lease=False)
        self._opened(request.header).retention.release(request.samples)
        return rollout_pb2.ReleaseTrajectoriesResponse()

    async def on_grant(self, lease: common_pb2.Lease) -> None:
        """Computes on the leased devices from now on."""
        self._leases[lease.epoch] = tuple(lease.devices)
        try:
            await self._place()
            bound_memory(devices_of(lease.devices), lease.memory_part or 1.0)
        except ServiceError:
            del self._leases[lease.epoch]
            raise

    async def on_revoke(self, epoch: int, notice_s: float, keep: bool = False) -> Memory:
        """Ends the lease's streams with their partial outputs and gives the memory back; what was measured then.

        `keep`: weights and cache stay, for another lease to go on with; until then one thread is all that it has.
        """
        devices = self._leases.pop(epoch, ())
        run = self._run
        if run is not None:
            await run.revoke_streams(epoch, notice_s)
        await self._place()
        if run is None:
            return host_memory()
        used = 0
        if not self._leases and not keep:
            self._release_weights(run)
            used = (await run.engine.release()).used_bytes
        return await asyncio.to_thread(memory_on, devices, used)

    async def on_quiesce(self, epoch: int) -> None:
        """The lease was not renewed in time: no new token, and the fence admits none; memory stays."""
        if self._run is not None:
            await self._run.engine.abort(None)

    async def on_drain(self, grace_s: float) -> None:
        """Sends partial outputs, so that others go on."""
        if self._run is not None:
            await self._run.engine.pause()
            self._run.stop_waiting()

    @property
    def _leased(self) -> list[str]:
        """Devices of all leases, those of the oldest first."""
        return [name for epoch in sorted(self._leases) for name in self._leases[epoch]]

    async def _place(self) -> None:
        """The engine uses the leased devices; without any it stays where it is, on one thread."""
        leased = self._leased
        threads = bind_cpu(leased) if leased else 1
        if self._run is not None:
            await self._run.engine.place(devices_of(leased), threads)

    def _authority(self, header: common_pb2.CommandHeader) -> Authority:
        """Asks the command's lease again, right before the effect."""
        return partial(self._instance.fence.check_lease, header.lease_epoch)

    def _opened(self, header: common_pb2.CommandHeader) -> OpenedRun:
        if self._run is None or self._run.name != header.run:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NOT_OPEN",
                f"{header.run!r} is not open here; call OpenRun first",
            )
        return self._run

    def _report(self, run: OpenedRun, *, now: bool = False) -> None:
        if now or time.monotonic() - self._reported > REPORT_EVERY_S:
            self._reported = time.monotonic()
            if (metrics := run.metrics()) is not None:
                self._instance.report(metrics)


async def _opening(requests: AsyncIterator[Any]) -> Any:
    async for request in requests:
        if request.WhichOneof("message") == "open":
            return request.open
        break
    raise invalid("a stream of samples begins with its opening")


def _check_ready(run: OpenedRun, number: int) -> None:
    require_installed(run.engine.policy, number, oldest_of(run.engine))
    if run.engine.paused:
        raise Refused("PAUSED", "the engine is paused; call Resume first")
