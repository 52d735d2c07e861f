"""Devices in quarantine: gathers what may prove them free, at each sweep, or a person's word.

The rule is `domain.devices.leases.proof_of_free`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from headrace_servicekit.lease.usage import GPU_OLD_S

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices import leases
from headrace_coordinator.domain.devices.leases import Evidence, Quarantine
from headrace_coordinator.fleet.sessions import Session
from headrace_coordinator.store.event_log import EventLog

log = logging.getLogger(__name__)


class StillHeld(Exception):
    """The last holder of a device is there; the message says what to do."""


class Quarantines:
    """Ends the quarantine of devices that are proven free without their holder's supervisor."""

    def __init__(
        self,
        event_log: EventLog,
        sessions: Mapping[str, Session],
        supervised: Callable[[], set[str]],
        ttl: float,
    ) -> None:
        """`supervised`: the processes that connected supervisors run."""
        self._event_log = event_log
        self._sessions = sessions
        self._supervised = supervised
        self._ttl = ttl
        self._since: dict[tuple[str, str], float] = {}
        """When each device of a holder was first seen in quarantine, by this coordinator's clock."""

    def __contains__(self, incarnation: str) -> bool:
        """Whether a process has a device in quarantine."""
        return any(each.incarnation == incarnation for each in self._quarantined.values())

    @property
    def _quarantined(self) -> dict[str, Quarantine]:
        return self._event_log.state.table.quarantined

    def gpus_seen_by(self, incarnation: str) -> list[str]:
        """GPUs in quarantine that an instance sees, and of which its heartbeats should tell the use."""
        instance = self._event_log.state.instances.get(incarnation)
        seen = instance.devices if instance else ()
        return [name for name in seen if name in self._quarantined and leases.is_gpu(name)]

    def free_proven(self) -> dict[str, str]:
        """Ends what is proven; the holders of the rest, which are to be killed, and why.

        They are named again each time, for a command to a supervisor that is cut off is lost.
        """
        now = self._event_log.monotonic()
        doubts = [(device, each.incarnation) for device, each in self._quarantined.items()]
        self._since = {doubt: self._since.get(doubt, now) for doubt in doubts}
        for device, quarantine in list(self._quarantined.items()):
            if cause := leases.proof_of_free(device, self._evidence(device, quarantine, now)):
                self._event_log.post(self._freed(device, quarantine, cause))
        return {quarantine.incarnation: quarantine.reason for quarantine in self._quarantined.values()}

    def _evidence(self, device: str, quarantine: Quarantine, now: float) -> Evidence:
        stopped_at = self._since[device, quarantine.incarnation] + self._ttl
        known = self._event_log.state.instances
        seers = [who for who in self._sessions if who in known and device in known[who].devices]
        long = [who for who in seers if now - self._sessions[who].opened_at > GPU_OLD_S]
        return Evidence(
            holder_stopped=now > stopped_at,
            used=self._measured(device, stopped_at + GPU_OLD_S),
            holders_boot=quarantine.boot_id,
            boots=frozenset(known[who].boot_id for who in long),
        )

    def _measured(self, device: str, since: float) -> int | None:
        """Bytes in use on a GPU, the most that a heartbeat since then has told: a look may be GPU_OLD_S old."""
        fresh = [session.usage.gpus for session in self._sessions.values() if session.heard_at >= since]
        return max((used for gpus in fresh for gpu, _, used in gpus if gpu == device), default=None)

    async def release(self, device: str, reason: str, *events: ev.Event) -> None:
        """Ends the quarantine of a device by a person's word; durable, with `events`, on return.

        Raises:
            StillHeld: its last holder is connected, or a connected supervisor runs it.
        """
        quarantine = self._quarantined[device]
        holder = quarantine.incarnation
        known = self._event_log.state.instances.get(holder)
        refusal = leases.why_not_released(
            device,
            known.instance if known else holder,
            alive=holder in self._sessions,
            supervised=holder in self._supervised(),
        )
        if refusal:
            raise StillHeld(refusal)
        cause = "a person says that it is free" + (f": {reason}" if reason else "")
        log.warning("%s left quarantine (%s), in which it was because: %s", device, cause, quarantine.reason)
        await self._event_log.commit(self._freed(device, quarantine, cause, author="user"), *events)

    def _freed(
        self, device: str, quarantine: Quarantine, cause: str, author: str = "system"
    ) -> ev.DeviceFreed:
        return ev.DeviceFreed(device=device, holder=quarantine.incarnation, cause=cause, author=author)
