"""Carries out what the lease reducer decides: the fence, the service's callbacks, the messages to send.

Knows no gRPC call; a session moves its outbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import assert_never

from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2

from headrace_servicekit.lease import leases
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.errors import message_of

ACQUIRE_TIMEOUT_S = 600.0
_logger = get_logger(__name__)


@dataclass
class LeaseCallbacks:
    """What the service does about its leases; see Instance for their meaning."""

    on_grant: Callable[[common_pb2.Lease], Awaitable[None]]
    on_revoke: Callable[[int, float, bool], Awaitable[leases.Memory]]
    on_quiesce: Callable[[int], Awaitable[None]]


@dataclass
class _Outgoing:
    message: fleet_pb2.SessionRequest
    before_heartbeat: int | None = None  # the next heartbeat when it was written; its ack proves arrival


class LeaseHolder:
    """The leases of one instance. `on_failure` is called when the state of a device is unknown."""

    def __init__(
        self,
        incarnation: str,
        fence: Fence,
        now: Callable[[], float],
        callbacks: Callable[[], LeaseCallbacks],
        on_failure: Callable[[str], None],
    ) -> None:
        self.state = leases.LeaseState()
        self.wake = asyncio.Event()
        self._incarnation = incarnation
        self._fence = fence
        self._now = now
        self._callbacks = callbacks
        self._on_failure = on_failure
        self._outbox: list[_Outgoing] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, event: leases.Event) -> None:
        """Feeds the reducer and carries out its effects; callbacks run as tasks."""
        self.state, effects = leases.reduce(self.state, event)
        for effect in effects:
            self._carry_out(effect)

    def unsent(self, next_heartbeat: int) -> list[fleet_pb2.SessionRequest]:
        """Messages to write now, before heartbeat number `next_heartbeat`."""
        fresh = [entry for entry in self._outbox if entry.before_heartbeat is None]
        for entry in fresh:
            entry.before_heartbeat = next_heartbeat
        return [entry.message for entry in fresh]

    def arrived(self, heartbeat: int) -> None:
        """Heartbeat number `heartbeat` was acknowledged, and with it what was written before it."""
        self._outbox = [
            e for e in self._outbox if e.before_heartbeat is None or e.before_heartbeat > heartbeat
        ]

    def resend(self) -> None:
        """A new stream begins: what is not known to have arrived goes out again."""
        for entry in self._outbox:
            entry.before_heartbeat = None
        self.wake.set()

    def tell(self, message: fleet_pb2.SessionRequest) -> None:
        """Sends a message up the session, again on a new stream until it is known to have arrived."""
        message.incarnation = self._incarnation
        self._outbox.append(_Outgoing(message))
        self.wake.set()

    def flushed(self) -> bool:
        """Whether everything is known to have arrived."""
        return not self._outbox

    async def watch_deadlines(self) -> None:
        """Quiesces leases at their own deadlines; runs until cancelled."""
        while True:
            deadline = self.state.next_deadline()
            wait = 1.0 if deadline is None else min(1.0, max(0.01, deadline - self._now()))
            await asyncio.sleep(wait)
            self.handle(leases.Tick(self._now()))

    async def release_all(self, notice_s: float) -> None:
        """Releases every lease, each within the notice; waits that long for the callbacks."""
        for epoch in self.state.epochs():
            self.handle(leases.Revoked(epoch, notice_s))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=notice_s)

    def _carry_out(self, effect: leases.Effect) -> None:
        match effect:
            case leases.Acquire(lease):
                self._spawn(self._acquire(lease), f"acquire lease {lease.epoch}")
            case leases.Hold(epoch, deadline):
                self._fence.grant(epoch, deadline)
            case leases.Drop(epoch):
                self._fence.release(epoch)
            case leases.Quiesce(epoch):
                _logger.warning("lease not renewed in time: quiesced", extra={"lease_epoch": epoch})
                self._spawn(self._quiesce(epoch), f"quiesce lease {epoch}")
            case leases.Release(epoch, notice_s, keep):
                self._spawn(self._release(epoch, notice_s, keep=keep), f"release lease {epoch}")
            case leases.TellHeld(epoch, refusal):
                self.tell(
                    fleet_pb2.SessionRequest(lease_held=fleet_pb2.LeaseHeld(epoch=epoch, refusal=refusal))
                )
            case leases.TellReleased(epoch, memory):
                released = fleet_pb2.LeaseReleased(
                    epoch=epoch, free_memory_bytes=memory.free_bytes, used_memory_bytes=memory.used_bytes
                )
                self.tell(fleet_pb2.SessionRequest(lease_released=released))
            case _:
                assert_never(effect)

    def _spawn(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _acquire(self, lease: common_pb2.Lease) -> None:
        error = await _outcome(self._callbacks().on_grant(lease), ACQUIRE_TIMEOUT_S)
        if error is not None:
            _logger.error("grant refused", extra={"lease_epoch": lease.epoch}, exc_info=error)
        refusal = "" if error is None else message_of(error) or type(error).__name__
        self.handle(leases.Acquired(lease.epoch, refusal))

    async def _quiesce(self, epoch: int) -> None:
        error = await _outcome(self._callbacks().on_quiesce(epoch), ACQUIRE_TIMEOUT_S)
        if error is not None:
            _logger.error("on_quiesce failed", extra={"lease_epoch": epoch}, exc_info=error)

    async def _release(self, epoch: int, notice_s: float, *, keep: bool) -> None:
        started, obey = self._now(), self._callbacks().on_revoke
        freed = asyncio.ensure_future(obey(epoch, notice_s, keep))
        await asyncio.wait({freed})
        error = freed.exception()
        if error is not None:
            # Whether the device is free is unknown now; the end of this process will prove it.
            _logger.error("on_revoke failed", extra={"lease_epoch": epoch}, exc_info=error)
            self._fence.release(epoch)
            self._on_failure(f"lease {epoch} could not be released: {error}")
            return
        late = self._now() - started - notice_s
        if notice_s > 0 and late > 0:
            _logger.warning(
                "lease released after its notice", extra={"lease_epoch": epoch, "late_s": round(late, 3)}
            )
        self.handle(leases.Released(epoch, freed.result()))


async def _outcome(work: Awaitable[None], timeout_s: float) -> BaseException | None:
    """The error a callback ends with, or None."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()
        return TimeoutError(f"took longer than {timeout_s:.0f} s")
    return task.exception()
