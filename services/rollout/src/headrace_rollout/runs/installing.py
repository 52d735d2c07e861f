"""Installs the versions of an open run's policy: those of a trainer, and those read from files."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights import ReceivedWeights, WeightStore, receive_base, receive_weights

from headrace_rollout.engines.base import Authority, Policy, Weights
from headrace_rollout.runs.opened import OpenedRun
from headrace_rollout.wire import duration_of, refusals, weights_of


class PolicyInstaller:
    """Installs under `changing`, one version at a time. `store` receives what trainers have published.

    Raises ServiceError: the engine's refusal, WEIGHTS_MISMATCH, or why the weights could not be received or read.
    """

    def __init__(self, store: WeightStore, token: str | None, changing: asyncio.Lock) -> None:
        self._store, self._token, self._changing = store, token, changing

    async def receive(
        self, run: OpenedRun, request: rollout_pb2.InstallPolicyRequest, authority: Authority
    ) -> rollout_pb2.InstallPolicyResponse:
        """Takes a trainer's version, verifies and swaps it; what is installed already moves no byte."""
        version, started = request.version, time.perf_counter()
        policy = Policy(version.number, version.digest)
        async with self._changing:
            with refusals():
                if await run.engine.check_install(policy, in_flight=request.in_flight):
                    return rollout_pb2.InstallPolicyResponse(version=version)
                received, weights = await self._take(run, request)
                transfer_s = time.perf_counter() - started
                lent = self._store.lent.get((run.name, version.number))
                pause_s = await _put(run, policy, weights, authority, in_flight=request.in_flight)
                if lent is not None:
                    self._store.lent.pop((run.name, version.number)).end()
            self._store.keep(run.name, {version.number})
        return _installed(version, received, transfer_s, pause_s)

    async def prefetch(
        self, run: OpenedRun, request: rollout_pb2.InstallPolicyRequest
    ) -> rollout_pb2.InstallPolicyResponse:
        """Takes and verifies a trainer's version beside the engine's work; a later `receive` finds it here."""
        version, started = request.version, time.perf_counter()
        async with self._changing:
            received, _ = await self._take(run, request)
            installed = run.engine.policy
            self._store.keep(run.name, {version.number, installed.number if installed else version.number})
        return _installed(version, received, time.perf_counter() - started, 0.0)

    async def _take(
        self, run: OpenedRun, request: rollout_pb2.InstallPolicyRequest
    ) -> tuple[ReceivedWeights, Weights]:
        """How a version came, and all of its weights: of adapters with the frozen ones, which come before the first."""
        manifest, ways, base = request.manifest, run.ways, None
        if manifest.HasField("adapter"):
            base = await receive_base(
                self._store, run.name, manifest.adapter, request.sources, token=self._token, ways=ways
            )
        received = await receive_weights(
            self._store,
            run.name,
            request.version,
            manifest,
            request.sources,
            token=self._token,
            ways=ways,
        )
        if base is None:
            lent = self._store.lent.get((run.name, request.version.number))
            return received, weights_of(manifest, received.body, received.path, lent)
        weights = weights_of(manifest, received.body, received.path)  # few bytes: the host's are merged
        from headrace_rollout.engines.merging import adapted

        below = weights_of(base.stored.manifest, base.stored.body, base.stored.path)
        moved, failed = received.bytes_moved + base.bytes_moved, [*base.fallbacks, *received.fallbacks]
        try:
            whole = adapted(below, weights, manifest.adapter.scales)
            if not (run.config.adapters or run.config.policies):
                whole = whole.of("")
        except ValueError as error:
            raise _mismatch(error) from error
        return replace(received, bytes_moved=moved, fallbacks=failed), whole

    async def read_files(
        self, run: OpenedRun, request: rollout_pb2.InstallPolicyRequest, authority: Authority
    ) -> rollout_pb2.InstallPolicyResponse:
        """Reads, casts and swaps weights that no trainer has published."""
        from headrace_rollout.runs.policy_files import read_policy

        version, checkpoint, started = request.version, request.files.checkpoint, time.perf_counter()
        async with self._changing:
            installed = run.engine.policy
            if installed is not None and installed.number == version.number:
                version.digest = installed.digest
                return rollout_pb2.InstallPolicyResponse(version=version)
            manifest, body = await asyncio.to_thread(
                read_policy, run.config, checkpoint, version.digest, request.files.policy
            )
            read_s = time.perf_counter() - started
            version.digest = manifest.digest
            policy = Policy(version.number, version.digest)
            with refusals():
                pause_s = await _put(
                    run, policy, weights_of(manifest, body), authority, in_flight=request.in_flight
                )
        return rollout_pb2.InstallPolicyResponse(
            version=version, transfer_time=duration_of(read_s), pause_time=duration_of(pause_s)
        )


def _installed(
    version: common_pb2.PolicyVersion, received: ReceivedWeights, transfer_s: float, pause_s: float
) -> rollout_pb2.InstallPolicyResponse:
    return rollout_pb2.InstallPolicyResponse(
        version=version,
        transport=received.transport,
        bytes_moved=received.bytes_moved,
        transfer_time=duration_of(transfer_s),
        pause_time=duration_of(pause_s),
        fallbacks=received.fallbacks,
    )


async def _put(
    run: OpenedRun, policy: Policy, weights: Weights, authority: Authority, *, in_flight: bool
) -> float:
    try:
        return await run.engine.install(policy, weights, authority, in_flight=in_flight)
    except ValueError as error:
        raise _mismatch(error) from error


def _mismatch(error: ValueError) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "WEIGHTS_MISMATCH", str(error))
