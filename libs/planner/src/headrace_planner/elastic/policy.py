"""When devices move inside a step: the elastic policy, a pure function of what a run knows of itself.

A run loop and the simulated cluster call the same code. Knows no lease, no wire, no simulator, and no length of an
unfinished output: only the distribution of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from headrace_planner.elastic.outlook import Outlook, Terms

MARKS = 16
"""Lengths at which a forecast looks; the seconds between two are exact."""
SPREADS = (
    math.inf, 8.0, 5.6, 4.0, 3.2, 2.6, 2.2, 1.8, 1.5, 1.25, 1.1, 1.0,
    0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.22, 0.15, 0.1, 0.06, 0.03,
)  # fmt: skip


class Role(StrEnum):
    """What a device becomes."""

    DECODE = "decode"
    HELP = "help"
    OWN = "own"


@dataclass(frozen=True)
class Rollout:
    """A rollout replica that decodes. `owner`: on devices of a trainer group that has devices of its own."""

    name: str
    devices: int
    unfinished: int
    owner: bool = False


@dataclass(frozen=True)
class ElasticState:
    """A step in progress.

    `decoded`: mean lengths that the unfinished outputs have so far. `finished`: items (of mean length) of whole groups
    that nobody has begun to learn; `partial`: finished ones whose group has unfinished ones too; `begun`: those that
    the trainer group was given and has not learned yet. `helpers`: devices that help. `owners_learn`: whether the
    trainer group is loaded and learns. `idle_owners`: trainer replicas that could decode. `moved_at`: when devices
    moved last.
    """

    terms: Terms
    rollouts: tuple[Rollout, ...]
    decoded: float
    finished: float
    helpers: int = 0
    owners_learn: bool = False
    idle_owners: tuple[Rollout, ...] = ()
    moved_at: float = -math.inf
    begun: float = 0.0
    partial: float = 0.0


@dataclass(frozen=True)
class Move:
    """The devices of a rollout replica change their role; its unfinished outputs go to those that decode on."""

    rollout: str
    role: Role


def plan_elastic(state: ElasticState, now: float) -> tuple[Move, ...]:
    """Moves to begin at `now` (seconds); none is the usual answer.

    At a step's begin, owners that would wait for data decode. Later the policy compares schedules in which devices stop
    decoding now, later, or never, and moves them now when this is predicted to end the step first, by the damping's
    margin. When nothing decodes any more, rollouts on devices of their own help owners with the groups that are left.

    >>> from headrace_planner import Lengths, Profile
    >>> lengths = Lengths.from_quantiles({0.5: 60, 0.9: 111, 1: 260})
    >>> terms = Terms(Profile("generate", fixed_s=50, item_s=0.1, lengths=lengths), Profile("learn", item_s=2.0),
    ...               group_size=4, owners=4, shared=True)
    >>> state = ElasticState(terms, tuple(Rollout(f"r{n}", 1, n % 2) for n in range(4)), decoded=2.0, finished=128)
    >>> [(move.rollout, move.role.value) for move in plan_elastic(state, now=100.0)]
    [('r0', 'help'), ('r1', 'help'), ('r2', 'help')]
    """
    outlook = outlook_of(state)
    if not outlook.unfinished:
        return _help_out(state, outlook)
    if now - state.moved_at < state.terms.costs.min_hold_s:
        return ()
    if state.idle_owners:
        return _borrow(state, outlook)
    if len(state.rollouts) < 2:
        return ()  # The last replica decodes what is left.
    stay, *others = forecasts(outlook)
    later = min(each.end for each in (stay, *others) if each.survivors == outlook.replicas)
    moving = [each for each in others if each.survivors < outlook.replicas]
    best = min(moving, key=lambda each: each.end, default=stay)
    if best is stay or best.end > stay.end * (1 - state.terms.costs.min_gain) or best.end > later:
        return ()
    return _give_back(state, best.survivors)


def helpers_until(state: ElasticState) -> float:
    """Seconds from now by which a helper must have learned a group that it takes; else the owners learn it.

    Owners of shared devices begin when decoding ends. Owners with devices of their own work beside the helpers, whose
    last group must not end after decoding has, nor after the owners would have learned all that waits by themselves.
    """
    terms, outlook = state.terms, outlook_of(state)
    decode = outlook.decode_s(outlook.replicas) * terms.beside if outlook.unfinished else 0.0
    if terms.shared:
        return decode + terms.generate.offload_s
    return max(decode, terms.learn.seconds(max(1.0, state.finished + state.begun), terms.owners))


def decode_after(state: ElasticState, moves: int) -> float:
    """Seconds from now until all is decoded, by the profile alone, once so many rollouts have handed theirs over."""
    outlook, survivors = outlook_of(state), max(1, len(state.rollouts) - moves)
    moved = outlook.moved(moves, outlook.decoded, outlook.replicas)
    resume_s = state.terms.resume_s(moved, moved * outlook.decoded) / survivors
    return outlook.decode_s(survivors) + resume_s


def owners_finish_sooner(terms: Terms, remaining_s: float, items: float) -> bool:
    """Whether owners that are ready should learn a helper's unfinished group of `items` (of mean length) themselves."""
    return remaining_s > terms.learn.seconds(items, terms.owners)


def _borrow(state: ElasticState, outlook: Outlook) -> tuple[Move, ...]:
    terms, borrowed = state.terms, len(state.idle_owners)
    switch = terms.learn.offload_s + terms.generate.load_s
    borrowing = switch + min(each.end for each in forecasts(with_owners(outlook, borrowed)))
    without = min(each.end for each in forecasts(outlook))
    if borrowing > without * (1 - terms.costs.min_gain):
        return ()
    return tuple(Move(rollout.name, Role.DECODE) for rollout in state.idle_owners)


def _help_out(state: ElasticState, outlook: Outlook) -> tuple[Move, ...]:
    """Nothing decodes any more: rollouts beside owners that learn help them with what is left."""
    terms = state.terms
    if terms.shared or not state.owners_learn:
        return ()
    count, seconds = terms.helping_out(outlook.unlearned, state.helpers, len(state.rollouts))
    without = terms.learn.seconds(outlook.unlearned, terms.owners + state.helpers)
    if seconds > without * (1 - terms.costs.min_gain):
        return ()
    return tuple(Move(rollout.name, Role.HELP) for rollout in state.rollouts[:count])


def _give_back(state: ElasticState, survivors: int) -> tuple[Move, ...]:
    """Owners leave first; then those with the fewest unfinished outputs."""
    order = sorted(state.rollouts, key=lambda rollout: (not rollout.owner, rollout.unfinished))
    leaving = sorted(order[: len(order) - survivors], key=lambda rollout: rollout.name)
    return tuple(Move(item.name, Role.OWN if item.owner else Role.HELP) for item in leaving)


def outlook_of(state: ElasticState) -> Outlook:
    """What is left of a step, in expected values."""
    return Outlook(
        state.terms,
        tuple(sorted(rollout.unfinished for rollout in state.rollouts)),
        decoded=state.decoded,
        finished=state.finished,
        partial=state.partial,
        helpers=state.helpers,
        borrowed=sum(rollout.owner for rollout in state.rollouts),
        owners_learn=state.owners_learn,
    )


@dataclass(frozen=True)
class Forecast:
    """Seconds until the step's end, and the replicas that decode on from now."""

    end: float
    survivors: int


def forecasts(outlook: Outlook) -> Iterator[Forecast]:
    """One forecast for each of SPREADS; in the first one nothing ever moves.

    The rule of a forecast: as many replicas decode as a spread times the square root of the share of outputs that is
    unfinished. A mean length takes `fixed + each * n / k` seconds with n outputs on k replicas, and
    `fixed * k + each * n` seconds of devices: whatever a device-second is worth elsewhere, k is best in proportion to
    the square root of n.

    >>> from headrace_planner import Lengths, Profile
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
    """A step up to the end of decoding. `helpers`: (since, devices); `marks`: (seconds, items that have arrived)."""

    outlook: Outlook
    replicas: int
    owners_since: float
    borrowed: int
    seconds: float = 0.0
    helpers: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, float]] = field(default_factory=list)

    def keep(self, survivors: int, length: float) -> None:
        """Only `survivors` replicas decode on; the others decode until the notice ends and become helpers."""
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
        """Items that helpers and owners have learned when decoding ends, limited by when the items arrive."""
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
    """How many of `replicas` decode on: the others form whole helpers, and owners' replicas stop first."""
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
    """The outlook if `borrowed` replicas on the owners' devices decode as well."""
    loads = tuple(sorted((*outlook.loads, *[0] * borrowed)))
    return replace(outlook, loads=loads, borrowed=outlook.borrowed + borrowed, owners_learn=False)
