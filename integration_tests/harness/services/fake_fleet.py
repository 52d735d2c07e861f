"""The coordinator's side of an instance's lifeline, with no will of its own: it grants what a test says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc

from harness.waiting import wait_for

RUN = "runs/by-hand"


class FakeFleet(fleet_pb2_grpc.FleetServiceServicer):  # type: ignore[misc]
    """A FleetService on a free port; as a context manager it serves inside the block."""

    def __init__(
        self, *, coordinator_epoch: int = 1, lease_ttl_s: int = 600, heartbeat_ms: int = 200
    ) -> None:
        self.coordinator_epoch = coordinator_epoch
        self.registered: dict[str, fleet_pb2.RegisterRequest] = {}
        self.held: dict[int, str] = {}
        self.released: set[int] = set()
        self.renews = True
        self._reports: dict[str, list[common_pb2.OpenRunReport]] = {}
        self._lease_ttl_s, self._heartbeat = lease_ttl_s, Duration()
        self._heartbeat.FromMilliseconds(heartbeat_ms)
        self._outboxes: dict[str, queue.Queue[Any]] = {}
        self._server = grpc.server(ThreadPoolExecutor(16))
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for outbox in self._outboxes.values():
            outbox.put(None)
        self._server.stop(1).wait()

    def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterResponse:
        """Takes everybody."""
        self.registered[request.instance] = request
        return fleet_pb2.RegisterResponse(
            coordinator_epoch=self.coordinator_epoch,
            heartbeat_interval=self._heartbeat,
            lease_ttl=Duration(seconds=self._lease_ttl_s),
        )

    def Session(
        self, request_iterator: Iterator[fleet_pb2.SessionRequest], context: Any
    ) -> Iterator[fleet_pb2.SessionResponse]:
        """Acknowledges heartbeats, renews every lease while it `renews`, and sends what the test says."""
        outbox: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._hear, args=(request_iterator, outbox), daemon=True).start()
        while (message := outbox.get()) is not None:
            yield message

    def _hear(self, requests: Iterator[fleet_pb2.SessionRequest], outbox: queue.Queue[Any]) -> None:
        try:
            for message in requests:
                self._outboxes[message.incarnation] = outbox
                self._take(message, outbox)
        except grpc.RpcError:
            pass  # the instance went away
        outbox.put(None)

    def _take(self, message: fleet_pb2.SessionRequest, outbox: queue.Queue[Any]) -> None:
        match message.WhichOneof("event"):
            case "heartbeat":
                beat = message.heartbeat
                renewed = beat.lease_epochs if self.renews else ()
                ack = fleet_pb2.HeartbeatAck(sequence=beat.sequence, renewed_epochs=renewed)
                self._reports[message.incarnation] = list(beat.open_runs)
                outbox.put(fleet_pb2.SessionResponse(heartbeat_ack=ack))
            case "lease_held":
                self.held[message.lease_held.epoch] = message.lease_held.refusal
            case "lease_released":
                self.released.add(message.lease_released.epoch)

    def grant(self, instance: str, epoch: int) -> None:
        """Gives an instance all its devices; returns when it holds them."""
        outbox = self._outbox(instance)
        lease = common_pb2.Lease(
            epoch=epoch, run=RUN, stage="work", devices=self.registered[instance].devices
        )
        outbox.put(fleet_pb2.SessionResponse(grant=fleet_pb2.Grant(lease=lease)))
        wait_for(lambda: epoch in self.held, f"{instance} to hold lease {epoch}")
        assert self.held[epoch] == "", f"{instance} refused lease {epoch}: {self.held[epoch]}"

    def revoke(self, instance: str, epoch: int, notice_s: int = 20) -> None:
        """Takes a lease back; returns when the instance has released it."""
        revoke = fleet_pb2.Revoke(epoch=epoch, notice=Duration(seconds=notice_s))
        self._outbox(instance).put(fleet_pb2.SessionResponse(revoke=revoke))
        wait_for(lambda: epoch in self.released, f"{instance} to release lease {epoch}")

    def reports(self, instance: str) -> list[common_pb2.OpenRunReport]:
        """What an instance said last that it has open."""
        self._outbox(instance)
        return self._reports[self.registered[instance].incarnation]

    def _outbox(self, instance: str) -> queue.Queue[Any]:
        def look() -> queue.Queue[Any] | None:
            known = self.registered.get(instance)
            return self._outboxes.get(known.incarnation) if known else None

        return wait_for(look, f"a session of {instance}")
