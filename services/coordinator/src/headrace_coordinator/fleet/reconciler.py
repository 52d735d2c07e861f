"""Closes what should not be open: compares each instance's report with what its runs want.

Keeps nothing of earlier commands: every heartbeat is compared anew, so a close that was lost is repeated.
"""

from __future__ import annotations

import asyncio
import functools
import logging

from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.fleet.sessions import OpenReport

log = logging.getLogger(__name__)
SHARED = ("reward", "simulator")
"""Kinds whose instances serve many runs at once, so that no grant names them."""
PATIENCE_S = 90.0
"""An instance that keeps an unwanted run open for longer is killed."""


class Reconciler:
    """Compares every report of an instance; `trials`: openings without a run, such as scorers tried at a submission."""

    def __init__(self, fleet: Fleet) -> None:
        self.trials: set[str] = set()
        self._fleet = fleet
        self._closing: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._unwanted_since: dict[tuple[str, str], float] = {}
        fleet.on_report = self.look

    def wanted(self, instance: InstanceState, run_id: str) -> bool:
        """Whether the run may be open at the instance now."""
        if run_id in self.trials:
            return True
        run = self._fleet.event_log.state.runs.get(run_id)
        if run is None or run.grant is None:
            return False
        return instance.kind in SHARED or instance.incarnation in run.grant.instances

    def look(self, incarnation: str) -> None:
        """Closes what an instance reports as open and no run wants there."""
        instance = self._fleet.event_log.state.instances.get(incarnation)
        if instance is None:
            return
        reports = self._fleet.opened.get(incarnation, {})
        unwanted = {run for run in reports if not self.wanted(instance, run)}
        for key in [key for key in self._unwanted_since if key[0] == incarnation and key[1] not in unwanted]:
            del self._unwanted_since[key]
        for run in sorted(unwanted - {run for who, run in self._closing if who == incarnation}):
            task = asyncio.ensure_future(self._close(instance, reports[run]))
            self._closing[incarnation, run] = task
            task.add_done_callback(functools.partial(self._closed, (incarnation, run)))

    def _closed(self, key: tuple[str, str], _: asyncio.Task[None]) -> None:
        self._closing.pop(key, None)

    async def _close(self, instance: InstanceState, report: OpenReport) -> None:
        clock = asyncio.get_running_loop().time
        since = self._unwanted_since.setdefault((instance.incarnation, report.run), clock())
        client = WorkerClient(
            report.run,
            instance,
            self._fleet.client(instance.incarnation),
            self._fleet.event_log.state.epoch,
            open_id=report.open_id,
        )
        try:
            await client.close_run()
            log.info("closed %s at %s, which no run wants there", report.run, instance.instance)
        except (InstanceDown, CallRefused) as fault:
            log.warning("%s does not close %s: %s", instance.instance, report.run, fault)
            if clock() - since > PATIENCE_S:
                self._fleet.kill(instance.incarnation, f"it does not close {report.run}: {fault}")

    async def stop(self) -> None:
        """Ends the closes in flight."""
        tasks = list(self._closing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
