"""Asynchronous steps: generation and learning side by side, over several open steps. Predicts; simulates nothing.

A slot of step s starts once the version of step s - k is installed (`max_staleness` k), so that k + 1 steps are open.
Then a step takes as long as the slower side, unless its longest output takes longer than k + 1 steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace_planner.errors import refuse
from headrace_planner.graph import Granularity
from headrace_planner.profiling.profiles import Pace, Profile
from headrace_planner.trees.costs import Workload, pipelined
from headrace_planner.trees.search import MAX_CHUNKS

MAX_STALENESS = 16
"""The largest bound that a run may have."""
WAITED = 0.01
"""Share of a step from which on its learner is said to have waited for a tail."""
_BISECTIONS = 60
_ITERATIONS = 200


@dataclass(frozen=True)
class Sides:
    """What the two sides of an asynchronous run are: the generator, and the stages that the learner's devices take."""

    generate: Profile
    learners: tuple[Profile, ...]
    batch: bool
    """Whether learning waits for all outputs of its step."""

    def learn_s(self, items: float, devices: int, memory_bytes: float = math.inf) -> float:
        """Seconds in which `devices` devices learn `items` items, their stages one after the other."""
        return sum(profile.seconds(items, devices, memory_bytes) for profile in self.learners)


@dataclass(frozen=True)
class AsyncPlan:
    """Seconds of a step on `generating` and `learning` devices, and of its sides: `generate_s` a step's outputs alone.

    `wait_s`: what a step takes beyond the slower side because the longest output of a step is not finished.
    """

    seconds: float
    generating: int
    learning: int
    max_staleness: int
    generate_s: float
    learn_s: float
    wait_s: float


def sides(work: Workload) -> Sides | None:
    """The sides of a workload; None where it is no generator with lengths whose outputs are learned from.

    Stages on other kinds of device than the generator's, such as scorers on the host, are beside both.
    """
    workflow = work.workflow
    source = work.source((1 << len(workflow.units)) - 1)
    if source is None or any(len(unit) > 1 for unit in workflow.units):
        return None
    generate = work.profiles[source]
    learners = tuple(
        profile
        for stage, profile in work.profiles.items()
        if stage != source and profile.kind == generate.kind
    )
    if not learners:
        return None
    learned = {profile.stage for profile in learners}
    batch = any(edge.granularity is Granularity.BATCH for edge in workflow.edges if edge.target in learned)
    return Sides(generate, learners, batch)


def check_staleness(max_staleness: int) -> None:
    """PlanError unless it is a bound that a run may have."""
    if not 0 <= max_staleness <= MAX_STALENESS:
        raise refuse("max_staleness", f"is {max_staleness}", f"use 0 to {MAX_STALENESS}")


def period(work: Workload, generating: int, learning: int, max_staleness: int) -> AsyncPlan:
    """A step of `generating` and `learning` devices side by side; its seconds are infinite where either does not fit.

    With T seconds a step, a replica that gets q items a step has n = q r / T of them in flight, by Little's law, where
    r = fixed + each n are the seconds of one mean length. So r = fixed / (1 - each q / T); other paces are iterated.
    The step's longest output must be made, and its last group learned, within the k + 1 steps in which its step is
    open: (k + 1) T >= longest r + last group + sync. With k = 0 the step is that of a synchronous pipeline.

    >>> from headrace_planner import DeviceKind, Lengths, Profile, reasoning
    >>> profiles = {"generate": Profile("generate", fixed_s=10, item_s=1, lengths=Lengths((1.0, 1.0, 1.0, 5.0))),
    ...             "learn": Profile("learn", item_s=1.0)}
    >>> work = Workload(reasoning(infer=False), {**profiles, "score": Profile("score", "host", item_s=1e-9)},
    ...                 {"gpu": DeviceKind(8), "host": DeviceKind(1)}, items=64)
    >>> [round(period(work, 4, 4, k).seconds, 1) for k in (0, 1, 4)]
    [53.0, 29.4, 21.2]
    """
    check_staleness(max_staleness)
    found = sides(work)
    if found is None:
        raise refuse("workflow", "has no generator with lengths and a learner", "plan it synchronously")
    kind = found.generate.kind
    budget = work.memory(kind)
    alone = found.generate.seconds(work.items, generating, budget)
    learn_s = found.learn_s(work.items, learning, budget)
    if math.isinf(alone + learn_s):
        return AsyncPlan(math.inf, generating, learning, max_staleness, alone, learn_s, 0.0)
    sync = work.sync.between_s
    if not max_staleness:
        made = _in_one_step(work, found, generating, alone, learn_s) + sync
        return AsyncPlan(made, generating, learning, 0, alone, learn_s, max(0.0, made - max(alone, learn_s)))
    piece = learn_s if found.batch else learn_s * min(1.0, work.workflow.group_size / work.items)
    used = found.generate.used(work.items, generating)
    pace = found.generate.pace(used, budget)
    load = work.items * found.generate.replica_devices / used
    least = max(learn_s, _saturated(pace, load, max_staleness))

    def holds(seconds: float) -> bool:
        made = _longest_s(found.generate, pace, load, work.items, seconds)
        return (max_staleness + 1) * seconds >= made + piece + sync

    low, high = least, max(least, alone + learn_s + sync)
    if not holds(low):
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(middle) else (middle, high)
    else:
        high = low
    return AsyncPlan(high, generating, learning, max_staleness, alone, learn_s, high - least)


def _in_one_step(work: Workload, found: Sides, generating: int, alone: float, learn_s: float) -> float:
    """Seconds of a synchronous step whose groups are learned as they arrive."""
    groups = max(1, int(work.items) // work.workflow.group_size)
    chunks = 1 if found.batch else min(MAX_CHUNKS, groups)
    times = found.generate.arrivals(work.items, generating, work.workflow.group_size, chunks)
    return pipelined(times, alone, learn_s / chunks)


def _saturated(pace: Pace, load: float, bound: int) -> float:
    """Seconds that a step's outputs need at least, with as many in flight as fit and as the open steps have."""
    most = float(pace.concurrency)
    if pace.power == 1.0:
        return load * (pace.fixed / most + pace.each)
    # All that may start is started: of k + 1 open steps half of one is finished, in the mean.
    most = min(most, (bound + 0.5) * load)
    return load * pace.seconds(most) / most


def _rate(pace: Pace, load: float, seconds: float) -> float:
    """Seconds of one mean length, with a step of `load` outputs a replica every `seconds` seconds."""
    if pace.power == 1.0:
        free = 1 - pace.each * load / seconds
        return pace.fixed / free if free > 0 else math.inf
    rate = pace.fixed
    for _ in range(_ITERATIONS):
        rate, before = pace.seconds(load * rate / seconds), rate
        if rate <= before * (1 + 1e-9) or rate > 1e6 * max(seconds, pace.fixed):
            break
    return rate


def _longest_s(generate: Profile, pace: Pace, load: float, items: float, seconds: float) -> float:
    """Seconds from the start to the end of a step's longest output, with a step every `seconds` seconds."""
    longest = generate.lengths.expected_longest(items) if generate.lengths else 1.0
    return longest * _rate(pace, load, seconds)


def best_period(work: Workload, max_staleness: int) -> AsyncPlan | None:
    """The fastest division of the devices between the sides; None where there is none.

    The fewest devices generate among equals.
    """
    found = sides(work)
    if found is None:
        return None
    plans = (
        period(work, *pair, max_staleness)
        for pair in _divisions(found, work.devices[found.generate.kind].count)
    )
    best = min(plans, key=lambda plan: plan.seconds, default=None)
    return None if best is None or math.isinf(best.seconds) else best


def _divisions(found: Sides, devices: int) -> Iterator[tuple[int, int]]:
    step = found.generate.replica_devices
    for generating in range(found.generate.smallest, devices, step):
        yield generating, devices - generating


def enough_staleness(work: Workload, generating: int, learning: int, share: float = 0.01) -> int | None:
    """The least bound with which waiting for a tail is at most a share of the step; None where none does."""
    for bound in range(MAX_STALENESS + 1):
        made = period(work, generating, learning, bound)
        if made.wait_s <= share * made.seconds:
            return bound
    return None


def ending_staleness(steps: Sequence[tuple[float, float]], bound: int) -> int | None:
    """About the least bound with which no measured step had waited for its tail; None where it is above MAX_STALENESS.

    `steps`: of consecutive steps the seconds, and those in which the learner waited for the tail, measured with
    `bound`. A tail has bound + 1 steps' time, and took these steps' work and waits; with the bound that ends the waits
    the work alone is as long. What more outputs in flight cost the generator is not known here.
    """
    waits = [wait for _, wait in steps]
    longest = max((sum(waits[max(0, end - bound) : end + 1]) for end in range(len(waits))), default=0.0)
    at_work = sum(seconds - wait for seconds, wait in steps) / max(1, len(steps))
    if longest <= WAITED * at_work:
        return bound
    needed = bound + math.ceil(longest / at_work - WAITED) if at_work > 0 else math.inf
    return int(needed) if needed <= MAX_STALENESS else None
