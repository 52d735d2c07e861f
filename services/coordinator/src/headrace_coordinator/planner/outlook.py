"""What is left of a step and when it would end, in expected values: the arithmetic of the elastic policy.

Knows no names of instances and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from headrace_coordinator.planner.errors import refuse
from headrace_coordinator.planner.lengths import Lengths
from headrace_coordinator.planner.profiles import Profile

BISECTIONS = 20
QUARTERS = 4
MARKS = 6


@dataclass(frozen=True)
class MoveCosts:
    """What moving devices costs, and when it is worth it.

    `notice_s`: from a revoke to the end of decoding. A helper loads `weight_bytes` and sends `gradient_bytes` over
    a link of `link_bytes_per_s`, which every device has. `resume_item_s`: seconds of a replica to compute the cache of
    one mean length that another one decoded.

    Damping: a move must save `min_gain` of the rest of the step, and comes `min_hold_s` after the last one.
    """

    notice_s: float = 1.0
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    link_bytes_per_s: float = math.inf
    resume_item_s: float = 0.0
    min_gain: float = 0.02
    min_hold_s: float = 10.0

    def __post_init__(self) -> None:
        """PlanError when a cost is negative or no number, or when a rate or the hold is 0."""
        for name, value in vars(self).items():
            if not value >= 0 or (value == 0 and name in ("link_bytes_per_s", "min_hold_s")):
                raise refuse(
                    f"moves.{name}", f"is {value}", "use a number above 0, or 0 for what costs nothing"
                )


@dataclass(frozen=True)
class Terms:
    """What the policy knows of a plan.

    `owners`: devices of the trainer group. `shared`: they are the rollouts' own devices, so that the group learns
    only when all of them have been given back (a collocated plan); else they are others (a disaggregated one).
    `memory_bytes`: of one device, for what a replica may have in flight.
    """

    generate: Profile
    learn: Profile
    group_size: int
    owners: int
    shared: bool
    costs: MoveCosts = MoveCosts()
    memory_bytes: float = math.inf

    @property
    def lengths(self) -> Lengths:
        """Output lengths; equal ones unless the profile has some."""
        return self.generate.lengths or Lengths((1.0,))

    @property
    def join_s(self) -> float:
        """Seconds from a revoke until the device learns as a helper."""
        return (
            self.costs.notice_s
            + self.generate.offload_s
            + self.costs.weight_bytes / self.costs.link_bytes_per_s
        )

    @property
    def return_s(self) -> float:
        """Seconds from a revoke until an owner that decoded belongs to the trainer group."""
        return self.costs.notice_s + self.generate.offload_s + self.learn.load_s

    def contribution_s(self, helpers: int) -> float:
        """Seconds to add up the gradients of helpers, over the links of the owners."""
        return math.ceil(helpers / self.owners) * self.costs.gradient_bytes / self.costs.link_bytes_per_s


@dataclass(frozen=True)
class Outlook:
    """What is left of a step, in expected values.

    `unfinished` outputs on `replicas` have decoded `decoded` each, `finished` items wait for a learner; `borrowed` of
    the replicas are owners'.
    """

    terms: Terms
    replicas: int
    unfinished: float
    decoded: float
    finished: float
    helpers: int
    borrowed: int
    owners_learn: bool

    def decode_s(self, replicas: int) -> float:
        """Seconds until all outputs are finished on `replicas` replicas."""
        return self._until(self._last, replicas)

    def _until(self, length: float, replicas: int) -> float:
        """Seconds until those that reach `length` have it."""
        lengths, load = self.terms.lengths, self.unfinished / replicas
        pace = self._pace(replicas)
        work = (lengths.decoded(length) - self._decoded) / self._share
        rounds = max(0.0, load / pace[2] - 1)
        return pace[0] * max(0.0, length - self.decoded) + pace[1] * load * work + pace[0] * rounds

    def _pace(self, replicas: int) -> tuple[float, float, int]:
        pace = self.terms.generate.pace(
            replicas * self.terms.generate.replica_devices, self.terms.memory_bytes
        )
        return pace.fixed, pace.each, pace.concurrency

    def best(self) -> tuple[float, int]:
        """(seconds until the step's end, replicas that decode on) when devices are given back now."""
        return min(((self.end(count), count) for count in self._choices()), default=(math.inf, 0))

    def _choices(self) -> Iterator[int]:
        """Numbers of replicas that decode on: quarters, then halves, of those that may."""
        own = self.replicas - self.borrowed
        if self.borrowed:
            yield own
        found = {own * part // QUARTERS for part in range(1, QUARTERS)}
        while own > 1:
            own //= 2
            found.add(own)
        yield from sorted(found - {0}, reverse=True)

    def later(self) -> float:
        """Seconds until the step's end when devices are given back at the best of some later times."""
        whole, wait, best = self.decode_s(self.replicas), self.terms.costs.min_hold_s, math.inf
        while wait < whole:
            best = min(best, wait + self.after(wait).best()[0])
            wait *= 2
        return best

    def after(self, seconds: float) -> Outlook:
        """The outlook when nothing has moved for some seconds."""
        low, high = self.decoded, self._last
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._until(middle, self.replicas) < seconds else (low, middle)
        learned = self._learned(self.replicas, self.helpers, 0.0, seconds)
        alive = self.unfinished * self.terms.lengths.unfinished(low) / self._share
        arrived = self.finished + self._arriving(low) - learned
        return replace(self, decoded=low, unfinished=max(1.0, alive), finished=max(0.0, arrived))

    def end(self, survivors: int) -> float:
        """Seconds until the step's end when `survivors` replicas decode on and the others are given back now."""
        terms, leaving = self.terms, self.replicas - survivors
        back = self.borrowed if leaving else 0
        helpers = self.helpers + (leaving - back) * terms.generate.replica_devices
        moved = self.unfinished * leaving / self.replicas
        stall = moved * self.decoded * terms.costs.resume_item_s / survivors
        decode = self.decode_s(survivors) + stall
        begin = terms.join_s if helpers > self.helpers else 0.0
        then = replace(self, owners_learn=self.owners_learn or back > 0, borrowed=self.borrowed - back)
        learned = then._learned(survivors, helpers, begin, decode, stall)
        rest = max(
            terms.group_size, self.unlearned - learned
        )  # the last group is never learned before it ends
        close = terms.contribution_s(helpers) if helpers else 0.0
        if not then.owners_learn:
            switch = terms.return_s - terms.costs.notice_s
            return decode + switch + close + terms.learn.seconds(rest, terms.owners)
        together = terms.owners + helpers
        learners = together if rest >= together * terms.group_size else terms.owners
        return decode + close + terms.learn.seconds(rest, learners)

    @cached_property
    def unlearned(self) -> float:
        """Items (of mean length) of the step that nobody has begun to learn, expected."""
        beyond = (1 - self._decoded) / self._share + self.decoded
        return self.finished + self.unfinished * beyond

    @cached_property
    def _last(self) -> float:
        return self.terms.lengths.longest(self.unfinished, self.decoded)

    @cached_property
    def _share(self) -> float:
        """Share of all outputs that are longer than what is decoded."""
        return max(self.terms.lengths.unfinished(self.decoded), 1e-9)

    @cached_property
    def _decoded(self) -> float:
        return self.terms.lengths.decoded(self.decoded)

    @cached_property
    def _arrived(self) -> float:
        return self.terms.lengths.arrived(self.decoded, self.terms.group_size)

    @cached_property
    def _owners_rate(self) -> float:
        """Items that the trainer group learns a second."""
        whole = max(1.0, self.unlearned)
        return whole / self.terms.learn.seconds(whole, self.terms.owners)

    def _arriving(self, length: float) -> float:
        """Items (of mean length) that are complete when all have decoded a length, and are not yet."""
        more = self.terms.lengths.arrived(length, self.terms.group_size) - self._arrived
        return self.unfinished * max(0.0, more) / self._share

    def _learned(self, replicas: int, helpers: int, begin: float, end: float, stall: float = 0.0) -> float:
        """Items learned by `end` when helpers begin at `begin`: what they can learn, of what has arrived in time."""
        if not helpers and not self.owners_learn:
            return 0.0
        terms, rate = self.terms, self._owners_rate if self.owners_learn else 0.0
        learners = helpers + (terms.owners if self.owners_learn else 0)
        group = terms.group_size * max(1.0, self.decoded)  # what is yet to come is at least as long
        group_s = terms.learn.seconds(group * learners, learners)

        def capacity(since: float) -> float:
            """Items that helpers, which learn whole groups, and owners can learn from a time on."""
            spent = max(0.0, end - since)
            return helpers * (spent // group_s) * group + spent * rate

        least = min(capacity(begin), self.finished + self._arriving(self._last))
        for step in range(MARKS):
            length = self.decoded + (self._last - self.decoded) * step / MARKS
            since = max(begin, self._until(length, replicas) + stall)
            if since > end:
                break
            least = min(least, self.finished + self._arriving(length) + capacity(since))
        return least
