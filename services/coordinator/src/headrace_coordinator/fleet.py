"""Instances as they are now: sessions, liveness, supervisors. Durable facts go through the kernel.

Knows no gRPC: a session is a function that sends a command to the instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.kernel import Kernel
from headrace_coordinator.lease_desk import LeaseDesk
from headrace_coordinator.ports import Connect, InstanceDown, Port
from headrace_coordinator.waits import Waits, WaitTimeout

RESTART_S = 20.0
"""How long a supervisor's restart of a process may take before nobody counts on it."""


class FleetSettings(msgspec.Struct, frozen=True):
    """Times of the lifeline, in seconds."""

    lease_ttl: float = 30.0
    heartbeat: float = 5.0
    sweep: float = 1.0
    notice: float = 20.0


class Session(msgspec.Struct):
    """The live side of one instance."""

    send: Callable[[str, Any], None]
    heard_at: float
    resident_memory_bytes: int = 0


class Supervisor(msgspec.Struct):
    """A connected supervisor: what it runs, and how to command it."""

    host: str
    send: Callable[[str, Any], None]
    scalable: frozenset[str] = frozenset()
    incarnations: frozenset[str] = frozenset()


class Fleet:
    """All instances and their supervisors; `desk` has their leases."""

    def __init__(self, kernel: Kernel, connect: Connect, settings: FleetSettings) -> None:
        self.kernel = kernel
        self.settings = settings
        self.waits = Waits(kernel.now)
        self.sessions: dict[str, Session] = {}
        self.supervisors: dict[str, Supervisor] = {}
        self.busy: dict[str, str] = {}
        self.names = {i.incarnation: i.instance for i in kernel.state.instances.values()}
        self._connect = connect
        self._ports: dict[str, Port] = {}
        self._silent_since: dict[str, float] = {}
        self._last_exit = float("-inf")
        self.desk = LeaseDesk(kernel, self, self.waits, settings.lease_ttl, settings.notice)

    # --- the lifeline, from below

    async def register(self, instance: InstanceState, held: Iterable[int], epoch_seen: int) -> list[int]:
        """Takes a process in; returns the epochs it holds that are no longer honoured."""
        if epoch_seen > self.kernel.state.epoch:
            self.kernel.post(ev.EpochRaised(at=self.kernel.now(), epoch=epoch_seen + 1))
        self.names[instance.incarnation] = instance.instance
        known = self.kernel.state.instances.get(instance.incarnation)
        if known != instance:
            fields = {name: getattr(instance, name) for name in instance.__struct_fields__}
            await self.kernel.commit(ev.InstanceRegistered(at=self.kernel.now(), **fields))
        honoured = self.desk.confirm(instance.incarnation, set(held))
        return [epoch for epoch in held if epoch not in honoured]

    def attach(self, incarnation: str, send: Callable[[str, Any], None]) -> None:
        """A session stream has opened."""
        self.sessions[incarnation] = Session(send, self.kernel.now())
        self._silent_since.pop(incarnation, None)
        self.kernel.wake()

    def detach(self, incarnation: str, send: Callable[[str, Any], None]) -> None:
        """A session stream has closed; a newer one of the same process stays."""
        session = self.sessions.get(incarnation)
        if session is not None and session.send is send:
            del self.sessions[incarnation]
            self._silent_since[incarnation] = self.kernel.now()
            self.kernel.wake()

    def heartbeat(
        self, incarnation: str, epochs: Iterable[int], resident: int
    ) -> tuple[list[int], list[int]]:
        """Renews leases; returns (renewed, stale) epochs."""
        if session := self.sessions.get(incarnation):
            session.heard_at, session.resident_memory_bytes = self.kernel.now(), resident
        renewed = self.desk.renew(incarnation, epochs)
        return renewed, [epoch for epoch in epochs if epoch not in renewed]

    def exited(self, incarnation: str, reason: str) -> None:
        """A supervisor saw the process end: its devices are free at once."""
        now = self.kernel.now()
        self._last_exit = now
        self.desk.exited(incarnation)
        if incarnation in self.kernel.state.instances or self._quarantines(incarnation):
            self.kernel.post(ev.InstanceLost(at=now, incarnation=incarnation, reason=reason, proven=True))
        self.sessions.pop(incarnation, None)
        self._silent_since.pop(incarnation, None)
        self._ports.pop(incarnation, None)
        self.kernel.wake()

    def supervised(self, supervisor: Supervisor) -> None:
        """A supervisor's table: it runs every process of its host, so whoever is not in it is proven gone.

        Compared at each connection. A later table of the same connection follows the exits it has told.
        """
        previous = self.supervisors.get(supervisor.host)
        self.supervisors[supervisor.host] = supervisor
        if previous is None or previous.send is not supervisor.send:
            for incarnation in self._known_on(supervisor.host) - supervisor.incarnations:
                self.exited(incarnation, "its supervisor no longer runs it")
        self.kernel.wake()

    def _known_on(self, host: str) -> set[str]:
        """Processes of a host that are registered, hold a lease or have a device in quarantine."""
        state = self.kernel.state
        devices = [(lease.incarnation, lease.devices) for lease in state.table.leases.values()]
        devices += [(quarantine.incarnation, [name]) for name, quarantine in state.table.quarantined.items()]
        known = {incarnation for incarnation, names in devices if names and names[0].startswith(f"{host}/")}
        return known | {i.incarnation for i in state.instances.values() if i.host == host}

    def _quarantines(self, incarnation: str) -> bool:
        return any(q.incarnation == incarnation for q in self.kernel.state.table.quarantined.values())

    # --- the run's side

    def ready(self, kind: str) -> list[InstanceState]:
        """Registered instances of a kind with a live session, by name."""
        return sorted(
            (
                i
                for i in self.kernel.state.instances.values()
                if i.kind == kind and i.incarnation in self.sessions
            ),
            key=lambda instance: instance.instance,
        )

    def alive(self, incarnation: str) -> bool:
        """The process is registered and its session is open."""
        return incarnation in self.kernel.state.instances and incarnation in self.sessions

    def readable(self, text: str) -> str:
        """`text` with instance names for incarnation ids."""
        for incarnation, name in self.names.items():
            text = text.replace(incarnation, name)
        return text

    def restarting(self) -> bool:
        """A process ended a moment ago, or runs and has not registered yet: more instances may come."""
        supervised = {who for supervisor in self.supervisors.values() for who in supervisor.incarnations}
        recent = self.kernel.now() - self._last_exit < RESTART_S
        return recent or not supervised <= self.kernel.state.instances.keys()

    async def fate(self, incarnation: str, patience: float = 2.0) -> bool:
        """After a failed call: waits a little for the instance's end to be noticed; True when it seems alive."""
        try:
            await self.kernel.wait_until(
                lambda: not self.alive(incarnation), patience, f"{incarnation}'s fate"
            )
        except WaitTimeout:
            return True
        return False

    def port(self, incarnation: str) -> Port:
        """The way to call an instance; raises `InstanceDown` when it is not registered."""
        state = self.kernel.state.instances.get(incarnation)
        if state is None:
            raise InstanceDown(incarnation, "not registered")
        if incarnation not in self._ports:
            self._ports[incarnation] = self._connect(state.kind, state.address, incarnation)
        return self._ports[incarnation]

    async def claim(
        self, run: str, kind: str, count: int, timeout: float, most: int = 0
    ) -> list[InstanceState]:
        """`count` ready instances for a run, and more, up to `most`, if they are there; waits for them by name.

        An instance works for one run at a time; those that the run has already come first.
        """

        def free() -> list[InstanceState]:
            return [i for i in self.ready(kind) if self.busy.get(i.incarnation, run) == run]

        what = f"{count} ready {kind} instance(s)"
        with self.waits.named(run, what):
            await self.kernel.wait_until(lambda: len(free()) >= count, timeout, what + self._busy_text(kind))
        own_first = sorted(free(), key=lambda instance: instance.incarnation not in self.busy)
        chosen = own_first[: max(count, most)]
        for instance in chosen:
            self.busy[instance.incarnation] = run
        return sorted(chosen, key=lambda instance: instance.instance)

    def _busy_text(self, kind: str) -> str:
        taken = [
            f"{i.instance} works for {self.busy[i.incarnation]}"
            for i in self.ready(kind)
            if i.incarnation in self.busy
        ]
        return f" ({'; '.join(taken) or f'no other {kind} instance is registered'})"

    def unclaim(self, run: str) -> None:
        """Gives a run's instances back."""
        self.busy = {incarnation: holder for incarnation, holder in self.busy.items() if holder != run}
        self.kernel.wake()

    def send(self, incarnation: str, command: str, body: Any) -> None:
        """A command to a process; lost where it has no session."""
        if session := self.sessions.get(incarnation):
            session.send(command, body)

    def kill(self, incarnation: str, reason: str) -> bool:
        """Asks the instance's supervisor for a SIGKILL; False where there is none."""
        state = self.kernel.state.instances.get(incarnation)
        for supervisor in self.supervisors.values():
            if incarnation in supervisor.incarnations:
                name = state.instance if state else ""
                supervisor.send("kill", (name, incarnation, reason))
                return True
        return False

    # --- time

    async def sweep(self) -> None:
        """Ends leases that were not renewed and instances unheard of for a TTL, for ever."""
        while True:
            await asyncio.sleep(self.settings.sweep)
            self.sweep_once()

    def sweep_once(self) -> None:
        """One look at the clock."""
        holders = self.desk.expire()
        if not self.desk.lenient:
            self._lose_silent(self.kernel.now())
        for incarnation in holders:
            self.kill(incarnation, "its lease was not renewed")

    def _lose_silent(self, now: float) -> None:
        for state in list(self.kernel.state.instances.values()):
            if state.incarnation in self.sessions:
                session = self.sessions[state.incarnation]
                if now - session.heard_at > self.settings.lease_ttl:
                    self.detach(state.incarnation, session.send)
            since = (
                self._silent_since.setdefault(state.incarnation, now)
                if not self.alive(state.incarnation)
                else now
            )
            if now - since > self.settings.lease_ttl:
                self.kill(state.incarnation, "unheard of for a lease's lifetime")
                self.kernel.post(
                    ev.InstanceLost(at=now, incarnation=state.incarnation, reason="unheard of", proven=False)
                )
                self._silent_since.pop(state.incarnation, None)
