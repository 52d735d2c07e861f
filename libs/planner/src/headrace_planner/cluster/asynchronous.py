"""An asynchronous run on the simulated cluster: open steps share the generator's devices, one step is learned after
the other. Installs happen in flight: sequences live on. Knows no policy that moves devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from headrace_planner.asynchronous import WAITED, Sides, check_staleness, sides
from headrace_planner.cluster.decoding import Replica
from headrace_planner.cluster.sampling import Draws, draw
from headrace_planner.errors import refuse
from headrace_planner.trees.costs import Workload

_STEP = 1 << 32
"""An output's number on a replica is its step's times this, and its place in the step."""


@dataclass(frozen=True)
class AsyncStep:
    """One committed step. Seconds are those since the step before was committed.

    `wait_tail_s`: the learner had nothing to do while all outputs of its step were in flight; `wait_data_s`: while
    some waited for a place on a replica or for their scores. `staleness`: steps that an output's first token lags
    behind the step's base, by output.
    """

    seconds: float
    wait_tail_s: float
    wait_data_s: float
    staleness: tuple[int, ...]


@dataclass(frozen=True)
class AsyncSimulated:
    """Steps of an asynchronous run, without those in which it filled up."""

    max_staleness: int
    steps: tuple[AsyncStep, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def waited_share(self) -> float:
        """Share of the steps in which the trainer waited for a tail."""
        return sum(step.wait_tail_s > WAITED * step.seconds for step in self.steps) / len(self.steps)

    @property
    def wait_share(self) -> float:
        """Share of the time in which it did."""
        return sum(step.wait_tail_s for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def staleness_mean(self) -> float:
        """Mean steps that outputs lag behind at their first token."""
        lags = [lag for step in self.steps for lag in step.staleness]
        return sum(lags) / len(lags)


def simulate_async(
    work: Workload,
    generating: int,
    learning: int,
    max_staleness: int,
    iterations: int = 4,
    seed: int = 0,
    given: Sequence[Draws] = (),
) -> AsyncSimulated:
    """`iterations` steps with the sides on devices of their own, after 2 (k + 1) steps in which the run fills up.

    A learner takes the groups of its step as they are complete, its fixed cost once a step. Publishing and installing
    take `sync.between_s`, in which the replicas decode nothing and the learner goes on. `given`: output lengths of
    steps, taken in turns; without them they are drawn by the seed. PlanError for a workload without two sides, or
    without room for them.
    """
    check_staleness(max_staleness)
    found = sides(work)
    if found is None:
        raise refuse("workflow", "has no generator with lengths and a learner", "simulate it synchronously")
    if work.items != round(work.items):
        raise refuse("items", f"{work.items} are no whole items", "use a whole number, at least 1")
    filling = 2 * (max_staleness + 1)
    drawn = [
        given[step % len(given)] if given else draw(work, seed, step) for step in range(filling + iterations)
    ]
    made = list(_Run(work, found, generating, learning, max_staleness, drawn).steps())
    return AsyncSimulated(max_staleness, tuple(made[filling:]))


@dataclass
class _OpenStep:
    """A step whose slots may start: outputs that each group misses, and the groups that wait to be learned."""

    draws: Draws
    missing: dict[int, int]
    unfinished: int
    staleness: list[int] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    """Work of settled groups, in items of mean length."""


class _Run:
    def __init__(
        self,
        work: Workload,
        found: Sides,
        generating: int,
        learning: int,
        bound: int,
        drawn: Sequence[Draws],
    ) -> None:
        kind, items = found.generate.kind, work.items
        budget = work.memory(kind)
        used = found.generate.used(items, generating)
        if not used or found.generate.concurrency(used, budget) < 1:
            raise refuse(f"stages.{found.generate.stage}", f"does not fit {generating} {kind}", "add devices")
        self._pace = found.generate.pace(used, budget)
        count = used // found.generate.replica_devices
        self._replicas = [Replica(self._pace, 0.0) for _ in range(count)]
        self._events: list[tuple[float, int, int]] = []
        self._stamps = [0] * count
        self._found, self._work, self._bound, self._drawn = found, work, bound, drawn
        self._open: dict[int, _OpenStep] = {}
        self._installed = 0
        whole = found.learn_s(items, learning, budget)
        self._fixed_s = sum(profile.fixed_s for profile in found.learners)
        self._item_s = max(0.0, whole - self._fixed_s) / items
        self._group = work.workflow.group_size

    def steps(self) -> Iterator[AsyncStep]:
        """Steps in order, each when it is committed."""
        for first in range(min(self._bound + 1, len(self._drawn))):
            self._start(first, 0.0)
        now, committed = 0.0, 0.0
        installs: list[tuple[float, int]] = []
        for number in range(len(self._drawn)):
            tail, data, begun = 0.0, 0.0, False
            while number not in self._open:  # its first slots wait for an install
                until = self._next(installs)
                data += until - now
                self._advance(until, installs)
                now = until
            step = self._open[number]
            while step.missing or step.waiting:
                ready = step.waiting and not (self._found.batch and step.unfinished)
                if ready:
                    weight, step.waiting = sum(step.waiting), []
                    until = now + weight * self._item_s + (0.0 if begun else self._fixed_s)
                    begun = True
                    self._advance(until, installs)
                    now = until
                    continue
                in_flight = step.unfinished == 0 or not self._queued(number)
                until = self._next(installs)
                tail, data = (tail + until - now, data) if in_flight else (tail, data + until - now)
                self._advance(until, installs)
                now = until
            lags = tuple(number - version for version in step.staleness)
            yield AsyncStep(now - committed, tail, data, lags)
            committed = now
            del self._open[number]
            installs.append((now + self._work.sync.between_s, number + 1))
            self._advance(now, installs)

    def _queued(self, number: int) -> bool:
        """Whether an output of the step waits for a place on a replica."""
        if self._pace.concurrency >= self._work.items * (self._bound + 1):
            return False
        return any(item // _STEP == number for replica in self._replicas for item in replica.queued)

    def _next(self, installs: Sequence[tuple[float, int]]) -> float:
        while self._events and self._events[0][2] != self._stamps[self._events[0][1]]:
            heappop(self._events)
        times = [when for when, *_ in self._events[:1]] + [when for when, _ in installs[:1]]
        return min(times, default=math.inf)

    def _advance(self, until: float, installs: list[tuple[float, int]]) -> None:
        """Decodes and installs up to a time."""
        while True:
            when = self._next(installs)
            if when > until or math.isinf(when):
                return
            if installs and installs[0][0] <= when:
                _, self._installed = installs.pop(0)
                self._install(when)
                continue
            _, index, _ = heappop(self._events)
            self._decode(index, when)
            self._push(index)

    def _install(self, when: float) -> None:
        """A version is installed everywhere, in flight; the slots of one more step may start."""
        for index, replica in enumerate(self._replicas):
            self._decode(index, when)
            replica.stall(self._work.sync.between_s)
            self._push(index)
        if (step := self._installed + self._bound) < len(self._drawn):
            self._start(step, when)

    def _start(self, number: int, when: float) -> None:
        draws = self._drawn[number]
        lengths = draws.lengths[self._found.generate.stage]
        missing: dict[int, int] = {}
        for item in range(len(lengths)):
            missing[item // self._group] = missing.get(item // self._group, 0) + 1
        self._open[number] = _OpenStep(
            draws,
            missing,
            len(lengths),
            staleness=[self._installed] * len(lengths),
        )
        loads = sorted((replica.unfinished, index) for index, replica in enumerate(self._replicas))
        given: dict[int, list[tuple[float, int]]] = {}
        for item, length in enumerate(lengths):
            load, index = heappop(loads)
            given.setdefault(index, []).append((length, number * _STEP + item))
            heappush(loads, (load + 1, index))
        for index, own in given.items():
            self._decode(index, max(when, self._replicas[index].now))
            self._replicas[index].add(own)
            self._push(index)

    def _push(self, index: int) -> None:
        self._stamps[index] += 1
        if (end := self._replicas[index].next_end) is not None:
            heappush(self._events, (end, index, self._stamps[index]))

    def _decode(self, index: int, until: float) -> None:
        for _, item in self._replicas[index].run(until):
            self._finish(*divmod(item, _STEP))

    def _finish(self, number: int, item: int) -> None:
        step, group = self._open[number], item // self._group
        step.unfinished -= 1
        step.missing[group] -= 1
        if not step.missing[group]:
            del step.missing[group]
            first = group * self._group
            members = range(first, min(first + self._group, len(step.draws.weights)))
            step.waiting.append(step.draws.weight(members))
