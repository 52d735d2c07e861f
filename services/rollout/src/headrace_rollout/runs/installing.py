"""Installs the versions of an open run's policy: those of a trainer, and those read from files."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc
from headrace.rollout.v1 import rollout_pb2
from headrace_schema.workflow import SESSION
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.receiving import ReceivedWeights, receive_base, receive_weights
from headrace_servicekit.weights.store import WeightStore

from headrace_rollout.engines.base import Authority, Policy, Weights
from headrace_rollout.runs.opened import OpenedRun
from headrace_rollout.wire import duration_of, refusals, weights_of


class PolicyInstaller:
    """Installs under `changing`, one version at a time. `store` receives what trainers have published."""

    def __init__(self, store: WeightStore, token: str | None, changing: asyncio.Lock) -> None:
        self._store, self._token, self._changing = store, token, changing

    async def install(
        self, run: OpenedRun, request: rollout_pb2.InstallPolicyRequest, authority: Authority
    ) -> rollout_pb2.InstallPolicyResponse:
        """Takes a version, verifies and swaps it; what is installed already moves no byte.

        With `prefetch` it is taken beside the engine's work, and a later call, which finds it here, swaps it.

        Raises ServiceError: the engine's refusal, WEIGHTS_MISMATCH, or why the weights could not be received or read.
        """
        version, from_files = request.version, request.HasField("files")
        prefetch = request.prefetch and not from_files
        response, started = rollout_pb2.InstallPolicyResponse(), time.perf_counter()
        async with self._changing:
            with refusals():
                if not prefetch and await _is_installed(run, request):
                    return rollout_pb2.InstallPolicyResponse(version=version)
                if from_files:
                    weights = await _read(run, request)
                else:
                    received, weights = await self._take(run, request)
                    response.transport, response.bytes_moved = received.transport, received.bytes_moved
                    response.fallbacks.extend(received.fallbacks)
                response.transfer_time.CopyFrom(duration_of(time.perf_counter() - started))
                kept = {version.number}
                if not prefetch:
                    pause_s = await _swap(run, request, weights, authority)
                    response.pause_time.CopyFrom(duration_of(pause_s))
                    if (lent := self._store.lent.pop((run.name, version.number), None)) is not None:
                        lent.end()
                elif (installed := run.engine.policy) is not None:
                    kept.add(installed.number)
            if not from_files:
                self._store.keep(run.name, kept)
        response.version.CopyFrom(version)
        return response

    async def _take(
        self, run: OpenedRun, request: rollout_pb2.InstallPolicyRequest
    ) -> tuple[ReceivedWeights, Weights]:
        """How a version came, and all of its weights: of adapters with the frozen ones, which come before the first."""
        store, name, manifest, sources = self._store, run.name, request.manifest, request.sources
        token, ways, base = self._token, run.ways, None
        if manifest.HasField("adapter"):
            base = await receive_base(store, name, manifest.adapter, sources, token=token, ways=ways)
        received = await receive_weights(
            store, name, request.version, manifest, sources, token=token, ways=ways
        )
        if base is None:
            lent = store.lent.get((name, request.version.number))
            return received, weights_of(manifest, received.body, received.path, lent)
        weights = weights_of(manifest, received.body, received.path)  # few bytes: the host's are merged
        from headrace_rollout.engines.merging import adapted

        below = weights_of(base.stored.manifest, base.body, base.path)
        try:
            whole = adapted(below, weights, manifest.adapter.scales)
            if not (run.config.adapters or run.config.policies):
                whole = whole.of("")
        except ValueError as error:
            raise _mismatch(error) from error
        moved, failed = received.bytes_moved + base.bytes_moved, [*base.fallbacks, *received.fallbacks]
        return replace(received, bytes_moved=moved, fallbacks=failed), whole


async def _is_installed(run: OpenedRun, request: rollout_pb2.InstallPolicyRequest) -> bool:
    """Whether the engine has the version; of files it is known by its number. Raises Refused."""
    version, installed = request.version, run.engine.policy
    if not request.HasField("files"):
        return await run.engine.check_install(_policy(run, request), in_flight=request.in_flight)
    if installed is None or installed.number != version.number:
        return False
    version.digest = installed.digest
    return True


async def _read(run: OpenedRun, request: rollout_pb2.InstallPolicyRequest) -> Weights:
    """Weights that no trainer has published; the version gets their digest."""
    from headrace_rollout.runs.policy_files import read_policy

    version, files = request.version, request.files
    manifest, body = await asyncio.to_thread(
        read_policy, run.config, files.checkpoint, version.digest, files.policy
    )
    version.digest = manifest.digest
    return weights_of(manifest, body)


async def _swap(
    run: OpenedRun, request: rollout_pb2.InstallPolicyRequest, weights: Weights, authority: Authority
) -> float:
    """Seconds for which the engine stood still. Raises Refused, and ServiceError WEIGHTS_MISMATCH."""
    try:
        return await run.engine.install(
            _policy(run, request), weights, authority, in_flight=request.in_flight
        )
    except ValueError as error:
        raise _mismatch(error) from error


def _policy(run: OpenedRun, request: rollout_pb2.InstallPolicyRequest) -> Policy:
    return Policy(request.version.number, request.version.digest, run.config.workflow == SESSION)


def _mismatch(error: ValueError) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "WEIGHTS_MISMATCH", str(error))
