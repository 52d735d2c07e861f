"""Instances over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from headrace.reward.v1 import reward_pb2_grpc
from headrace.rollout.v1 import rollout_pb2_grpc
from headrace.simulator.v1 import simulator_pb2_grpc
from headrace.trainer.v1 import trainer_pb2_grpc
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of, metadata_of, reason_of
from typing_extensions import override

from headrace_coordinator.fleet.instance_client import CallRefused, InstanceClient, InstanceDown

_STUBS: dict[str, Any] = {
    "rollout": rollout_pb2_grpc.RolloutServiceStub,
    "trainer": trainer_pb2_grpc.TrainerServiceStub,
    "reward": reward_pb2_grpc.RewardServiceStub,
    "simulator": simulator_pb2_grpc.SimulatorServiceStub,
}
QUIESCED_RETRY_S = 0.2
_GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


class GrpcInstanceClient(InstanceClient):
    """Calls one instance over one channel."""

    def __init__(self, kind: str, address: str, incarnation: str, token: str | None) -> None:
        self._stub = _STUBS[kind](dial(address, token=token))
        self._incarnation = incarnation

    @override
    async def call(self, method: str, request: Any, timeout: float) -> Any:
        # A lease that was not renewed in time, because one of both processes stood still, is waited for.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                return await getattr(self._stub, method)(request, timeout=max(0.1, deadline - loop.time()))
            except grpc.aio.AioRpcError as error:
                if reason_of(error) != "LEASE_QUIESCED" or loop.time() + QUIESCED_RETRY_S > deadline:
                    raise self._fault(method, error) from error
            await asyncio.sleep(QUIESCED_RETRY_S)

    @override
    async def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        call = getattr(self._stub, method)(sent, timeout=timeout)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._fault(method, error) from error
        finally:
            call.cancel()

    def _fault(self, method: str, error: grpc.aio.AioRpcError) -> Exception:
        if error.code() in _GONE:
            return InstanceDown(self._incarnation, f"{method}: {error.code().name} {error.details()}")
        reason = reason_of(error) or error.code().name
        key = metadata_of(error).get("key", "")
        return CallRefused(self._incarnation, reason, f"{method}: {message_of(error)}", key)
