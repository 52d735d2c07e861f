"""Refuses commands of a past coordinator, of leases that are not held now, and to runs that are not open so.

The deadline of each lease is compared at every check, so a stuck event loop cannot stretch a lease. A higher
coordinator epoch in a command is noted once the command is accepted; a refused command changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.lease.clock import boottime
from headrace_servicekit.lease.open_runs import OpeningRefused, OpenRuns
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import HIGHEST_COMMAND, HIGHEST_EPOCH, call_of_now, check_number


class Fence:
    """What this instance may do now. `now` gives seconds; deadlines are on the same clock.

    `store_id` names the store of the coordinator that it obeys; empty before the first one.
    """

    def __init__(self, now: Callable[[], float] = boottime, open_runs: OpenRuns | None = None) -> None:
        self._now = now
        self._open_runs = OpenRuns() if open_runs is None else open_runs
        self._deadlines: dict[int, float] = {}
        self.coordinator_epoch = 0
        self.store_id = ""

    def check(self, header: common_pb2.CommandHeader, *, lease: bool, opening: bool = True) -> None:
        """Raises ServiceError EPOCH_STALE for a command of a past coordinator or under a lost lease, and
        LEASE_QUIESCED under one that was not renewed in time and may be yet: try again.

        A higher coordinator epoch is believed when the call around it is accepted; outside a call, at once.
        With `opening` also OPENING_STALE for a command to another opening of its run, and NOT_OPEN for one
        to a run that is being closed. INVALID for numbers that no coordinator reaches: what is noted of them
        only rises, so that one of them would shut out every later command.
        """
        check_number("header.coordinator_epoch", header.coordinator_epoch, most=HIGHEST_EPOCH)
        check_number("header.open_id", header.open_id, most=HIGHEST_COMMAND)
        check_number("header.command_sequence", header.command_sequence, most=HIGHEST_COMMAND)
        self._not_past(header.coordinator_epoch)
        if opening:
            with opening_refusals():
                self._open_runs.check(header)
        if lease:
            self.check_lease(header.lease_epoch)
        if call := call_of_now():
            call.offer(self.believe, header.coordinator_epoch)
        else:
            self.believe(header.coordinator_epoch)

    def check_lease(self, epoch: int) -> None:
        """Raises ServiceError EPOCH_STALE or LEASE_QUIESCED unless the lease is held.

        Any thread may call it: work that waits in a queue asks again right before its effect.
        """
        if self.holds(epoch):
            return
        if epoch in self._deadlines:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "LEASE_QUIESCED",
                f"lease epoch {epoch} was not renewed in time; try again once it is",
                lease_epoch=str(epoch),
            )
        raise _stale(
            f"lease epoch {epoch} is not held by this instance (it holds {self._held() or 'none'}); "
            "acquire the device again",
            lease_epoch=str(epoch),
        )

    def holds_any(self) -> bool:
        """Whether at least one lease is held and its deadline has not passed. Any thread may call it."""
        return bool(self._held())

    def _held(self) -> list[int]:
        return sorted(epoch for epoch in list(self._deadlines) if self.holds(epoch))

    def obey(self, coordinator_epoch: int, store_id: str) -> None:
        """A coordinator has taken this instance in; raises ServiceError EPOCH_STALE when a higher one was obeyed."""
        self._not_past(coordinator_epoch)
        self.coordinator_epoch = coordinator_epoch
        self.store_id = store_id or self.store_id

    def believe(self, coordinator_epoch: int) -> None:
        """Notes the epoch of an accepted command."""
        self.coordinator_epoch = max(self.coordinator_epoch, coordinator_epoch)

    def _not_past(self, coordinator_epoch: int) -> None:
        if coordinator_epoch < self.coordinator_epoch:
            raise _stale(
                f"coordinator epoch {coordinator_epoch} is below {self.coordinator_epoch}: "
                "another coordinator has taken over",
                coordinator_epoch=str(self.coordinator_epoch),
            )

    def holds(self, lease_epoch: int) -> bool:
        """Whether the lease is held and its own deadline has not passed."""
        deadline = self._deadlines.get(lease_epoch)
        return deadline is not None and self._now() < deadline

    def grant(self, lease_epoch: int, deadline: float = math.inf) -> None:
        """Holds a lease until `deadline`; a renewal repeats the call. Stand-alone: no deadline."""
        self._deadlines[lease_epoch] = deadline

    def release(self, lease_epoch: int) -> None:
        """Forgets a lease; repeated calls do nothing."""
        self._deadlines.pop(lease_epoch, None)


@contextmanager
def opening_refusals() -> Iterator[None]:
    """Turns an OpeningRefused into a ServiceError: CONFLICT is ALREADY_EXISTS, the rest FAILED_PRECONDITION."""
    try:
        yield
    except OpeningRefused as refused:
        conflict = refused.reason == "CONFLICT"
        code = grpc.StatusCode.ALREADY_EXISTS if conflict else grpc.StatusCode.FAILED_PRECONDITION
        raise ServiceError(code, refused.reason, refused.message, **refused.metadata) from refused


def _stale(message: str, **metadata: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE", message, **metadata)
