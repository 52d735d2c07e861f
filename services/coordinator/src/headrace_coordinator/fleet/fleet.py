"""Instances as they are now: sessions, liveness, supervisors. Durable facts go through the event log.

Knows no gRPC: a session is a function that sends a command to the instance.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from headrace_servicekit.recording.recorder import Recorder

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.places import machines
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.deaths import Deaths
from headrace_coordinator.fleet.instance_client import Connect, InstanceClient, InstanceDown, WorkerClient
from headrace_coordinator.fleet.lease_manager import LeaseManager
from headrace_coordinator.fleet.online import OnlineSessions
from headrace_coordinator.fleet.quarantine import Quarantines
from headrace_coordinator.fleet.sessions import (
    FleetSettings,
    ForeignInstance,
    InstanceUsage,
    OpenReport,
    Session,
    Supervisor,
)
from headrace_coordinator.fleet.silence import Silences
from headrace_coordinator.sessions.desk import Desks
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.waits import Waits, WaitTimeout

DRAIN_S = 10.0
"""Grace of a process that is no longer wanted."""
log = logging.getLogger(__name__)


class Fleet:
    """All instances and their supervisors; `lease_manager` has their leases, `quarantines` what they left in doubt."""

    def __init__(self, event_log: EventLog, connect: Connect, settings: FleetSettings) -> None:
        self.event_log = event_log
        self.settings = settings
        self.waits = Waits(event_log.monotonic, self._stage_ended)
        self.deaths = Deaths(event_log, self.waits)
        self.sessions: dict[str, Session] = {}
        self.supervisors: dict[str, Supervisor] = {}
        self.opened: dict[str, dict[str, OpenReport]] = {}
        """What each instance last said it has open, by incarnation and run."""
        self.on_report: Callable[[str], None] = lambda _: None
        self._openings = itertools.count(1)
        self.names = {i.incarnation: i.instance for i in event_log.state.instances.values()}
        self.recorder = Recorder()
        """What is said to the instances of runs, where it is recorded."""
        self._connect = connect
        self._clients: dict[str, InstanceClient] = {}
        self._silences = Silences(self.sessions, settings, event_log.monotonic)
        self.online: defaultdict[str, OnlineSessions] = defaultdict(OnlineSessions)
        """Sessions of online runs, by run."""
        self.desks = Desks(event_log.wake)
        """Calls and samples of session runs."""
        self._swept_at = event_log.monotonic()
        self._refused: set[str] = set()
        self.lease_manager = LeaseManager(event_log, self, self.waits, settings.lease_ttl, settings.notice)
        self.quarantines = Quarantines(event_log, self.sessions, self._supervised, settings.lease_ttl)

    # --- what instances and supervisors say

    async def register(
        self, instance: InstanceState, held: Iterable[int], epoch_seen: int, store_id: str = ""
    ) -> list[int]:
        """Registers a process; returns the lease epochs that it says it holds and that are no longer valid.

        `epoch_seen` is the highest coordinator epoch that it obeyed, `store_id` that coordinator's store.

        Raises:
            ForeignInstance: it obeys the coordinator of another store, or a higher epoch of an unnamed one.
        """
        self._only_ours(instance, epoch_seen, store_id)
        if epoch_seen > self.event_log.state.epoch:
            await self.event_log.raise_epoch(epoch_seen)
        self.names[instance.incarnation] = instance.instance
        known = self.event_log.state.instances.get(instance.incarnation)
        instance.draining = known is not None and known.draining
        if known != instance:
            fields = {name: getattr(instance, name) for name in ev.InstanceRegistered.__struct_fields__[1:]}
            await self.event_log.commit(ev.InstanceRegistered(**fields))
        honoured = self.lease_manager.confirm(instance.incarnation, set(held))
        return [epoch for epoch in held if epoch not in honoured]

    def _only_ours(self, instance: InstanceState, epoch_seen: int, store_id: str) -> None:
        ours, now = self.event_log.state.store_id, self.event_log.state.epoch
        if store_id == ours or (not store_id and epoch_seen <= now):
            self._refused.discard(instance.incarnation)
            return
        whose = f"store {store_id}" if store_id else "a store that it does not name"
        refusal = (
            f"{instance.instance} (incarnation {instance.incarnation}) has obeyed coordinator epoch {epoch_seen} of "
            f"{whose}; this coordinator has epoch {now} of store {ours}. Restart the instance, so that it forgets "
            "the other coordinator, or point it at that one"
        )
        if instance.incarnation not in self._refused:
            self._refused.add(instance.incarnation)
            log.warning("refused to register: %s", refusal)
        raise ForeignInstance(refusal)

    def attach(self, incarnation: str, send: Callable[[str, Any], None]) -> None:
        """A session stream has opened."""
        now = self.event_log.monotonic()
        self.sessions[incarnation] = Session(send, now, opened_at=now)
        self._silences.heard(incarnation)
        self.lease_manager.attached(incarnation)
        self.event_log.wake()

    def detach(self, incarnation: str, send: Callable[[str, Any], None]) -> None:
        """A session stream has closed; a newer one of the same process stays."""
        session = self.sessions.get(incarnation)
        if session is not None and session.send is send:
            del self.sessions[incarnation]
            self._silences.begins(incarnation, session.heard_at)
            self.event_log.wake()

    def heartbeat(
        self, incarnation: str, epochs: Iterable[int], usage: InstanceUsage
    ) -> tuple[list[int], list[int]]:
        """Renews leases; returns (renewed, stale) epochs."""
        if session := self.sessions.get(incarnation):
            session.heard_at, session.usage = self.event_log.monotonic(), usage
            if (instance := self.event_log.state.instances.get(incarnation)) is not None:
                self.waits.progress[instance.instance] = usage.progress
        renewed = self.lease_manager.renew(incarnation, epochs)
        return renewed, [epoch for epoch in epochs if epoch not in renewed]

    def reported(self, incarnation: str, reports: Iterable[OpenReport]) -> None:
        """A process reported what it has open, at its registration or with a heartbeat."""
        if incarnation in self.event_log.state.instances:
            self.opened[incarnation] = {report.run: report for report in reports}
            self.on_report(incarnation)

    def suspected(self, incarnation: str, peers: Iterable[str]) -> None:
        """A process has lost others of its run. Those that are silent here, too, are stopped or cut off: killed."""
        mine = self.run_of(incarnation)
        self._silences.suspects(incarnation, (peer for peer in peers if mine and self.run_of(peer) == mine))
        self._kill_suspects()

    def _kill_suspects(self) -> None:
        for who, seconds in self._silences.lost_by_all():
            self.kill(who, f"neither its peers nor the coordinator have heard it for {seconds:.0f} s")

    def draining(self, incarnation: str, grace_s: float) -> None:
        """A process was told to stop: it gets no new work, and is told to exit once no run needs its state any more.

        `grace_s`: seconds after which it exits in any case.
        """
        state = self.event_log.state.instances.get(incarnation)
        if state is None or state.draining:
            return
        self.event_log.post(ev.InstanceDraining(incarnation=incarnation))
        if not self._hands_over(state):
            self.drained(incarnation, grace_s)

    async def drain(self, incarnation: str, *events: ev.Event) -> None:
        """Takes a process out of use in order, as its own `draining` does; durable, with `events`, on return.

        It has no deadline of its own: a trainer exits once its run has saved what it holds.
        """
        drains = ev.InstanceDraining(incarnation=incarnation)
        await self.event_log.commit(drains, *events)
        self._send_due_drains()

    def _send_due_drains(self) -> None:
        """Sends Drain to draining processes that no run needs; an earlier one may be lost, or a run has ended since."""
        for state in self.event_log.state.instances.values():
            session = self.sessions.get(state.incarnation)
            if state.draining and session and not session.drain_sent and not self._hands_over(state):
                self.drained(state.incarnation)

    def _hands_over(self, state: InstanceState) -> bool:
        """Whether a run saves what the process holds before it exits; the run then calls `drained`."""
        return state.kind == "trainer" and bool(self.run_of(state.incarnation))

    def drained(self, incarnation: str, grace_s: float = DRAIN_S) -> None:
        """Tells a draining process to exit: what it had is saved or made again elsewhere."""
        if session := self.sessions.get(incarnation):
            session.drain_sent = True
            session.send("drain", grace_s)

    def any_draining(self, workers: Iterable[WorkerClient]) -> bool:
        """Whether one of a run's instances was told to stop."""
        known = self.event_log.state.instances
        return any(w.incarnation in known and known[w.incarnation].draining for w in workers)

    def next_open_id(self) -> int:
        """An id above every one that was ever used in this store."""
        return (self.event_log.state.epoch << 32) + next(self._openings)

    def open_id_of(self, incarnation: str, run: str) -> int:
        """The id of the opening that the instance reports for the run, or a fresh one."""
        report = self.opened.get(incarnation, {}).get(run)
        return report.open_id if report and report.phase == "OPEN" and report.open_id else self.next_open_id()

    def exited(self, incarnation: str, reason: str) -> None:
        """A supervisor saw the process end: its devices are free at once."""
        self.deaths.died(incarnation)
        self.lease_manager.exited(incarnation)
        if incarnation in self.event_log.state.instances or incarnation in self.quarantines:
            self.event_log.post(ev.InstanceLost(incarnation=incarnation, reason=reason, proven=True))
        self.sessions.pop(incarnation, None)
        self._silences.forget(incarnation)
        self._clients.pop(incarnation, None)
        self.opened.pop(incarnation, None)
        self.event_log.wake()

    def supervised(self, supervisor: Supervisor) -> None:
        """A supervisor's list of processes: it runs all of its host, so a process that is not listed is proven gone.

        Compared at each connection: a later list of the same connection comes after the exits that it has reported.
        """
        previous = self.supervisors.get(supervisor.host)
        self.supervisors[supervisor.host] = supervisor
        if previous is None or previous.send is not supervisor.send:
            for incarnation in sorted(self._known_on(supervisor.host) - supervisor.incarnations):
                self.exited(incarnation, "its supervisor no longer runs it")
        self.event_log.wake()

    def hosts_gone(self, hosts: Iterable[str]) -> None:
        """A scaler's orchestrator no longer runs containers of these names: all processes in them have ended."""
        for host in sorted(set(hosts) - self.supervisors.keys()):
            for incarnation in sorted(self._known_on(host)):
                self.exited(incarnation, f"the container or pod {host} is gone")

    def _known_on(self, host: str) -> set[str]:
        """Processes of a host that are registered, hold a lease or have a device in quarantine."""
        state = self.event_log.state
        registered = {i.incarnation for i in state.instances.values() if i.host == host}
        return state.table.holders_on(host) | registered

    def _supervised(self) -> set[str]:
        """Processes that connected supervisors run."""
        return {who for supervisor in self.supervisors.values() for who in supervisor.incarnations}

    # --- for runs

    def ready(self, kind: str) -> list[InstanceState]:
        """Registered instances of a kind with a live session, by name."""
        return sorted(
            (
                i
                for i in self.event_log.state.instances.values()
                if i.kind == kind and i.incarnation in self.sessions
            ),
            key=lambda instance: instance.instance,
        )

    def alive(self, incarnation: str) -> bool:
        """The process is registered and its session is open."""
        return incarnation in self.event_log.state.instances and incarnation in self.sessions

    def _stage_ended(self, run: str, what: str, seconds: float) -> None:
        self.event_log.post(ev.StageEnded(run=run, what=what, seconds=seconds))

    def readable(self, text: str) -> str:
        """`text` with instance names for incarnation ids, and "{host}/cpu:0" for full device names."""
        for incarnation, name in self.names.items():
            text = text.replace(incarnation, name)
        instances = self.event_log.state.instances
        owners = {
            device.rpartition("/")[0]: machine
            for incarnation, machine in machines(instances.values()).items()
            for device in instances[incarnation].devices
        }
        for owner, machine in owners.items():
            text = text.replace(f"{owner}/", f"{machine}/") if owner else text
        return text

    def starting(self) -> bool:
        """More instances may come: a process has not registered yet, or not since our own restart."""
        known = self.event_log.state.instances
        return not self._supervised() <= known.keys() or not known.keys() <= self.sessions.keys()

    async def fate(self, incarnation: str, patience: float = 2.0) -> bool:
        """After a failed call: waits a little for the instance's exit to be noticed; True when it seems alive."""
        with suppress(WaitTimeout):
            await self.event_log.wait_until(lambda: not self.alive(incarnation), patience, "its fate")
        return self.alive(incarnation)

    async def fate_of_any(self, incarnations: Sequence[str], patience: float = 3.0) -> None:
        """After processes have lost one of them: waits a little until it is noticed which has ended."""
        what = "the fate of a trainer"
        with suppress(WaitTimeout):
            await self.event_log.wait_until(lambda: not all(map(self.alive, incarnations)), patience, what)

    def client(self, incarnation: str) -> InstanceClient:
        """The client of an instance; raises `InstanceDown` when it is not registered."""
        state = self.event_log.state.instances.get(incarnation)
        if state is None:
            raise InstanceDown(incarnation, "not registered")
        if incarnation not in self._clients:
            self._clients[incarnation] = self._connect(state.kind, state.address, incarnation)
        return self._clients[incarnation]

    def run_of(self, incarnation: str) -> str:
        """The run that an instance is granted to; empty when it is free."""
        for run in self.event_log.state.active_runs():
            if run.grant is not None and incarnation in run.grant.instances:
                return run.id
        return ""

    def send(self, incarnation: str, command: str, body: Any) -> None:
        """A command to a process; lost where it has no session."""
        if session := self.sessions.get(incarnation):
            session.send(command, body)

    def kill(self, incarnation: str, reason: str) -> bool:
        """Asks the instance's supervisor for a SIGKILL; False where there is none."""
        state = self.event_log.state.instances.get(incarnation)
        for supervisor in self.supervisors.values():
            if incarnation in supervisor.incarnations:
                name = state.instance if state else ""
                self.deaths.order(incarnation)
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
        now = self.event_log.monotonic()
        stood_still = now - self._swept_at - self.settings.sweep
        self._swept_at = now
        if stood_still > self.settings.heartbeat:
            # This process was stopped, swapped out or suspended: it could hear no instance, so no silence counts.
            log.warning("this process stood still for %.0f s: no lease expires for one lifetime", stood_still)
            self.lease_manager.wait_a_ttl()
            self._silences.starts_anew()
            for session in self.sessions.values():
                session.heard_at, session.usage = now, InstanceUsage()
        self.lease_manager.expire()
        lenient = self.lease_manager.lenient
        holders = {} if lenient else self.quarantines.free_proven()
        if not lenient:
            self._lose_silent(now)
            self._kill_suspects()
        self._send_due_drains()
        for incarnation in sorted(holders):
            reason = f"its lease ended and its devices are not proven free: {holders[incarnation]}"
            self.kill(incarnation, reason)

    def silent_for(self, incarnation: str) -> float:
        """Seconds since a registered process was last heard of, beyond two missed heartbeats; else 0."""
        return self._silences.seconds(incarnation)

    def silences(self, run: str) -> list[str]:
        """A sentence for each process of a run that is silent: for how long, and when it is killed."""
        ttl = self.settings.lease_ttl
        own = [i for i in self.event_log.state.instances.values() if self.run_of(i.incarnation) == run]
        silent = sorted((i.instance, self.silent_for(i.incarnation)) for i in own)
        told = "{} has been silent for {:.0f} s; it is killed at {:.0f} s"
        return [told.format(name, seconds, ttl) for name, seconds in silent if seconds]

    def _lose_silent(self, now: float) -> None:
        for state in list(self.event_log.state.instances.values()):
            if state.incarnation in self.sessions:
                session = self.sessions[state.incarnation]
                if now - session.heard_at > self.settings.lease_ttl:
                    self.detach(state.incarnation, session.send)
            alive = self.alive(state.incarnation)
            since = now if alive else self._silences.begins(state.incarnation, now)
            if now - since > self.settings.lease_ttl:
                self.kill(state.incarnation, "unheard of for a lease's lifetime")
                lost = ev.InstanceLost(incarnation=state.incarnation, reason="unheard of", proven=False)
                self.event_log.post(lost)
                self._silences.heard(state.incarnation)
                self.opened.pop(state.incarnation, None)
