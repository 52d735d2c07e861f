"""Leases from request to end: grants them, waits for their holders, revokes them, lets them expire.

The rules are `domain.devices.leases`; the fleet knows who is alive and how a command reaches a process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from headrace_servicekit.lease.gpus import GPU_MEMORY, read_gpu_memory

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.devices import leases
from headrace_coordinator.domain.devices.leases import DECODE, HELP, Blocked, Lease, LeaseRequest
from headrace_coordinator.domain.devices.sharing import Waiter, ahead_of, next_for
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.waits import Waits, WaitTimeout

ENDED_KEPT = 256
"""Ended leases of a run that are remembered until its timeline takes them."""
EndedLease = tuple[Lease, float, str]
"""A lease, when it ended in seconds since the epoch, and why."""


class Holders(Protocol):
    """The processes that hold leases."""

    def alive(self, incarnation: str) -> bool:
        """The process is registered and its session is open."""

    def send(self, incarnation: str, command: str, body: Any) -> None:
        """A command to a process; lost where it has no session."""


class LeaseManager:
    """All leases of the fleet, and when each was renewed."""

    def __init__(
        self, event_log: EventLog, holders: Holders, waits: Waits, ttl: float, notice: float
    ) -> None:
        self._event_log = event_log
        self._holders = holders
        self._waits = waits
        self._ttl = ttl
        self._notice = notice
        self._renewed_at: dict[int, float] = {}
        self._release_by: dict[int, float] = {}
        self._keeping: set[int] = set()
        self._expiry_from = event_log.monotonic() + ttl
        self._ended: dict[str, deque[EndedLease]] = {}
        self._line: list[Waiter] = []
        self._numbers = itertools.count(1)

    # --- from the holders

    def confirm(self, incarnation: str, held: set[int]) -> set[int]:
        """A process has registered with what it holds; returns the epochs that are honoured."""
        table = self._event_log.state.table
        own = {lease.epoch for lease in table.of(incarnation)}
        for epoch in own & held:
            self._renewed_at[epoch] = self._event_log.monotonic()
            self._event_log.post(*leases.plan_held(table, epoch, incarnation))
        for epoch in own - held:
            # Granted by a coordinator that died before the grant reached the holder.
            self._post_ends(leases.plan_release(table, epoch, incarnation, "never held"))
        return own & held

    def attached(self, incarnation: str) -> None:
        """A session has opened: revokes are sent again, for the first ones may have been lost."""
        now = self._event_log.monotonic()
        for lease in self._event_log.state.table.of(incarnation):
            if lease.state == leases.REVOKING:
                left = max(0.0, self._release_by.get(lease.epoch, now + self._notice) - now)
                self._holders.send(incarnation, "revoke", (lease.epoch, left, lease.epoch in self._keeping))

    def renew(self, incarnation: str, epochs: Iterable[int]) -> list[int]:
        """A heartbeat; returns the epochs that it renews."""
        own = {lease.epoch for lease in self._event_log.state.table.of(incarnation)}
        renewed = [epoch for epoch in epochs if epoch in own]
        self._renewed_at |= dict.fromkeys(renewed, self._event_log.monotonic())
        return renewed

    def held(self, incarnation: str, epoch: int, refusal: str) -> None:
        """The holder has taken its memory, or says why it cannot."""
        table = self._event_log.state.table
        if refusal:
            self._post_ends(leases.plan_release(table, epoch, incarnation, f"refused: {refusal}"))
        else:
            self._event_log.post(*leases.plan_held(table, epoch, incarnation))

    def released(self, incarnation: str, epoch: int, used_bytes: int = 0) -> None:
        """The holder has released a lease, and measured what it still uses on the devices."""
        state = self._event_log.state
        lease, expected = state.table.leases.get(epoch), leases.KEPT_BYTES
        if lease is not None and (run := state.runs.get(lease.run)) is not None:
            holder = state.instances.get(incarnation)
            memory = read_gpu_memory(holder.capabilities.get(GPU_MEMORY, ())) if holder is not None else {}
            expected = leases.kept_bytes(lease, run.spec["rollout"]["engine"], memory)
        ends = leases.plan_release(
            state.table, epoch, incarnation, "released", used=used_bytes, expected=expected
        )
        self._post_ends(ends)

    def exited(self, incarnation: str) -> None:
        """The holder's process is proven gone."""
        self._post_ends(leases.plan_exit(self._event_log.state.table, incarnation))

    def _post_ends(self, events: Sequence[ev.Event]) -> None:
        for event in events:
            self._note_end(event)
            self._renewed_at.pop(event.epoch, None)  # type: ignore[attr-defined]
            self._release_by.pop(event.epoch, None)  # type: ignore[attr-defined]
            self._keeping.discard(event.epoch)  # type: ignore[attr-defined]
        self._event_log.post(*events)

    def _note_end(self, event: ev.Event) -> None:
        if isinstance(event, ev.LeaseEnded) and (
            lease := self._event_log.state.table.leases.get(event.epoch)
        ):
            run = self._event_log.state.runs.get(lease.run)
            if run is not None and run.state not in run_states.TERMINAL:
                ended = self._ended.setdefault(lease.run, deque(maxlen=ENDED_KEPT))
                ended.append((lease, self._event_log.now(), event.cause))

    # --- for a run

    def take_ended(self, run: str) -> list[EndedLease]:
        """The run's leases that ended since the last call, oldest first: the newest ENDED_KEPT of them."""
        return list(self._ended.pop(run, ()))

    def next_for(self, devices: Iterable[str], run: str) -> Waiter | None:
        """The next of the other runs that wait for any of a run's devices, which it shares with them."""
        return next_for(self._waiting(), devices, run, self._event_log.monotonic())

    async def acquire(
        self,
        requests: Sequence[LeaseRequest],
        timeout: float,
        patience: float | None = None,
        waited: Callable[[float], None] = lambda began: None,
    ) -> list[int]:
        """Leases for all requests or none, held by their holders; returns their epochs.

        `patience`: how long other runs may keep the devices, where they are shared; default: `timeout`. `waited` is
        told when the wait for them began, once it is over.

        Raises:
            WaitTimeout: naming the busy devices and who holds them.
            InstanceDown: a holder went away, or refused.
        """
        held = {request: self._held_already(request) for request in requests}
        missing = [request for request in requests if not held[request]]
        if missing:
            began = self._event_log.monotonic()
            grants = await self._grant(missing, timeout if patience is None else patience)
            waited(began)
            await self._until_held(requests[0].run, grants, timeout)
            held |= {request: grant.epoch for request, grant in zip(missing, grants, strict=True)}
        return [held[request] for request in requests]

    async def _grant(self, requests: Sequence[LeaseRequest], timeout: float) -> list[ev.LeaseGranted]:
        run, deadline = requests[0].run, asyncio.get_running_loop().time() + timeout
        with self._in_line(requests) as waiter:
            while True:
                self._all_alive(requests)
                self._all_granted(requests)
                try:
                    self._turn_of(waiter)
                    grants = leases.plan_grant(self._event_log.state.table, requests)
                    break
                except Blocked as blocked:
                    left = deadline - asyncio.get_running_loop().time()
                    await self._wait_for_change(run, requests, str(blocked), left)
            self._event_log.post(*grants)
        await self._event_log.flush()
        for grant in grants:
            self._renewed_at[grant.epoch] = self._event_log.monotonic()
            self._holders.send(grant.incarnation, "grant", grant)
        return grants

    @contextmanager
    def _in_line(self, requests: Sequence[LeaseRequest]) -> Iterator[Waiter]:
        """Within the body a run waits for devices, and no later run is served before it."""
        run = self._event_log.state.runs.get(requests[0].run)
        waiter = Waiter(
            next(self._numbers),
            requests[0].run,
            frozenset(device for request in requests for device in request.devices),
            self._event_log.monotonic(),
            run.priority if run is not None else 0,
        )
        self._line.append(waiter)
        self._event_log.wake()  # A run that holds the devices checks whether it can release them.
        try:
            yield waiter
        finally:
            self._line.remove(waiter)
            self._event_log.wake()

    def _turn_of(self, waiter: Waiter) -> None:
        """Raises `Blocked` while another run is to have one of the devices first."""
        if first := ahead_of(self._waiting(), waiter, self._event_log.monotonic()):
            shared = ", ".join(sorted(first.devices & waiter.devices))
            raise Blocked(f"{shared} goes to {first.run} first, which has waited longer or has priority")

    def _waiting(self) -> list[Waiter]:
        """All that wait, but for those whose devices are in quarantine: no release would free them."""
        lost = self._event_log.state.table.quarantined.keys()
        return [waiter for waiter in self._line if not waiter.devices & lost]

    def _all_alive(self, requests: Iterable[LeaseRequest]) -> None:
        """Raises `InstanceDown` where a process is gone: a grant to it would hold its device until that expires."""
        for request in requests:
            if not self._holders.alive(request.incarnation):
                raise InstanceDown(
                    request.incarnation, f"gone before it could take {', '.join(request.devices)}"
                )

    def _all_granted(self, requests: Iterable[LeaseRequest]) -> None:
        """Raises `InstanceDown` where the grant has changed while its run waited: another run may have the device."""
        for request in requests:
            run = self._event_log.state.runs.get(request.run)
            granted = run.grant.devices if run is not None and run.grant is not None else request.devices
            helpers = run.grant.helpers if run is not None and run.grant is not None else []
            if request.stage in (HELP, DECODE) and request.incarnation not in helpers:
                raise InstanceDown(request.incarnation, "it went to another run")
            if beyond := [device for device in request.devices if device not in granted]:
                raise InstanceDown(request.incarnation, f"{', '.join(beyond)} went to another run")

    async def _wait_for_change(
        self, run: str, requests: Sequence[LeaseRequest], what: str, timeout: float
    ) -> None:
        table = self._event_log.state.table

        def looked_at() -> tuple[object, ...]:
            return set(table.leases), set(table.quarantined), list(self._line)

        def changed() -> bool:
            gone = not all(self._holders.alive(request.incarnation) for request in requests)
            return gone or looked_at() != before

        before = looked_at()

        with self._waits.named(run, what):
            await self._event_log.wait_until(changed, timeout, what)

    def _held_already(self, request: LeaseRequest) -> int:
        for lease in self._event_log.state.table.of(request.incarnation):
            same = (lease.run, lease.stage, tuple(lease.devices)) == (
                request.run,
                request.stage,
                request.devices,
            )
            if same and lease.state == leases.HELD:
                return lease.epoch
        return 0

    async def _until_held(self, run: str, grants: Sequence[ev.LeaseGranted], timeout: float) -> None:
        live = self._event_log.state.table.leases

        def settled() -> bool:
            gone = any(not self._holders.alive(g.incarnation) for g in grants)
            return gone or all(g.epoch not in live or live[g.epoch].state != leases.GRANTED for g in grants)

        what = "; ".join(f"{g.incarnation} to take {', '.join(g.devices)}" for g in grants)
        with self._waits.named(run, what):
            await self._event_log.wait_until(settled, timeout, what)
        for grant in grants:
            if grant.epoch not in live or live[grant.epoch].state == leases.GRANTED:
                raise InstanceDown(
                    grant.incarnation,
                    f"did not take {', '.join(grant.devices)}{self._said(run, grant.epoch)}",
                )

    def _said(self, run: str, epoch: int) -> str:
        """ ": refused: …", where the holder of a lease that ended said why it could not take it."""
        causes = [cause for lease, _, cause in self._ended.get(run, ()) if lease.epoch == epoch]
        return f": {causes[-1]}" if causes else ""

    async def release(self, run: str, epochs: Sequence[int], *, keep: bool = False) -> None:
        """Revokes leases with notice and waits until they are over; `keep`: what their holders loaded may stay."""
        table = self._event_log.state.table
        for epoch in epochs:
            lease = table.leases.get(epoch)
            if lease is None:
                continue
            self._event_log.post(*leases.plan_revoke(table, epoch))
            self._release_by.setdefault(epoch, self._event_log.monotonic() + self._notice)
            if keep:
                self._keeping.add(epoch)
            self._holders.send(lease.incarnation, "revoke", (epoch, self._notice, keep))
        what = "release of " + ", ".join(f"epoch {epoch}" for epoch in epochs)
        with self._waits.named(run, what):
            timeout = self._notice + self._ttl
            await self._event_log.wait_until(
                lambda: not any(e in table.leases for e in epochs), timeout, what
            )

    async def release_of(self, run: str, holders: Iterable[str]) -> None:
        """Ends the leases that some processes hold for a run, as `release` does."""
        of = set(holders)
        leases = self._event_log.state.table.leases.values()
        await self.release(run, [each.epoch for each in leases if each.run == run and each.incarnation in of])

    async def release_all(self, run: str) -> None:
        """Ends every lease of a run."""
        epochs = [lease.epoch for lease in self._event_log.state.table.leases.values() if lease.run == run]
        try:
            await self.release(run, epochs)
        except WaitTimeout:
            return  # The sweep ends them; their devices stay in quarantine until proven free.

    # --- time

    def expires_in(self, epoch: int) -> float:
        """Seconds until a lease ends unless it is renewed."""
        now = self._event_log.monotonic()
        return self._ttl - (now - self._renewed_at.get(epoch, now))

    def wait_a_ttl(self) -> None:
        """Ends no lease before one TTL has passed: holders could not renew, so their silence proves nothing."""
        now = self._event_log.monotonic()
        self._expiry_from = now + self._ttl
        self._renewed_at = dict.fromkeys(self._renewed_at, now)
        self._release_by = dict.fromkeys(self._release_by, now + self._notice)

    def expire(self) -> None:
        """Ends leases that are overdue; their devices are in quarantine then.

        No lease ends during a store outage, nor within one TTL after it, after the start, or after this process stood
        still.
        """
        if self._event_log.store_away:
            self.wait_a_ttl()
        table, now = self._event_log.state.table, self._event_log.monotonic()
        for lease in table.leases.values():
            self._renewed_at.setdefault(lease.epoch, now)
            if lease.state == leases.REVOKING:
                self._release_by.setdefault(lease.epoch, now + self._notice)
        if not self.lenient:
            self._post_ends(leases.plan_expire(table, self._renewed_at, self._release_by, self._ttl, now))

    @property
    def lenient(self) -> bool:
        """Whether silence proves nothing now: holders could not renew."""
        return self._event_log.monotonic() < self._expiry_from
