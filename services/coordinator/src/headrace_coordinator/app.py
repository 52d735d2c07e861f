"""The coordinator's process: what owns the event log, the fleet and the scheduler, and what answers its users."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from headrace_servicekit.contained.settings import CONTAINED

from headrace_coordinator.access.audit import Audit
from headrace_coordinator.access.quotas import Quotas
from headrace_coordinator.access.tokens import Tokens
from headrace_coordinator.access.trust import Trust
from headrace_coordinator.api.archive import Archive
from headrace_coordinator.api.changes import InstanceChanges, RunChanges
from headrace_coordinator.api.idempotency import Keys
from headrace_coordinator.api.labels import Labels
from headrace_coordinator.api.reading.past import Past
from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.reading.suites import SuiteEvaluations
from headrace_coordinator.api.recordings import Recordings, Videos
from headrace_coordinator.api.submission.submissions import Submissions
from headrace_coordinator.aside import READING
from headrace_coordinator.autoscaler import Autoscaler, Bounds
from headrace_coordinator.data.dataset import open_dataset
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.reconciler import Reconciler
from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.scheduler import MakeProjection, OpenDataset, Scheduler
from headrace_coordinator.sessions.service import SessionService
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.vitals import Vitals


class Coordinator:
    """Its parts; each route of the HTTP API uses the one that it is about.

    Writes return once they are durable (G8).
    """

    def __init__(
        self,
        event_log: EventLog,
        fleet: Fleet,
        data_dir: Path,
        make_projection: MakeProjection = RunProjection,
        open_dataset: OpenDataset = open_dataset,
        check_dataset: OpenDataset = partial(open_dataset, aside=READING),  # noqa: B008 - it is called later
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:6],
        bounds: Mapping[str, Bounds] = MappingProxyType({}),
        cooldown_s: float = 300.0,
        trust: Trust = Trust(),  # noqa: B008 - frozen
    ) -> None:
        """`bounds`: of the kinds whose number follows what runs want, with fewer after `cooldown_s`."""
        self.event_log = event_log
        self.contained = trust.level == CONTAINED
        """Whether services with users' code must contain it."""
        self.fleet, self.audit = fleet, Audit(data_dir)
        self.vitals = Vitals(event_log)
        self.scheduler = Scheduler(event_log, fleet, make_projection, open_dataset)
        self.reconciler = Reconciler(fleet)
        self.archive = Archive(event_log, lambda run: run in self.scheduler.tasks)
        labels = Labels(data_dir / "runs")
        self.reads = Reads(event_log, fleet, self.scheduler, self.archive, labels)
        self.recordings = Recordings(self.reads, fleet.recorder)
        self.past = Past(event_log, self.reads)
        self.suites = SuiteEvaluations(event_log, self.reads)
        self.videos = Videos(self.reads)
        keys = Keys(event_log)
        self.tokens, self.quotas = Tokens(event_log), Quotas(event_log, data_dir / "runs")
        self.submissions = Submissions(
            fleet,
            self.reconciler.trials,
            self.reads,
            self.past,
            keys,
            data_dir,
            check_dataset,
            new_id,
            self.quotas,
            trust,
        )
        self.run_changes = RunChanges(event_log, self.reads, keys, labels)
        self.instance_changes = InstanceChanges(fleet, keys)
        self.sessions = SessionService(event_log, fleet, self.reads, self.submissions)
        self.autoscaler = Autoscaler(event_log, self._scale, dict(bounds), cooldown_s)

    async def _scale(self, kind: str, count: int) -> None:
        await self.instance_changes.scale(kind, count, uuid.uuid4().hex)

    async def stop(self) -> None:
        """Ends the controllers where they are; a restart resumes their runs."""
        await self.scheduler.stop()
        await self.reconciler.stop()
        self.audit.close()
