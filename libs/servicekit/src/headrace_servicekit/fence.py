"""Refuses commands of a past coordinator and of leases that are not held now.

The deadline of each lease is compared at every check, so a stuck event loop cannot stretch a lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.clock import boottime
from headrace_servicekit.errors import ServiceError


class Fence:
    """What this instance may do now. `now` gives seconds; deadlines are on the same clock."""

    def __init__(self, now: Callable[[], float] = boottime) -> None:
        self._now = now
        self._deadlines: dict[int, float] = {}
        self.coordinator_epoch = 0

    def check(self, header: common_pb2.CommandHeader, *, lease: bool) -> None:
        """Raises ServiceError EPOCH_STALE for a command of a past coordinator or under a lost lease."""
        self.observe(header.coordinator_epoch)
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


def _stale(message: str, **metadata: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_STALE", message, **metadata)
