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
from headrace_servicekit.recording.recorder import CallRecorder, Recorder
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
    """Calls one instance over one channel. `recorder` hears what is said, where it is recorded."""

    def __init__(
        self, kind: str, address: str, incarnation: str, token: str | None, recorder: Recorder | None = None
    ) -> None:
        self._stub = _STUBS[kind](dial(address, token=token))
        self._kind, self._incarnation = kind, incarnation
        self._recorder = recorder or Recorder()

    @override
    async def call(self, method: str, request: Any, timeout: float) -> Any:
        # A lease that was not renewed in time, because one of both processes stood still, is waited for.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        recorded = self._recorder.call(self._kind, self._incarnation, method, request)
        if recorded is not None:
            recorded.request(request)
        while True:
            try:
                response = await getattr(self._stub, method)(
                    request, timeout=max(0.1, deadline - loop.time())
                )
            except grpc.aio.AioRpcError as error:
                if reason_of(error) != "LEASE_QUIESCED" or loop.time() + QUIESCED_RETRY_S > deadline:
                    raise self._fault(method, error, recorded) from error
            else:
                if recorded is not None:
                    recorded.response(response)
                    recorded.ended()
                return response
            await asyncio.sleep(QUIESCED_RETRY_S)

    @override
    async def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        recorded: list[CallRecorder] = []
        if not hasattr(sent, "__aiter__"):
            self._begin(method, sent, recorded)
        else:
            sent = self._heard(method, sent, recorded)
        call = getattr(self._stub, method)(sent, timeout=timeout)
        try:
            async for response in call:
                for each in recorded:
                    each.response(response)
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._fault(method, error, *recorded) from error
        else:
            for each in recorded:
                each.ended()
        finally:
            call.cancel()

    def _begin(self, method: str, request: Any, recorded: list[CallRecorder]) -> None:
        """Tells a call's request; `recorded` gets the call with its first one, where it is recorded."""
        if not recorded and (call := self._recorder.call(self._kind, self._incarnation, method, request)):
            recorded.append(call)
        for each in recorded:
            each.request(request)

    async def _heard(
        self, method: str, sent: AsyncIterator[Any], recorded: list[CallRecorder]
    ) -> AsyncIterator[Any]:
        async for request in sent:
            self._begin(method, request, recorded)
            yield request

    def _fault(self, method: str, error: grpc.aio.AioRpcError, *recorded: CallRecorder | None) -> Exception:
        reason = reason_of(error) or error.code().name
        for each in recorded:
            if each is not None:
                each.ended(reason, error.details() or "")
        if error.code() in _GONE:
            return InstanceDown(self._incarnation, f"{method}: {error.code().name} {error.details()}")
        key = metadata_of(error).get("key", "")
        return CallRefused(self._incarnation, reason, f"{method}: {message_of(error)}", key)
