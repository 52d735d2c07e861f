"""Quotas and fair share of users and teams: what each has used, holds, and may have. Pure.

A quota is set for `user:NAME` or `team:NAME`; `user:*` and `team:*` are those of everybody who has none of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace_coordinator.domain.run_states import PAUSED

if TYPE_CHECKING:
    from headrace_coordinator.domain.runs import Grant, RunState
    from headrace_coordinator.domain.state import State

RUNS, DEVICES, HOURS, DISK, STREAMS, REQUESTS, PRIORITY = QUOTAS = (
    "runs",
    "devices",
    "device_hours",
    "disk_gb",
    "streams",
    "requests_per_minute",
    "priority",
)
DAY_S = 86400.0
DAYS = 30
"""Device-hours count for so many days, by days of UTC."""


def subjects(owner: str, team: str) -> tuple[str, ...]:
    """Whose quotas somebody's work counts against."""
    return (f"user:{owner}", f"team:{team}") if team else (f"user:{owner}",)


def limit(quotas: Mapping[str, Mapping[str, float]], subject: str, name: str) -> float | None:
    """A subject's own quota, else that of everybody of its kind; None: there is none."""
    own = quotas.get(subject)
    found = own if own is not None else quotas.get(f"{subject.partition(':')[0]}:*", {})
    return found.get(name)


def charge(
    usage: dict[str, dict[int, float]], subject: str, since: float, until: float, devices: int
) -> None:
    """Adds the device-seconds of a time to the days that it is of, and forgets days that count no more."""
    days = usage.setdefault(subject, {})
    while since < until:
        day = int(since // DAY_S)
        end = min(until, (day + 1) * DAY_S)
        days[day] = days.get(day, 0.0) + (end - since) * devices
        since = end
    for day in [day for day in days if day <= int(until // DAY_S) - DAYS]:
        del days[day]


def active(state: State, subject: str) -> list[RunState]:
    """A subject's runs that have not ended."""
    return [run for run in state.active_runs() if subject in subjects(run.owner, run.team)]


def hours(state: State, subject: str, now: float) -> float:
    """Device-hours that a subject has used in the last DAYS, until now."""
    oldest = int(now // DAY_S) - DAYS
    past = sum(used for day, used in state.usage.get(subject, {}).items() if day > oldest)
    live = sum(run.held_s(now) for run in active(state, subject))
    return (past + live) / 3600.0


def held(grants: Mapping[str, Grant], state: State, subject: str, but: str = "") -> int:
    """Devices that a subject's runs hold, without those of one."""
    runs = (state.runs[name] for name in grants if name != but and name in state.runs)
    mine = [run.id for run in runs if subject in subjects(run.owner, run.team)]
    return sum(len(grants[name].devices) for name in mine)


def exhausted(state: State, run: RunState, now: float) -> str:
    """Why a run may not work now, as the device-hours of its owner or team are used up; empty where it may."""
    for subject in subjects(run.owner, run.team):
        most = limit(state.quotas, subject, HOURS)
        if most is not None and (used := hours(state, subject, now)) >= most:
            return (
                f"{subject} has used {used:.1f} of its quota of {most:g} device_hours in {DAYS} days; "
                f"some are free again on {_frees(state, subject, now)}"
            )
    return ""


def beyond(state: State, grants: Mapping[str, Grant], run: RunState, devices: int) -> str:
    """Why a run may not hold so many devices beside what its owner's and team's others hold; empty where it may."""
    for subject in subjects(run.owner, run.team):
        most = limit(state.quotas, subject, DEVICES)
        others = held(grants, state, subject, run.id)
        if most is None or others + devices <= most:
            continue
        if devices > most:
            return f"{subject} has a quota of {most:g} devices, and the run needs {devices}: it cannot start with it"
        names = [name for name in grants if name != run.id]
        mine = [name for name in names if subject in subjects(state.runs[name].owner, state.runs[name].team)]
        return (
            f"{subject} holds {others} of its quota of {most:g} devices, and the run needs {devices}: it starts when "
            f"{' or '.join(mine[:3])} releases some"
        )
    return ""


def _frees(state: State, subject: str, now: float) -> str:
    """The day on which the oldest device-hours count no more."""
    days = [day for day, used in state.usage.get(subject, {}).items() if used]
    first = min(days, default=int(now // DAY_S)) + DAYS
    return datetime.fromtimestamp(first * DAY_S, UTC).strftime("%Y-%m-%d")


def circles(owner: str, team: str) -> tuple[str, str]:
    """Between whom devices are shared fairly: first teams (who has none is one by himself), then users of one."""
    outer = f"team:{team}" if team else f"user:{owner}"
    return outer, f"{outer}/{owner}"


def live_shares(state: State, now: float) -> dict[str, float]:
    """Device-seconds over weight that each team and user of an active run has used, until now."""
    shares: dict[str, float] = {}
    for run in state.active_runs():
        for circle in circles(run.owner, run.team):
            shares.setdefault(circle, state.shares.get(circle, 0.0))
            shares[circle] += run.held_s(now) / run.weight
    return shares


def levelled(state: State, newcomer: RunState, now: float) -> Iterator[tuple[str, float]]:
    """(team or user that comes to the queue, its share raised to the least of the others): time away gives no claim."""
    others = [run for run in state.active_runs() if run is not newcomer and run.state != PAUSED]
    shares, own = live_shares(state, now), circles(newcomer.owner, newcomer.team)
    for place, circle in enumerate(own):
        names = {circles(run.owner, run.team)[place] for run in others}
        if circle in names:
            continue
        if place:  # users are compared within one team
            names = {name for name in names if name.startswith(f"{own[0]}/")}
        least = min((shares[name] for name in names), default=0.0)
        yield circle, max(state.shares.get(circle, 0.0), least)
