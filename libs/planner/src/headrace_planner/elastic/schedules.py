"""When a step would end if rollouts gave their devices back by a rule: what the elastic policy compares.

The rule: as many replicas decode as a `spread` times the square root of the share of outputs that is unfinished. A
mean length takes `fixed + each * n / k` seconds with n outputs on k replicas, and `fixed * k + each * n` seconds of
devices: whatever a device-second is worth elsewhere, k is best in proportion to the square root of n.

Knows no names of instances and no true length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from headrace_planner.elastic.outlook import Outlook

MARKS = 16
"""Lengths at which a forecast looks; the seconds between two are exact."""
SPREADS = (
    math.inf, 8.0, 5.6, 4.0, 3.2, 2.6, 2.2, 1.8, 1.5, 1.25, 1.1, 1.0,
    0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.22, 0.15, 0.1, 0.06, 0.03,
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """Seconds until the step's end, and the replicas that decode on from now."""

    end: float
    survivors: int


def forecasts(outlook: Outlook) -> Iterator[Forecast]:
    """One for each spread; in the first one nothing ever moves.

    >>> from headrace_planner import Lengths, Profile
    >>> from headrace_planner.elastic.outlook import Terms
    >>> lengths = Lengths.from_quantiles({0.5: 60, 0.9: 111, 1: 260})
    >>> terms = Terms(Profile("generate", fixed_s=50, item_s=0.1, lengths=lengths), Profile("learn", item_s=2.0),
    ...               group_size=4, owners=4, shared=True)
    >>> stay, *moved = forecasts(Outlook(terms, (0, 0, 1, 1), decoded=2.0, finished=128.0, helpers=0))
    >>> stay.survivors, round(stay.end), round(min(each.end for each in moved))
    (4, 137, 89)
    """
    for spread in SPREADS:
        yield _forecast(outlook, spread)


@dataclass
class _Course:
    """A step walked to the end of decoding: (since, devices) of helpers, when owners learn, (seconds, arrived)."""

    outlook: Outlook
    replicas: int
    owners_since: float
    borrowed: int
    seconds: float = 0.0
    helpers: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)

    def keep(self, survivors: int, length: float) -> None:
        """The other replicas give their devices back, with a notice in which they still decode."""
        outlook, terms = self.outlook, self.outlook.terms
        leaving = self.replicas - survivors
        if leaving <= 0:
            return
        if self.borrowed:
            self.owners_since = self.seconds + terms.return_s
        devices = (leaving - self.borrowed) * terms.generate.replica_devices
        if devices:
            self.helpers.append((self.seconds + terms.join_s, devices))
        moved = outlook.moved(leaving, length, self.replicas)
        self.seconds += terms.resume_s(moved, moved * length) / survivors
        self.replicas, self.borrowed = survivors, 0

    def learned(self) -> float:
        """Items that are learned when decoding ends: what helpers and owners can, of what has arrived in time."""
        outlook, end = self.outlook, self.seconds
        rate = outlook.owners_rate if math.isfinite(self.owners_since) else 0.0
        learners = self.helping + (outlook.terms.owners if rate else 0)
        if not learners:
            return 0.0
        group = outlook.terms.group_size * max(
            1.0, outlook.decoded
        )  # what is yet to come is at least as long
        group_s = outlook.terms.helper_s(group, learners)

        def capacity(since: float) -> float:
            """Items from a time on: helpers learn whole groups."""
            whole = sum(
                devices * (max(0.0, end - max(since, ready)) // group_s) for ready, devices in self.helpers
            )
            spent = max(0.0, end - max(since, self.owners_since)) if rate else 0.0
            return whole * group / outlook.terms.helper_devices + spent * rate

        arrived = (items + capacity(seconds) for seconds, items in self.marks)
        return min(capacity(0.0), *arrived)

    @property
    def helping(self) -> int:
        """Devices that help."""
        return sum(devices for _, devices in self.helpers)


def _forecast(outlook: Outlook, spread: float) -> Forecast:
    course = _Course(outlook, outlook.replicas, 0.0 if outlook.owners_learn else math.inf, outlook.borrowed)
    if outlook.helpers:
        course.helpers.append((0.0, outlook.helpers))
    last, first = outlook.last, outlook.replicas
    lengths = [outlook.decoded + (last - outlook.decoded) * step / MARKS for step in range(MARKS + 1)]
    for index, (here, there) in enumerate(pairwise(lengths)):
        course.keep(_survivors(outlook, course.replicas, spread * math.sqrt(outlook.alive(here))), here)
        first = first if index else course.replicas
        course.marks.append((course.seconds, outlook.finished + outlook.arriving(here)))
        slower = outlook.terms.beside if course.helpers else 1.0
        course.seconds += outlook.between(here, there, course.replicas, begins=not index) * slower
    course.marks.append((course.seconds, outlook.finished + outlook.arriving(last)))
    return Forecast(_end(outlook, course), first)


def _survivors(outlook: Outlook, replicas: int, share: float) -> int:
    """Replicas of so many that decode on; the others make whole helpers, and owners leave first."""
    if share >= 1:
        return replicas
    own, size = outlook.replicas - outlook.borrowed, outlook.terms.generate.replica_devices
    leaving = own - max(1, math.ceil(own * share - 1e-9))
    team = max(1, outlook.terms.helper_devices // size)
    return min(replicas, own - leaving // team * team)


def _end(outlook: Outlook, course: _Course) -> float:
    terms, decode = outlook.terms, course.seconds
    rest = max(terms.group_size, outlook.unlearned - course.learned())  # the last group ends with decoding
    close = terms.contribution_s(course.helping) if course.helpers else 0.0
    if not math.isfinite(course.owners_since):
        switch = terms.return_s - terms.costs.notice_s
        return decode + switch + close + terms.learn.seconds(rest, terms.owners)
    together = terms.owners + course.helping
    learners = together if rest >= together / terms.helper_devices * terms.group_size else terms.owners
    _, helped_out = terms.helping_out(rest, course.helping, course.replicas)
    return max(decode, course.owners_since) + close + min(terms.learn.seconds(rest, learners), helped_out)


def with_owners(outlook: Outlook, borrowed: int) -> Outlook:
    """The outlook when replicas on the owners' devices decode as well."""
    loads = tuple(sorted((*outlook.loads, *[0] * borrowed)))
    return replace(outlook, loads=loads, borrowed=outlook.borrowed + borrowed, owners_learn=False)
