"""What the HTTP API reads of the state: runs and the queue, instances, leases, devices. Writes nothing."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from headrace_schema.problems import nearest
from headrace_schema.resources.fleet import DeviceView, GpuUseView, InstanceView, LeaseView
from headrace_schema.resources.overviews import FlowView, RunSummaryView
from headrace_schema.resources.views import EndpointView, RunView

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.archive import Archive
from headrace_coordinator.api.labels import Labels
from headrace_coordinator.api.reading.curves import read_spark
from headrace_coordinator.api.reading.presenters import flow_view, run_summary_view, run_view
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.access import OPERATE, Owned
from headrace_coordinator.domain.devices.demand import instances_wanted
from headrace_coordinator.domain.pipelines import pipeline
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.state import EndedRun, InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.online import endpoint_key
from headrace_coordinator.fleet.sessions import InstanceUsage
from headrace_coordinator.scheduler import Scheduler
from headrace_coordinator.store.event_log import EventLog

Entry = TypeVar("Entry")
Place = TypeVar("Place")
Page = tuple[list[Entry], Place | None]
"""Entries of a list, and where the next page begins, or None at the end."""
SPARKS_KEPT = 4096
ANOTHER_RUN = "another user's run"
RUN_ID = re.compile(r"[\w.-]+-\w+")
"""What may be the id of a run, in a text."""
RUNS_A_TURN = 20
"""Runs of a list between two turns of the event loop: archived ones are read from files, half a second a thousand."""
Spark = list[float | None]


class Reads:
    """Runs from their running figures, archived ones from their last view."""

    def __init__(
        self, event_log: EventLog, fleet: Fleet, scheduler: Scheduler, archive: Archive, labels: Labels
    ) -> None:
        self._labels = labels
        self._event_log = event_log
        self._fleet = fleet
        self._scheduler = scheduler
        self._archive = archive
        self._sparks = _Sparks()

    def run(self, run_id: str) -> RunView:
        """One run; NOT_FOUND names the nearest id."""
        state = self._event_log.state
        if (ended := self._ended(run_id)) is not None and run_id not in state.runs:
            view = self._archive.view(run_id)
            line = pipeline(state, run_id, view.pipeline[:-1])
            changes = {"visibility": ended.visibility, "pipeline": self._discreetly(line)}
            return self._labels.shown(view.model_copy(update=changes))
        run = self.find(run_id)
        plan = self._scheduler.plan
        queue = list(plan.waiting)
        place = (
            queue.index(run_id) + 1
            if run_id in queue and not run.awaited and run.state == run_states.QUEUED
            else None
        )
        view = run_view(run, self._waiting_for(run), place, plan.gifts.get(run_id))
        doing = self._fleet.waits.stages(run_id)
        view = view.model_copy(update={"pipeline": pipeline(state, run_id, run.follows), "doing": doing})
        texts = view.model_dump(
            include={"reason", "ranks_reason", "waiting_for", "doing", "warnings", "pipeline"}
        )
        return self._labels.shown(view.model_copy(update=self._discreetly(texts)))

    def _discreetly(self, value: Any) -> Any:
        """`discreet` for callers who may not know of every run."""
        return value if CALLER.get().may(OPERATE) else self.discreet(value)

    def discreet(self, value: Any) -> Any:
        """The value, with words in place of every id of a run that the caller may not know of."""
        if isinstance(value, str):
            return RUN_ID.sub(lambda found: self.named(found[0]), value) if "-" in value else value
        if isinstance(value, dict):
            return {key: self.discreet(each) for key, each in value.items()}
        return [self.discreet(each) for each in value] if isinstance(value, list) else value

    def endpoint(self, run_id: str, base_url: str) -> EndpointView:
        """Where clients of an online run speak with its policy: at `base_url`. NOT_FOUND for another run."""
        served = bool(self.endpoints(run_id))
        return EndpointView(
            base_url=base_url if served else "", api_key=endpoint_key(self.find(run_id).directory)
        )

    def endpoint_key(self, run_id: str) -> str:
        """The key of an online run that this coordinator has known at work; empty for any other name."""
        run, online = self._event_log.state.runs.get(run_id), self._fleet.online.get(run_id)
        if online is not None and online.key:
            return online.key
        if run is None or not (run.spec.get("agent") or {}).get("online"):
            return ""
        self._fleet.online[run_id].key = key = endpoint_key(run.directory)
        return key

    def endpoints(self, run_id: str) -> list[str]:
        """Addresses of the endpoints of an online run, at its rollout instances. NOT_FOUND for another run."""
        run = self.find(run_id)
        if not (run.spec.get("agent") or {}).get("online"):
            raise Refused("NOT_FOUND", f"run {run_id} is not online: no client speaks with it (agent.online)")
        granted = run.grant.rollouts if run.grant is not None else ()
        online = self._fleet.online.get(run_id)
        urls = online.urls if online else {}
        return [urls[each] for each in granted if each in urls and self._fleet.alive(each)]

    def sessions_ended(self, run_id: str) -> Mapping[str, int]:
        """How many sessions of an online run ended since this coordinator began, by what became of them."""
        online = self._fleet.online.get(run_id)
        return online.ended if online else {}

    def find(self, run_id: str) -> RunState:
        """A run that has not been archived; NOT_FOUND, or CONFLICT for one that has."""
        caller, state = CALLER.get(), self._event_log.state
        if (run := state.runs.get(run_id)) and caller.knows(run):
            return run
        if ended := self._ended(run_id):
            raise Refused("CONFLICT", f"run {run_id} is {ended.state}; nothing can change it any more")
        raise self.missing(run_id)

    def missing(self, run_id: str) -> Refused:
        """What is said of a run that is not there, or that the caller may not know of."""
        close = nearest(run_id, self.newest_first()[:200])
        hint = f"; did you mean {close}?" if close else ""
        return Refused("NOT_FOUND", f"there is no run {run_id}{hint}")

    def _ended(self, run_id: str) -> EndedRun | None:
        """An archived run that the caller may know of."""
        ended = self._event_log.state.ended.get(run_id)
        return ended if ended is not None and CALLER.get().knows(ended) else None

    def owned(self, run_id: str) -> Owned | None:
        """Whose a run is, whoever asks; None where there is none."""
        state = self._event_log.state
        return state.runs.get(run_id) or state.ended.get(run_id)

    def knows(self, run_id: str) -> bool:
        """Whether a run is there and the caller may know of it."""
        owned = self.owned(run_id)
        return owned is not None and CALLER.get().knows(owned)

    def sees(self, run_id: str) -> bool:
        """Whether the caller may read what is in a run that is there."""
        owned = self.owned(run_id)
        return owned is not None and CALLER.get().sees(owned)

    def named(self, run_id: str) -> str:
        """The id of a run that the caller may know of; else words in its place."""
        owned = self.owned(run_id)
        return run_id if owned is None or CALLER.get().knows(owned) else ANOTHER_RUN

    def newest_first(self) -> list[str]:
        """Ids of all runs that the caller may know of, archived ones included."""
        knows, state = CALLER.get().knows, self._event_log.state
        created = {run: ended.created_at for run, ended in state.ended.items() if knows(ended)}
        created |= {run.id: run.created_at for run in state.runs.values() if knows(run)}
        return sorted(created, key=created.__getitem__, reverse=True)

    def _waiting_for(self, run: RunState) -> list[str]:
        """What a run waits for now."""
        waiting = [self._fleet.readable(what) for what in self._fleet.waits.of(run.id)]
        waiting += self._fleet.silences(run.id)
        if self._event_log.store_away:
            waiting.append(f"the store (Redis) to accept writes: {self._event_log.store_trouble}")
        if self._event_log.history.trouble:
            waiting.append(f"the disk of the data directory: {self._event_log.history.trouble}")
        queue = self._scheduler.plan.waiting
        if run.state == run_states.QUEUED and run.id in queue:
            waiting.append(self._fleet.readable(queue[run.id]))
        return waiting

    def runs(
        self, size: int, after: str = "", states: frozenset[str] = frozenset(), oldest_first: bool = False
    ) -> Page[RunView, str]:
        """Runs behind run `after`, newest first, in one of the `states`, or in any when there are none.

        ValueError when there is no run `after`; its own state does not matter, so that a page stays valid.
        """
        names = self.newest_first()[:: -1 if oldest_first else 1]
        behind = names[names.index(after) + 1 if after else 0 :]
        found = list(islice((name for name in behind if self._matches(name, states, "")), size + 1))
        shown = found[:size]
        return [self.run(name) for name in shown], shown[-1] if len(found) > size else None

    async def summaries(
        self,
        size: int,
        after: str,
        states: frozenset[str],
        search: str,
        columns: Sequence[str] = (),
        *,
        evaluations: bool = True,
    ) -> tuple[list[RunSummaryView], str | None, int]:
        """(runs in short with `columns` behind run `after`, newest first; where the next page begins; how many match).

        Those in one of the `states`, or in any when there are none, whose id or a tag of theirs contains `search`.
        ValueError when `after` does not match.
        """
        every = [name for name in self.newest_first() if evaluations or not self._evaluates(name)]
        place = every.index(after) + 1 if after else 0
        before = [name for name in every[:place] if self._matches(name, states, search)]
        behind = [name for name in every[place:] if self._matches(name, states, search)]
        shown = []
        for number, name in enumerate(behind[:size]):
            if number % RUNS_A_TURN == RUNS_A_TURN - 1:
                await asyncio.sleep(0)
            if self.knows(name):  # else deleted meanwhile, or no longer shared
                shown.append(await self._summary(self.run(name), columns))
        return shown, shown[-1].id if len(behind) > size else None, len(before) + len(behind)

    def _evaluates(self, name: str) -> bool:
        state = self._event_log.state
        return bool(state.runs[name].evaluation if name in state.runs else state.ended[name].evaluation)

    def _matches(self, name: str, states: frozenset[str], search: str) -> bool:
        state = self._event_log.state
        run = state.runs.get(name) or state.ended[name]
        words = [name, *self._labels.tags(name)]
        return any(search.lower() in word.lower() for word in words) and (not states or run.state in states)

    async def _summary(self, run: RunView, columns: Sequence[str]) -> RunSummaryView:
        spark = self._sparks.known(run)
        if spark is None:
            spark = self._sparks.keep(run, await self._event_log.history.read(run.id, read_spark))
        return run_summary_view(run, spark, columns)

    def instances_wanted(self) -> dict[str, int]:
        """How many instances of each kind the runs of now could use."""
        return instances_wanted(self._event_log.state)

    def run_states(self) -> dict[str, int]:
        """How many runs there are by state."""
        state = self._event_log.state
        knows = CALLER.get().knows
        states = [run.state for run in state.runs.values() if knows(run)]
        return Counter(states + [run.state for run in state.ended.values() if knows(run)])

    def queue_wait(self) -> float:
        """Seconds for which the run that has waited longest for its admission has waited; 0 where none waits."""
        now, active = self._event_log.now(), self._event_log.state.active_runs()
        return max((now - run.queued_at for run in active if run.state == run_states.QUEUED), default=0.0)

    def checkpoint_ages(self) -> dict[str, float]:
        """Seconds since each running run that writes checkpoints wrote one, or since it was admitted."""
        now, active = self._event_log.now(), self._event_log.state.active_runs()
        writing = [
            run
            for run in active
            if run.state == run_states.RUNNING and run.spec.get("checkpoint", {}).get("enabled")
        ]
        return {run.id: max(0.0, now - max(run.checkpoint_at, run.admitted_at)) for run in writing}

    def flow(self, run_id: str) -> FlowView:
        """Where the slots of the step in hand stand."""
        ended = self.run(run_id).ended
        run = None if ended else self._event_log.state.runs.get(run_id)
        return flow_view(run, self._fleet.names)

    def instances(self) -> list[InstanceView]:
        """All registered instances."""
        states = self._event_log.state.instances.values()
        return [instance_view(self._fleet, state) for state in sorted(states, key=lambda each: each.instance)]

    def instances_returning(self) -> list[InstanceView]:
        """Those that ended a moment ago, as if they were back already."""
        views = [instance_view(self._fleet, state) for state in self._fleet.deaths.returning()]
        return [view.model_copy(update={"state": "READY"}) for view in views]

    def leases(self) -> list[LeaseView]:
        """All leases."""
        fleet = self._fleet
        return [
            LeaseView.of(
                lease,
                instance=fleet.readable(lease.incarnation),
                expires_in_s=fleet.lease_manager.expires_in(lease.epoch),
            )
            for lease in self._event_log.state.table.leases.values()
        ]

    def devices(self) -> list[DeviceView]:
        """All devices that any instance may be given."""
        state = self._event_log.state
        names = {device for each in state.instances.values() for device in each.devices}
        return [self._device(name) for name in sorted(names | set(state.table.quarantined))]

    def _device(self, name: str) -> DeviceView:
        table = self._event_log.state.table
        if quarantine := table.quarantined.get(name):
            holder, reason = quarantine.incarnation, quarantine.reason
            return DeviceView(name=name, state="QUARANTINED", holder=holder, reason=reason)
        held = table.holders_of(name)
        return DeviceView(
            name=name,
            state="LEASED" if held else "FREE",
            holder=", ".join(self._fleet.readable(lease.incarnation) for lease in held),
            reason=", ".join(f"{lease.run} {lease.stage}" for lease in held),
        )


class _Sparks:
    """Sparklines of runs, read again only once a run has another version; the oldest ones are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, Spark]] = OrderedDict()

    def known(self, run: RunView) -> Spark | None:
        """The run's sparkline as of its newest version; None when it must be read."""
        version, spark = self._known.get(run.id, (-1, []))
        return spark if version == _version(run) else None

    def keep(self, run: RunView, spark: Spark) -> Spark:
        """Remembers and returns it."""
        self._known[run.id] = _version(run), spark
        self._known.move_to_end(run.id)
        while len(self._known) > SPARKS_KEPT:
            self._known.popitem(last=False)
        return spark


def _version(run: RunView) -> int:
    return run.last_step.version if run.last_step else 0


def instance_view(fleet: Fleet, state: InstanceState) -> InstanceView:
    """A registered instance, and how busy it is by its last heartbeat."""
    session = fleet.sessions.get(state.incarnation)
    usage = session.usage if session else InstanceUsage()
    silent_s = fleet.silent_for(state.incarnation)
    return InstanceView.of(
        state,
        name=state.instance,
        state="SILENT"
        if silent_s
        else "LOST"
        if session is None
        else "DRAINING"
        if state.draining
        else "READY",
        run=fleet.run_of(state.incarnation),
        resident_memory_bytes=usage.resident_memory_bytes,
        busy_cores=round(usage.busy_cores, 2),
        gpus=[
            GpuUseView(device=device, busy=busy, used_memory_bytes=used) for device, busy, used in usage.gpus
        ],
        last_heartbeat_age_s=fleet.event_log.monotonic() - session.heard_at if session else -1.0,
        silent_for_s=silent_s,
    )
