"""The log of a world, applied again event by event, with what must hold after each of them for all runs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.devices.demand import shares
from headrace_coordinator.domain.devices.leases import DECODE, LeaseTable
from headrace_coordinator.domain.devices.scheduling import Gift, plan_admission, plan_regroup
from headrace_coordinator.domain.ledger.slot_index import SlotIndex
from headrace_coordinator.domain.state import State
from headrace_coordinator.store.memory_store import MemoryStore
from typing_extensions import override

from headrace_simulation.judging.judge import Violation

Pair = tuple[str, str]
NEVER = {
    (run_states.CANCELLING, other) for other in (run_states.RUN, run_states.PAUSE, run_states.PAUSE_NOW)
} | {(run_states.CANCELLED, other) for other in (run_states.RUN, run_states.PAUSE, run_states.PAUSE_NOW)}
"""Only the intent CANCEL leads to these states, and it cannot be changed any more."""
REACHABLE = {(state, intent) for state in run_states.STATES for intent in run_states.INTENTS} - NEVER


class RecordingStore(MemoryStore):
    """A `MemoryStore`; `log` has every event that was ever appended, in order, also those that a snapshot covers."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[ev.Event] = []

    @override
    async def append(self, epoch: int, expected: int, first: int, payloads: list[bytes]) -> None:
        before = self._stored.sequence
        try:
            await super().append(epoch, expected, first, payloads)
        finally:
            if self._stored.sequence != before:
                self.log += [ev.decode(payload) for payload in payloads]


class Replay:
    """The folded state, every run that ended, and which (state, intent) pairs were visited."""

    def __init__(self, log: Iterable[ev.Event]) -> None:
        self.state = State()
        self.runs: dict[str, runs.RunState] = {}
        self.pairs: Counter[Pair] = Counter()
        self.submissions = 0
        self.refilled = self.helped = 0
        self.ahead = 0
        """Most steps that were open ahead of the one that is learned."""
        self.borrowed = 0
        """Times that a trainer group's device decoded."""
        self.regrouped = 0
        """Changes of a trainer group's size."""
        self.given = 0
        """Changes of size with which a run gave trainers to another run."""
        self.passed = 0
        """Leases of devices that another run had last, which it still was granted."""
        self._last: dict[str, str] = {}
        self.longest_wait: dict[str, float] = {}
        self.longest_quantum = 0.0
        for event in log:
            self._before(event)
            self.state.apply(event)
            self._after(event)
            self._open_steps(event)

    def _before(self, event: ev.Event) -> None:
        match event:
            case ev.TrainersChanged():
                self._regroup(event)
            case ev.RunAdmitted():
                grants = plan_admission(self.state, event.at).grants
                if not grants or grants[0] != event:
                    raise Violation(f"admission: the log has {event}, the rule gives {grants[:1]}")
                run = self.state.runs[event.run]
                if run.grant is None:
                    waited = event.at - run.queued_at
                    self.longest_wait[run.id] = max(waited, self.longest_wait.get(run.id, 0.0))
            case ev.RunStateChanged(state=state):
                run = self.state.runs[event.run]
                if state not in run_states.FOLLOWS[run.state]:
                    raise Violation(f"run life: {event.run} went from {run.state} to {state}")
                self._true_reason(run, event)
            case ev.RunSubmitted():
                self.submissions += 1
            case ev.LeaseGranted():
                self._lease(event)

    def _regroup(self, event: ev.TrainersChanged) -> None:
        """Checks a change of a trainer group: between two steps of a run at work, free trainers, the same leader."""
        run = self.state.runs[event.run]
        planned = plan_regroup(self.state, event.run, event.ranks, event.reason, event.at, event.given_to)
        if planned != event:
            raise Violation(f"regroup: the log has {event}, the rule gives {planned}")
        if (run.ledger.open and run.state == run_states.RUNNING) or run.state not in run_states.ADMITTED:
            raise Violation(f"regroup: {run.id} is {run.state}, with a step open: {run.ledger.open}")
        if len(event.trainers) != event.ranks:
            raise Violation(f"regroup: {event.ranks} ranks are {event.trainers}")
        gift = plan_admission(self.state, event.at).gifts.get(run.id) if event.given_to else None
        if event.given_to and gift != Gift(event.ranks, event.given_to, event.reason):
            raise Violation(f"regroup: the log has {event}, the rule gives {gift}")
        self.regrouped += 1
        self.given += bool(event.given_to)

    def _open_steps(self, event: ev.Event) -> None:
        """Checks the open steps of a run: so many as its staleness allows, one behind the other, with their slots."""
        run = self.state.runs.get(event.run) if isinstance(event, ev.RunEvent) else None
        if run is None or not isinstance(event, ev.SlotsOpened | ev.StepOpened | ev.StepRefilled):
            return
        ledger, most = run.ledger, run.spec["algorithm"].get("max_staleness", 0)
        steps = list(ledger.steps)
        if steps != list(range(ledger.step, ledger.step + len(steps))) or len(steps) > most + 1:
            raise Violation(
                f"credits: {run.id} has steps {steps} open at {ledger.step}, max_staleness {most}"
            )
        self.ahead = max(self.ahead, len(steps) - 1)
        prompts = [prompt for step in steps for prompt in ledger.prompts_of(step)]
        slots = [ledger.ordinal(prompt, sample) for prompt in prompts for sample in range(ledger.group_size)]
        if sorted(ledger.slots) != slots:
            raise Violation(f"credits: {run.id} has other slots than those of its open steps")
        index, fresh = ledger.index, SlotIndex(ledger.slots.values())
        if (index.waiting, index.assigned, index.open, index.settled) != (
            fresh.waiting,
            fresh.assigned,
            fresh.open,
            fresh.settled,
        ):
            raise Violation(f"credits: {run.id} counts slots that it does not have")

    def _true_reason(self, run: runs.RunState, event: ev.RunStateChanged) -> None:
        reason, head = event.reason, run.lineage.head
        if "bug in the coordinator" in reason:
            raise Violation(f"run {run.id}: {reason}")
        if "last checkpoint stays" in reason and not run.last_checkpoint:
            raise Violation(f"run {run.id} has no checkpoint, and says: {reason}")
        leaves = run.state in run_states.ADMITTED and event.state in (run_states.PAUSED, run_states.QUEUED)
        if leaves and head and head != run.last_checkpoint and "could not be saved" not in reason:
            raise Violation(f"run {run.id} became {event.state} without a checkpoint of {head}: {reason}")

    def _lease(self, event: ev.LeaseGranted) -> None:
        run = self.state.runs.get(event.run)
        if run is None or run.grant is None:
            raise Violation(f"leases: {event} for a run that holds no grant")
        beyond = set(event.devices) - set(run.grant.devices)
        if beyond:
            raise Violation(f"leases: {event.run} leases {sorted(beyond)}, which it was not granted")
        others = {lease.run for lease in self.state.table.of(event.incarnation)} - {event.run}
        if others:
            raise Violation(f"leases: {event.incarnation} works for {event.run} and {sorted(others)}")

    def _after(self, event: ev.Event) -> None:
        match event:
            case ev.StepRefilled(groups=groups):
                self.refilled += groups
            case ev.GroupsAccumulated(prompts=prompts, helper=helper):
                self.helped += len(prompts) if helper else 0
            case ev.LeaseGranted():
                self._count_passed(event)
                self.borrowed += event.stage == DECODE
            case ev.RunAdmitted():
                self._disjoint()
            case ev.RunStateChanged() | ev.RunIntentChanged() | ev.RunSubmitted():
                run = self.state.runs[event.run]
                self.runs[run.id] = run
                self.longest_quantum = max(self.longest_quantum, run.quantum_s)
                self.pairs[run.state, run.intent] += 1
                if run.state not in run_states.ADMITTED and run.grant is not None:
                    raise Violation(f"run {run.id} is {run.state} and holds {run.grant}")

    def _count_passed(self, event: ev.LeaseGranted) -> None:
        for device in event.devices:
            before = self.state.runs.get(self._last.get(device, event.run))
            if before is not None and before.grant is not None and before.id != event.run:
                self.passed += device in before.grant.devices
            self._last[device] = event.run

    def _disjoint(self) -> None:
        """No instance is granted to two runs, and no device, but to runs that all share."""
        admitted = [(run, run.grant) for run in self.state.active_runs() if run.grant is not None]
        held = Counter(name for _, grant in admitted for name in {*grant.instances, *grant.devices})
        alone = {name for run, grant in admitted for name in grant.devices if not shares(run)}
        alone |= {name for _, grant in admitted for name in grant.instances}
        doubled = sorted(name for name, count in held.items() if count > 1 and name in alone)
        if doubled:
            raise Violation(f"admission: {doubled} are granted to two runs")


def nothing_held(table: LeaseTable) -> list[str]:
    """Leases that are left."""
    return [f"{lease.incarnation} holds {lease.devices} for {lease.run}" for lease in table.leases.values()]
