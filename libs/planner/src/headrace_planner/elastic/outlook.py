"""What is left of a step and when it would end, in expected values: the arithmetic of the elastic policy.

Knows no names of instances and decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from headrace_planner.errors import refuse
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.profiling.profiles import Profile


@dataclass(frozen=True)
class MoveCosts:
    """What moving devices costs, and when it is worth it.

    `notice_s`: from a revoke to the end of decoding. A helper loads `weight_bytes` and sends `gradient_bytes` over
    a link of `link_bytes_per_s`, which every device has. `resume_item_s`: seconds of a replica to compute the cache of
    one mean length that another one decoded, and the prompt's `prompt` mean lengths before it. A helper learns one mean
    length in `helper_item_s` on one device; 0: no faster than one of as many devices in one trainer group.

    Damping: a move must save `min_gain` of the rest of the step, and comes `min_hold_s` after the last one.
    """

    notice_s: float = 1.0
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    link_bytes_per_s: float = math.inf
    resume_item_s: float = 0.0
    prompt: float = 0.0
    helper_item_s: float = 0.0
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
    only when all of them have been released (a collocated plan); else they are others (a disaggregated one).
    `memory_bytes`: of one device, for what a replica may have in flight. A helper is `helper_devices` devices, whose
    ranks divide each of its groups and send one gradient. `beside`: how many times as long decoding takes beside
    helpers as the profile says, which contend for memory and caches.
    """

    generate: Profile
    learn: Profile
    group_size: int
    owners: int
    shared: bool
    costs: MoveCosts = MoveCosts()
    memory_bytes: float = math.inf
    helper_devices: int = 1
    beside: float = 1.0

    @property
    def lengths(self) -> Lengths:
        """Output lengths; equal ones unless the profile has some."""
        return self.generate.lengths or Lengths((1.0,))

    def resume_s(self, outputs: float, decoded: float) -> float:
        """Seconds of a replica to compute the caches of outputs that have decoded so much together."""
        return (decoded + outputs * self.costs.prompt) * self.costs.resume_item_s

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

    def helper_s(self, items: float, learners: int) -> float:
        """Seconds of one helper for some items (of mean length), among so many devices that learn."""
        alone = items * self.costs.helper_item_s or self.learn.seconds(items * learners, learners)
        return alone / self.helper_devices

    def contribution_s(self, helpers: int) -> float:
        """Seconds to add up the gradients of so many devices that help, over the links of the owners."""
        gradients = math.ceil(helpers / self.helper_devices / self.owners)
        return gradients * self.costs.gradient_bytes / self.costs.link_bytes_per_s

    def helping_out(self, items: float, helpers: int, replicas: int) -> tuple[int, float]:
        """How many of some replicas that decode no more should help, and the seconds to learn `items` then.

        Each helper needs a group of its own once it has joined; (0, infinity) where there is none. `helpers`: devices
        that help already.
        """
        size, team = self.generate.replica_devices, self.helper_devices
        learning = self.owners + helpers
        meanwhile = self.join_s * items / max(self.learn.seconds(items, learning), 1e-9)
        rest = items - meanwhile
        teams = min(int(rest / self.group_size), replicas * size // team) if rest > 0 else 0
        if not teams:
            return 0, math.inf
        more = teams * team
        learners = learning + more
        learn_s = max(self.learn.seconds(rest, learners), self.helper_s(self.group_size, learners))
        close_s = self.contribution_s(helpers + more) - self.contribution_s(helpers)
        return math.ceil(more / size), self.join_s + learn_s + close_s


@dataclass(frozen=True)
class Outlook:
    """What is left of a step, in expected values.

    `loads`: unfinished outputs of each replica, rising, which have decoded `decoded` each. `finished` items wait for
    a learner, `partial` ones for the rest of their groups. `borrowed` of the replicas are owners'.
    """

    terms: Terms
    loads: tuple[int, ...]
    decoded: float
    finished: float
    helpers: int
    borrowed: int = 0
    owners_learn: bool = False
    partial: float = 0.0

    @property
    def replicas(self) -> int:
        """Replicas that decode."""
        return len(self.loads)

    @cached_property
    def unfinished(self) -> int:
        """Unfinished outputs."""
        return sum(self.loads)

    def decode_s(self, replicas: int) -> float:
        """Seconds until all outputs are finished on `replicas` replicas."""
        return self.between(self.decoded, self.last, replicas, begins=True)

    def between(self, here: float, there: float, replicas: int, *, begins: bool) -> float:
        """Seconds from one length to the next of all that reach it; those that do not fit wait as it `begins`."""
        lengths, load = self.terms.lengths, self.unfinished / replicas
        fixed, each, concurrency = self._pace(replicas)
        work = (lengths.decoded(there) - lengths.decoded(here)) / self._share
        rounds = max(0.0, load / concurrency - 1) if begins else 0.0
        return fixed * max(0.0, there - here) + each * load * work + fixed * rounds

    def _pace(self, replicas: int) -> tuple[float, float, int]:
        pace = self.terms.generate.pace(
            replicas * self.terms.generate.replica_devices, self.terms.memory_bytes
        )
        return pace.fixed, pace.each_at(self.unfinished / replicas), pace.concurrency

    def alive(self, length: float) -> float:
        """Share of the unfinished outputs that are longer than a length."""
        return self.terms.lengths.unfinished(length) / self._share if length > self.decoded else 1.0

    def moved(self, leaving: int, length: float, replicas: int) -> float:
        """Outputs that `leaving` of `replicas` replicas hand over at a length: now, those of the emptiest ones."""
        if length <= self.decoded:
            return sum(self.loads[:leaving])
        return self.unfinished * self.alive(length) * leaving / replicas

    @cached_property
    def unlearned(self) -> float:
        """Items (of mean length) of the step that nobody has begun to learn, expected."""
        return self.finished + self._rest

    @cached_property
    def _rest(self) -> float:
        """Items (of mean length) of all groups that are not whole yet, expected."""
        beyond = (1 - self._decoded) / self._share + self.decoded
        return self.partial + self.unfinished * beyond

    @cached_property
    def last(self) -> float:
        """The longest output's expected length."""
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
    def owners_rate(self) -> float:
        """Items that the trainer group learns a second."""
        whole = max(1.0, self.unlearned)
        return whole / self.terms.learn.seconds(whole, self.terms.owners)

    def arriving(self, length: float) -> float:
        """Items (of mean length) that are complete when all have decoded a length, and are not yet."""
        more = self.terms.lengths.arrived(length, self.terms.group_size) - self._arrived
        return self._rest * max(0.0, more) / max(1 - self._arrived, 1e-9)
