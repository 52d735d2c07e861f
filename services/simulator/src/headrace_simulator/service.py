"""gRPC ⇄ pools: translates messages and errors, decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import grpc
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_schema.images import MOST_PROMPT_IMAGE_BYTES
from headrace_schema.stores import remote_paths, with_paths
from headrace_servicekit.instance import Instance, host_memory
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.memory.blobs import BlobStore
from headrace_servicekit.process.local import LocalStreams, in_time, requests_of
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import (
    accept,
    check_enum,
    check_name,
    check_page,
    check_seconds,
    json_object,
)
from headrace_servicekit.rpc.streams import unordered
from headrace_servicekit.stores.files import local
from headrace_servicekit.stores.problems import StoreProblem

from headrace_simulator.batches import check_batch
from headrace_simulator.config import SimulatorSettings
from headrace_simulator.pools.gathering import Authority, Outcomes
from headrace_simulator.pools.host import ROBOT, HostFault, HostLost
from headrace_simulator.pools.open_pools import Conflict, Pools, TooMany
from headrace_simulator.pools.pool import EnvironmentPool, PoolPlan

Context = grpc.aio.ServicerContext[Any, Any]
_IN_FLIGHT = 2048
_LINGER_S = 0.002
"""Outcomes of environments that take this much longer than the first still go into its message."""
_PAGE = 50
_Shown = TypeVar("_Shown", common_pb2.Tensor, bytes)


class SimulatorServicer(simulator_pb2_grpc.SimulatorServiceServicer):
    """Serves SimulatorService. `catalogue` lists (backend, name) of what can be opened."""

    def __init__(
        self,
        instance: Instance,
        pools: Pools,
        catalogue: list[tuple[str, str]],
        settings: SimulatorSettings,
        blobs: BlobStore,
        local: LocalStreams,
    ) -> None:
        self._blobs, self._local = blobs, local
        self._instance, self._pools, self._settings = instance, pools, settings
        self._revoked: set[int] = set()
        self._catalogue = [
            simulator_pb2.Environment(backend=backend, name=name) for backend, name in catalogue
        ]

    async def on_grant(self, lease: common_pb2.Lease) -> None:
        """The pools of the lease's run act on its devices."""
        self._revoked = {epoch for epoch in self._revoked if self._instance.fence.holds(epoch)}
        self._pools.lease(lease.epoch, lease.run, lease.devices, lease.memory_part or 1.0)

    async def on_revoke(self, epoch: int, notice_s: float, keep: bool = False) -> Memory:
        """Ends what runs under leases, by force after the notice; pools stay, for another lease to go on with."""
        self._revoked.add(epoch)
        await self._pools.settle(epoch, notice_s)
        # This process uses no GPU, and the children that did have ended: what it measures is the host's memory.
        return Memory(free_bytes=host_memory().free_bytes)

    async def ListEnvironments(
        self, request: simulator_pb2.ListEnvironmentsRequest, context: Context
    ) -> simulator_pb2.ListEnvironmentsResponse:
        """A page of the catalogue; the token is the position of the next entry."""
        begin = check_page(request.page_size, request.page_token)
        end = begin + (request.page_size or _PAGE)
        more = str(end) if end < len(self._catalogue) else ""
        page = self._catalogue[begin:end]
        return simulator_pb2.ListEnvironmentsResponse(environments=page, next_page_token=more)

    async def OpenPool(
        self, request: simulator_pb2.OpenPoolRequest, context: Context
    ) -> simulator_pb2.OpenPoolResponse:
        """Opens a pool."""
        leased = bool(request.header.lease_epoch)
        self._instance.fence.check(request.header, lease=leased, opening=False)
        # A repeated request must not open a second pool.
        check_name("header.request_id", request.header.request_id)
        run, plan = (
            check_name("header.run", request.header.run, optional=True),
            _plan(request, self._settings),
        )
        self._blobs.address = self._instance.address
        # The first pool of a run opens the run here; a higher open_id closes the pools of the opening before.
        await self._instance.open_run(request.header, None, _ready, lambda: self._pools.close_run(run))
        try:
            self._check_robot(plan)
            plan = await asyncio.to_thread(_fetched, plan)
            pool = await self._pools.open(run, request.header.request_id, plan)
        except StoreProblem as problem:
            raise _invalid(f"{problem.key}: {problem}", key=problem.key) from problem
        except HostFault as fault:
            raise _invalid(f"{fault.field}: {fault.message}", key=fault.field) from fault
        except HostLost as lost:
            message = f"environment.name: {request.environment.name} cannot be made: {lost}"
            raise _invalid(message, key="environment.name") from lost
        except Conflict as conflict:
            raise ServiceError(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT", str(conflict)) from conflict
        except TooMany as too_many:
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY", str(too_many)) from too_many
        finally:
            await self._close_without_pools(run)
        return pool.description

    async def Step(
        self, request_iterator: AsyncIterator[simulator_pb2.StepRequest], context: Context
    ) -> AsyncIterator[simulator_pb2.StepResponse]:
        """Runs operations; outcomes go out as they come, several in a message where several are ready."""
        async with aclosing(self._stepped(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def StepLocally(
        self, request: simulator_pb2.StepLocallyRequest, context: Context
    ) -> AsyncIterator[simulator_pb2.StepLocallyResponse]:
        """The same over a socket, for a caller on this host."""
        self._pool(request.pool)
        if self._local.why_not:
            yield simulator_pb2.StepLocallyResponse(why_not=self._local.why_not)
            return
        with self._local.expected() as (ticket, joined):
            yield simulator_pb2.StepLocallyResponse(socket_path=str(self._local.path), ticket=ticket)
            stream = await in_time(joined)
            requests = requests_of(stream, simulator_pb2.StepRequest.FromString, "StepLocally")
            async with aclosing(self._stepped(requests)) as responses:
                async for response in responses:
                    accept()
                    await stream.write(response.SerializeToString())

    async def _stepped(
        self, requests: AsyncIterator[simulator_pb2.StepRequest]
    ) -> AsyncGenerator[simulator_pb2.StepResponse]:
        header: common_pb2.CommandHeader | None = None

        def expand(request: simulator_pb2.StepRequest) -> Iterator[asyncio.Future[Outcomes]]:
            nonlocal header
            anew = header is None or request.HasField("header")
            if anew:
                self._instance.fence.check(request.header, lease=bool(request.header.lease_epoch))
                header = request.header
            pool = self._pool(request.pool)
            if anew and pool.plan.leased:
                self._instance.fence.check_lease(request.header.lease_epoch)
            if request.pool_incarnation != pool.incarnation:
                raise ServiceError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "INCARNATION_STALE",
                    f"pool_incarnation: {pool.name} is now {pool.incarnation}; open a pool again and reset",
                )
            check_batch(request.batch)
            indices = [*request.batch.environments, *(each.environment for each in request.operations)]
            if len(set(indices)) < len(indices):
                raise _invalid("operations: at most one an environment in one message")
            assert header is not None
            return pool.perform(request, self._authority(pool, header))

        async for batches in unordered(requests, expand, _IN_FLIGHT, _LINGER_S):
            response, size = simulator_pb2.StepResponse(), 0
            for whole in batches:
                if isinstance(whole, simulator_pb2.StepResponse):
                    yield whole
            apart = [each for each in batches if isinstance(each, list)]
            for outcome in chain.from_iterable(apart):
                own = sum(len(image.data) for message in outcome.messages for image in message.images)
                if size and size + own > MOST_PROMPT_IMAGE_BYTES:  # gRPC refuses messages of 64 MiB
                    yield response
                    response, size = simulator_pb2.StepResponse(), 0
                response.outcomes.append(outcome)
                size += own
            if apart:
                yield response

    async def Render(
        self, request: simulator_pb2.RenderRequest, context: Context
    ) -> simulator_pb2.RenderResponse:
        """Renders environments, in the order asked."""
        pool = self._pool(request.pool)
        response = simulator_pb2.RenderResponse()
        for index in request.environments:
            if not 0 <= index < pool.plan.count:
                raise _invalid(f"environments: {index} is not below the pool's count of {pool.plan.count}")
            if request.video:
                response.videos.append(await _shown(pool, index, "video", pool.video))
            else:
                response.frames.append(await _shown(pool, index, "picture", pool.render))
        return response

    async def ClosePool(
        self, request: simulator_pb2.ClosePoolRequest, context: Context
    ) -> simulator_pb2.ClosePoolResponse:
        """Closes a pool and kills its processes; without a name, every pool of the run."""
        if request.pool:
            # Pools are closed by name, also after the run was opened anew or closed.
            self._instance.fence.check(request.header, lease=False, opening=False)
            await self._pools.close(request.pool)
            await self._close_without_pools(request.header.run)
        else:
            await self._instance.close_run(request.header)
        return simulator_pb2.ClosePoolResponse()

    def _check_robot(self, plan: PoolPlan) -> None:
        """Whoever may open pools could else have a robot's host run what its limits do not hold."""
        if self._settings.robot and plan.backend != ROBOT:
            reason = f"this host has a robot, {self._settings.robot}, and opens nothing else; write {ROBOT}"
            raise _invalid(f"environment.backend: {plan.backend!r}: {reason}", key="environment.backend")

    async def _close_without_pools(self, run: str) -> None:
        """A run whose last pool is closed, or could not be opened, is not open; its opening may open another."""
        if run not in self._pools.runs():
            await self._instance.open_runs.close(common_pb2.CommandHeader(run=run))

    def _authority(self, pool: EnvironmentPool, header: common_pb2.CommandHeader) -> Authority:
        """Asks the command's lease again, right before the effect."""
        epoch = header.lease_epoch

        def why_not() -> str | None:
            if not epoch and not pool.plan.leased:
                return None
            if epoch in self._revoked:
                return f"lease epoch {epoch} is being revoked"
            try:
                self._instance.fence.check_lease(epoch)
            except ServiceError as refusal:
                return refusal.message
            return None

        return why_not

    def _pool(self, name: str) -> EnvironmentPool:
        pool = self._pools.get(name)
        if pool is None:
            message = f"pool: {name!r} is not open here; call OpenPool first"
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", message)
        return pool


async def _ready() -> None:
    return


async def _shown(
    pool: EnvironmentPool, index: int, what: str, show: Callable[[int], Awaitable[_Shown]]
) -> _Shown:
    try:
        return await show(index)
    except (HostFault, HostLost) as error:
        message = f"environment {index} of {pool.name} gives no {what}: {error}"
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "NO_PICTURE", message) from error


def _plan(request: simulator_pb2.OpenPoolRequest, settings: SimulatorSettings) -> PoolPlan:
    if request.count < 1:
        raise _invalid("count: open at least one environment", key="count")
    for field in ("max_episode_steps", "processes", "blob_bytes"):
        if getattr(request, field) < 0:
            raise _invalid(f"{field}: give 0 or more", key=field)
    check_enum("reward_mode", simulator_pb2.RewardMode, request.reward_mode)
    for field in ("backend", "name"):
        check_name(f"environment.{field}", getattr(request.environment, field), optional=field == "backend")
    options = json_object("options_json", request.options_json)
    timeout_s = check_seconds("step_timeout", request.step_timeout)
    return PoolPlan(
        backend=request.environment.backend,
        environment=request.environment.name,
        count=request.count,
        options=options,
        seed=request.seed,
        max_episode_steps=request.max_episode_steps,
        step_timeout_s=timeout_s or settings.step_timeout_s,
        dense=request.reward_mode == simulator_pb2.REWARD_MODE_DENSE,
        sparse=request.reward_mode == simulator_pb2.REWARD_MODE_SPARSE,
        auto_reset=request.auto_reset,
        processes=request.processes,
        blob_bytes=request.blob_bytes,
        without_info=request.without_info,
        leased=request.leased or bool(request.header.lease_epoch),
        vectorized=request.vectorized,
        variables=tuple(request.variables),
    )


def _fetched(plan: PoolPlan) -> PoolPlan:
    """The plan with local paths in place of its options' addresses of stores. Raises StoreProblem with its key."""
    places: dict[str, str] = {}
    for key, url in remote_paths(plan.options):
        try:
            places[url] = str(local(url))
        except StoreProblem as problem:
            problem.key = f"options_json.{key}"
            raise
    return replace(plan, options=with_paths(plan.options, places.__getitem__))


def _invalid(message: str, **metadata: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message, **metadata)
