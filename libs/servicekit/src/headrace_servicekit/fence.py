"""Refuses commands of a past coordinator, of leases that are not held now, and to runs that are not open so.

The deadline of each lease is compared at every check, so a stuck event loop cannot stretch a lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.clock import boottime
from headrace_servicekit.errors import ServiceError
from headrace_servicekit.open_runs import OpeningRefused, OpenRuns


class Fence:
    """What this instance may do now. `now` gives seconds; deadlines are on the same clock."""

    def __init__(self, now: Callable[[], float] = boottime, open_runs: OpenRuns | None = None) -> None:
        self._now = now
        self._open_runs = open_runs or OpenRuns()
        self._deadlines: dict[int, float] = {}
        self.coordinator_epoch = 0

    def check(self, header: common_pb2.CommandHeader, *, lease: bool, opening: bool = True) -> None:
        """Raises ServiceError EPOCH_STALE for a command of a past coordinator or under a lost lease.

        With `opening` also OPENING_STALE for a command to another opening of its run, and NOT_OPEN for one
        to a run that is being closed.
        """
        self.observe(header.coordinator_epoch)
        if opening:
            with opening_refusals():
                self._open_runs.check(header)
        if not lease:
            return
        if not self.holds(header.lease_epoch):
            held = sorted(epoch for epoch in self._deadlines if self.holds(epoch))
            raise _stale(
                f"lease epoch {header.lease_epoch} is not held by this instance (it holds {held or 'none'}); "
                "acquire the device again",
                lease_epoch=str(header.lease_epoch),
            )

    def observe(self, coordinator_epoch: int) -> None:
        """Notes a coordinator epoch; raises ServiceError EPOCH_STALE when a higher one was seen."""
        if coordinator_epoch < self.coordinator_epoch:
            raise _stale(
                f"coordinator epoch {coordinator_epoch} is below {self.coordinator_epoch}: "
                "another coordinator has taken over",
                coordinator_epoch=str(self.coordinator_epoch),
            )
        self.coordinator_epoch = coordinator_epoch

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
