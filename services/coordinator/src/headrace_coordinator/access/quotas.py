"""Quotas as requests meet them: what submissions, streams and requests may be, what is used, and an admin's changes."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_schema.access import QuotaRequest
from headrace_schema.resources.access import QuotaView, UsageView

from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import quotas
from headrace_coordinator.domain.access import OPERATE, Owned, Principal
from headrace_coordinator.domain.quotas import DISK, PRIORITY, REQUESTS, RUNS, STREAMS, subjects
from headrace_coordinator.domain.run_states import QUEUED

if TYPE_CHECKING:
    from limits.strategies import SlidingWindowCounterRateLimiter

    from headrace_coordinator.store.event_log import EventLog

GB = 1e9
SIZED_S = 60.0
"""How long the size of a subject's runs on disk is taken for known."""


class Quotas:
    """The quotas of the event log; `runs_directory` has the runs' files."""

    def __init__(self, event_log: EventLog, runs_directory: Path) -> None:
        self._event_log = event_log
        self._runs = runs_directory
        self._streams: Counter[str] = Counter()
        self._rates: SlidingWindowCounterRateLimiter | None = None
        """Made for the first quota of requests."""
        self._sizes: dict[str, tuple[float, float]] = {}
        """By subject: when it was measured, in seconds of a monotonic clock, and bytes."""

    def limit(self, subject: str, name: str) -> float | None:
        """A subject's quota, if it has one."""
        return quotas.limit(self._event_log.state.quotas, subject, name)

    async def set(self, asked: QuotaRequest) -> QuotaView:
        """Sets what a user or team may use, in place of what was set before."""
        limits = asked.model_dump(exclude_none=True, exclude={"subject"})
        await self._event_log.commit(ev.QuotaSet(subject=asked.subject, limits=limits))
        return QuotaView(subject=asked.subject, limits=limits)

    def all(self) -> list[QuotaView]:
        """All that are set."""
        found = self._event_log.state.quotas
        return [QuotaView(subject=name, limits=dict(found[name])) for name in sorted(found)]

    # --- what requests meet

    async def admit(self, caller: Principal, priority: int) -> None:
        """Refuses a submission beyond a quota: QUOTA, which says which one and when it frees."""
        state = self._event_log.state
        for subject in subjects(caller.name, caller.team):
            most = self.limit(subject, RUNS)
            runs = [run.id for run in quotas.active(state, subject)]
            if most is not None and len(runs) >= most:
                frees = f"it frees when one of them ends: {', '.join(sorted(runs)[:3])}" if runs else ""
                raise _beyond(subject, RUNS, most, f"{len(runs)} have not ended", frees)
            if (most := self.limit(subject, DISK)) is not None:
                used = await self.disk(subject) / GB
                if used >= most:
                    frees = "it frees as ended runs are deleted: headrace run delete RUN"
                    raise _beyond(subject, DISK, most, f"{used:.2f} are used", frees)
        highest = self.limit(f"user:{caller.name}", PRIORITY)
        if highest is None:
            highest = 100.0 if caller.may(OPERATE) else 0.0
        if priority > highest:
            reason = f"scheduling.priority is {priority}, and {caller.name} may use {highest:g} at most"
            raise Refused("FORBIDDEN", f"{reason}; more needs the scope {OPERATE}, or an admin's quota")

    def stream(self, caller: Principal) -> AbstractContextManager[None]:
        """Counts a stream of the caller while it is entered; raises Refused QUOTA beyond the quota."""
        mine = subjects(caller.name, caller.team)
        for subject in mine:
            most = self.limit(subject, STREAMS)
            if most is not None and self._streams[subject] >= most:
                there = f"{self._streams[subject]} are open"
                raise _beyond(subject, STREAMS, most, there, "it frees when one is closed")
        return self._streaming(mine)

    @contextmanager
    def _streaming(self, mine: tuple[str, ...]) -> Iterator[None]:
        self._streams.update(mine)
        try:
            yield
        finally:
            self._streams.subtract(mine)
            self._streams += Counter()  # without subjects that have none

    def refused_s(self, caller: Principal) -> tuple[str, float]:
        """(why a request is one too many, seconds until another is answered); ("", 0.0) for one that is answered."""
        if not self._event_log.state.quotas:
            return "", 0.0
        for subject in subjects(caller.name, caller.team):
            most = self.limit(subject, REQUESTS)
            if most is None:
                continue
            if (left := self._wait_s(subject, int(most))) > 0:
                why = _beyond(subject, REQUESTS, most, "all are used", f"it frees in {left:.0f} s")
                return why.message, left
        return "", 0.0

    def _wait_s(self, subject: str, most: int) -> float:
        """Counts a request; seconds until another is answered where it is one too many, else 0."""
        from limits import RateLimitItemPerMinute

        if self._rates is None:
            from limits.storage import MemoryStorage
            from limits.strategies import SlidingWindowCounterRateLimiter

            self._rates = SlidingWindowCounterRateLimiter(MemoryStorage())
        rate = RateLimitItemPerMinute(most)
        if self._rates.hit(rate, subject):
            return 0.0
        return max(1.0, self._rates.get_window_stats(rate, subject).reset_time - time.time())

    async def disk(self, subject: str) -> float:
        """Bytes of a subject's runs on disk, at most SIZED_S old."""
        measured, size = self._sizes.get(subject, (float("-inf"), 0.0))
        if time.monotonic() - measured > SIZED_S:
            owned = self._owned().items()
            names = [name for name, run in owned if subject in subjects(run.owner, run.team)]
            size = await asyncio.to_thread(_size, [self._runs / name for name in names])
            self._sizes[subject] = time.monotonic(), size
        return size

    def _owned(self) -> dict[str, Owned]:
        """All runs by id."""
        state = self._event_log.state
        return {**state.ended, **state.runs}

    # --- what is used

    async def usage(self, caller: Principal) -> list[UsageView]:
        """What the caller and its teams use and may use; of everybody for those who operate the fleet."""
        state = self._event_log.state
        mine = {f"user:{caller.name}", *(f"team:{team}" for team in caller.teams)}
        known = {subject for run in self._owned().values() for subject in subjects(run.owner, run.team)}
        known |= {name for name in state.quotas if not name.endswith(":*")} | state.usage.keys() | mine
        return [await self._used(name) for name in sorted(known) if name in mine or caller.may(OPERATE)]

    async def _used(self, subject: str) -> UsageView:
        state, now = self._event_log.state, self._event_log.now()
        runs = quotas.active(state, subject)
        grants = {run.id: run.grant for run in runs if run.grant is not None}
        limits = {name: most for name in quotas.QUOTAS if (most := self.limit(subject, name)) is not None}
        return UsageView(
            subject=subject,
            runs=len(runs),
            queued=sum(run.state == QUEUED for run in runs),
            devices=quotas.held(grants, state, subject),
            device_hours=quotas.hours(state, subject, now),
            disk_gb=await self.disk(subject) / GB,
            streams=self._streams[subject],
            limits=limits,
        )


def _beyond(subject: str, name: str, most: float, there: str, frees: str) -> Refused:
    words = f"{subject} has a quota of {most:g} {name}: {there}"
    return Refused("QUOTA", f"{words}; {frees}" if frees else words)


def _size(folders: list[Path]) -> float:
    """Bytes of all files below folders; one that goes away meanwhile has none."""
    total = 0
    for folder in folders:
        for directory, _, files in os.walk(folder):
            for file in files:
                try:
                    total += os.lstat(os.path.join(directory, file)).st_size
                except OSError:
                    continue
    return float(total)
