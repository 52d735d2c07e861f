"""One step with the elastic policy on a simulated cluster: devices change roles while the tail decodes.

The elastic policy (`elastic/policy.py`) decides; this module carries out its moves in simulated time. It knows the true
lengths, which the policy is never told.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from headrace_planner.cluster.decoding import DecodingDevices, Finished, Replica, spread
from headrace_planner.cluster.sampling import Draws
from headrace_planner.cluster.spans import DeviceTrack, Label, Place, Timeline
from headrace_planner.elastic.outlook import Terms
from headrace_planner.elastic.policy import (
    ElasticState,
    Move,
    Role,
    Rollout,
    helpers_until,
    owners_finish_sooner,
    plan_elastic,
)


@dataclass(frozen=True)
class WaitingGroup:
    """A settled group that nobody has begun to learn: since when, its items, its work in items of mean length."""

    since: float
    items: list[int]
    weight: float


@dataclass(order=True)
class LearningDevices:
    """Devices that learn until `free`, as a helper or the trainer group (`owner`). `begun`: (since, groups)."""

    free: float
    number: int
    tracks: list[DeviceTrack] = field(compare=False)
    owner: bool = field(default=False, compare=False)
    learned: int = field(default=0, compare=False)
    begun: tuple[float, list[WaitingGroup]] | None = field(default=None, compare=False)


class ElasticStep:
    """One step from `begin` on. `rollouts` and `owners`: devices of the plan's two stages, the same when shared."""

    def __init__(
        self, terms: Terms, rollouts: Place, owners: Place, piece: float, timeline: Timeline, begin: float
    ) -> None:
        self.terms, self.timeline, self.begin, self.now = terms, timeline, begin, begin
        self.generate, self.learn = terms.generate.stage, terms.learn.stage
        self.rollouts, self.owners, self.piece = rollouts, owners, piece
        self.decoders: list[DecodingDevices] = []
        self.owner: LearningDevices | None = None
        self.helpers: list[LearningDevices] = []
        self.spare: list[DeviceTrack] = []  # devices that wait until they are enough for a helper
        self.settled: deque[WaitingGroup] = deque()
        self.done: list[Finished] = []
        self.moved_at = begin - terms.costs.min_hold_s

    def run(self, draws: Draws) -> float:
        """Runs the step; returns when its last gradient is in the owners' hands. `done` has what was learned when."""
        self.draws, self.lengths = draws, draws.lengths[self.terms.generate.stage]
        self.finished = self.partial = 0.0
        self.missing: dict[int, list[int]] = {}
        self._start(len(draws.weights))
        tick = self.terms.costs.min_hold_s
        while self._decoding:
            self._decode(self.now + tick)
            self._learn(self.now, decoding=True)
            if self._decoding:
                self._move(plan_elastic(self._state(), self.now))
        return self._finish()

    @property
    def _decoding(self) -> bool:
        return any(decoder.replica.unfinished for decoder in self.decoders)

    def _start(self, count: int) -> None:
        terms, size = self.terms, self.terms.generate.replica_devices
        used = terms.generate.used(count, self.rollouts.count)
        tracks = [
            DeviceTrack(Place(self.rollouts.kind, self.rollouts.first + at, size), self.timeline, self.begin)
            for at in range(0, used, size)
        ]
        if terms.shared:
            for track in tracks:
                track.until(self.begin + terms.generate.load_s, self.generate, Label.SWITCH)
        borrowed = self._borrow(tracks)
        dealt = spread(range(count), len(tracks) + len(borrowed))
        pace = terms.generate.pace((len(tracks) + len(borrowed)) * size, terms.memory_bytes)
        for index, (track, items) in enumerate(zip([*tracks, *borrowed], dealt, strict=True)):
            replica = Replica(pace, track.now, [(self.lengths[item], item) for item in items])
            self.decoders.append(
                DecodingDevices(f"rollout-{index:05}", track, replica, index >= len(tracks), track.now)
            )

    def _borrow(self, tracks: Sequence[DeviceTrack]) -> list[DeviceTrack]:
        """Owners' devices that decode at the step's begin; without any the trainer group is ready to learn."""
        if self.terms.shared:
            return []
        terms, size, place = self.terms, self.terms.generate.replica_devices, self.owners
        idle = [
            Rollout(f"owner-{at}", size, 0, owner=True) for at in range(0, place.count // size * size, size)
        ]
        count = len(self.draws.weights)
        state = ElasticState(
            terms, tuple(Rollout(f"rollout-{n}", size, count // len(tracks)) for n in range(len(tracks))),
            0.0, self.finished, owners_learn=True, idle_owners=tuple(idle), moved_at=self.moved_at,
        )  # fmt: skip
        moves = plan_elastic(state, self.begin)
        if not moves:
            whole = DeviceTrack(place, self.timeline, self.begin)
            self.owner = LearningDevices(self.begin, -1, [whole], owner=True)
            return []
        self.moved_at = self.begin
        made = [
            DeviceTrack(Place(place.kind, place.first + at, size), self.timeline, self.begin)
            for at in range(0, place.count // size * size, size)
        ]
        for track in made:
            track.until(
                self.begin + terms.learn.offload_s + terms.generate.load_s, self.generate, Label.SWITCH
            )
        return made

    def _decode(self, until: float) -> None:
        finished: list[Finished] = []
        for decoder in self.decoders:
            made = decoder.replica.run(until)
            if made:
                decoder.last, decoder.finished = made[-1][0], decoder.finished + len(made)
                finished += made
        self._settle(sorted(finished))
        self.now = until

    def _settle(self, finished: Iterable[Finished]) -> None:
        group, total = self.terms.group_size, len(self.lengths)
        for when, item in finished:
            members = self.missing.setdefault(item // group, [])
            members.append(item)
            self.partial += self.draws.weights[item]
            if len(members) == min(group, total - item // group * group):
                weight = self.draws.weight(members)
                self.settled.append(WaitingGroup(when, members, weight))
                self.partial, self.finished = self.partial - weight, self.finished + weight

    def _state(self) -> ElasticState:
        size = self.terms.generate.replica_devices
        rollouts = tuple(Rollout(d.name, size, d.replica.unfinished, d.owner) for d in self.decoders)
        left = max(1, sum(rollout.unfinished for rollout in rollouts))
        decoded = sum(d.replica.length * d.replica.unfinished for d in self.decoders) / left
        return ElasticState(
            self.terms, rollouts, decoded, self.finished, self._devices(self.helpers),
            self.owner is not None, (), self.moved_at, self._begun, max(0.0, self.partial),
        )  # fmt: skip

    @property
    def _begun(self) -> float:
        """Items that the trainer group still has to learn of what it has taken."""
        if self.owner is None or self.owner.begun is None:
            return 0.0
        start, groups = self.owner.begun
        whole = sum(group.weight for group in groups)
        left = (self.owner.free - max(start, self.now)) / (self.owner.free - start)
        return whole * min(max(left, 0.0), 1.0)

    def _move(self, moves: Sequence[Move]) -> None:
        """Revokes with notice, hands unfinished outputs to the survivors, and starts the devices' next role."""
        if not moves:
            return
        roles = {move.rollout: move.role for move in moves}
        self._decode(self.now + self.terms.costs.notice_s)
        self.moved_at = self.now
        leaving = [decoder for decoder in self.decoders if decoder.name in roles]
        self.decoders = [decoder for decoder in self.decoders if decoder.name not in roles]
        for decoder in leaving:
            self._label(decoder, self.now)
        self._resume([sequence for decoder in leaving for sequence in decoder.replica.take()])
        for decoder in leaving:
            if roles[decoder.name] is Role.HELP:
                self._help(decoder.track, self.now + self.terms.join_s - self.terms.costs.notice_s)
        owners = [decoder.track for decoder in leaving if roles[decoder.name] is Role.OWN]
        if owners:
            self._own(owners)

    def _resume(self, taken: Sequence[tuple[float, int]]) -> None:
        loads = [(decoder.replica.unfinished, index) for index, decoder in enumerate(self.decoders)]
        heapify(loads)
        given: dict[int, list[tuple[float, int]]] = {}
        for sequence in sorted(taken, key=lambda sequence: sequence[1]):
            load, index = heappop(loads)
            given.setdefault(index, []).append(sequence)
            heappush(loads, (load + 1, index))
        for index, own in sorted(given.items()):
            decoder = self.decoders[index]
            decoded = sum(self.lengths[item] - remaining for remaining, item in own)
            self._label(decoder, self.now)
            stall = self.terms.resume_s(len(own), decoded)
            decoder.track.until(self.now + stall, self.generate, Label.PREFILL)
            decoder.replica.add(own)
            decoder.replica.stall(stall)

    def _label(self, decoder: DecodingDevices, when: float) -> None:
        """Labels what a replica did until `when`: it decoded, and waited for the tail once it had no output left."""
        busy = when if decoder.replica.unfinished or decoder.last > when else decoder.last
        decoder.track.until(busy, self.generate, Label.DECODE, decoder.finished)
        decoder.track.until(when, self.generate, Label.WAIT_TAIL)
        decoder.finished = 0

    def _help(self, track: DeviceTrack, ready: float) -> None:
        terms = self.terms
        track.until(ready, self.learn, Label.SWITCH)
        for at in range(track.place.count):
            place = Place(track.place.kind, track.place.first + at, 1)
            self.spare.append(DeviceTrack(place, self.timeline, ready))
        while len(self.spare) >= terms.helper_devices:
            team, self.spare = self.spare[: terms.helper_devices], self.spare[terms.helper_devices :]
            self.helpers.append(LearningDevices(ready, len(self.helpers), team))

    def _devices(self, helpers: Sequence[LearningDevices]) -> int:
        return len(helpers) * self.terms.helper_devices

    def _own(self, tracks: list[DeviceTrack]) -> LearningDevices:
        ready = self.now + self.terms.return_s - self.terms.costs.notice_s
        rest = self.owners.count - sum(track.place.count for track in tracks)
        for track in tracks:
            track.until(ready, self.learn, Label.SWITCH)
        if rest:  # devices that make no whole replica never left the trainer group
            first = self.owners.first + self.owners.count - rest
            tracks = [*tracks, DeviceTrack(Place(self.owners.kind, first, rest), self.timeline, self.begin)]
            tracks[-1].until(ready, self.learn, Label.WAIT_DATA)
        self.owner = LearningDevices(ready, -1, tracks, owner=True)
        return self.owner

    def _learn(self, until: float, decoding: bool) -> None:
        """Hands settled groups to whoever is free first, as long as somebody may begin one by `until`."""
        state = self._state()
        free = [*self.helpers, *([self.owner] if self.owner else [])]
        heapify(free)
        while free and self.settled:
            learner = heappop(free)
            groups = self._next(learner, decoding)
            start = max(learner.free, groups[-1].since) if groups else math.inf
            if start <= until and (learner.owner or self._fits(state, start, groups)):
                for _ in groups:
                    self.settled.popleft()
                self._teach(learner, start, groups)
                heappush(free, learner)

    def _next(self, learner: LearningDevices, decoding: bool) -> list[WaitingGroup]:
        """What a learner would learn next: a helper a group, the trainer group a piece of groups or what is left."""
        if not learner.owner:
            return [self.settled[0]]
        found, weight = [], 0.0
        for group in self.settled:
            found.append(group)
            weight += group.weight
            if weight >= self.piece:
                return found
        return [] if decoding else found

    def _fits(self, state: ElasticState, start: float, groups: Sequence[WaitingGroup]) -> bool:
        state = replace(state, finished=self.finished, begun=self._begun)
        return start + self._helper_s(groups[0].weight) <= self.now + helpers_until(state)

    def _helper_s(self, weight: float) -> float:
        learners = self._devices(self.helpers) + (self.owners.count if self.owner else 0)
        return self.terms.helper_s(weight, learners)

    def _teach(self, learner: LearningDevices, start: float, groups: list[WaitingGroup]) -> None:
        self._record(learner)
        weight = sum(group.weight for group in groups)
        owners = self.terms.learn.seconds(weight, self.owners.count) if learner.owner else 0.0
        learner.free = start + (owners or self._helper_s(weight))
        learner.begun = (start, groups)
        self.finished -= weight

    def _record(self, learner: LearningDevices) -> None:
        """Labels what a learner has learned until it was free again."""
        if learner.begun is None:
            return
        start, groups = learner.begun
        items = [item for group in groups for item in group.items]
        for index, track in enumerate(learner.tracks):
            track.until(start, self.learn, Label.WAIT_DATA)
            track.until(learner.free, self.learn, Label.TRAIN, 0 if index else len(items))
        learner.learned, learner.begun = learner.learned + len(items), None
        self.done += [(learner.free, item) for item in items]

    def _take_back(self, helper: LearningDevices, when: float) -> bool:
        """Queues a helper's unfinished group again at `when` if the owners learn it sooner; its time is lost."""
        if helper.begun is None or helper.free <= when:
            return False
        start, groups = helper.begun
        weight = sum(group.weight for group in groups)
        if not owners_finish_sooner(self.terms, helper.free - when, weight):
            return False
        for track in helper.tracks:
            track.until(start, self.learn, Label.WAIT_DATA)
            track.until(when, self.learn, Label.TRAIN)
        self.finished += weight
        self.settled.extend(WaitingGroup(when, group.items, group.weight) for group in groups)
        helper.free, helper.begun = when, None
        return True

    def _finish(self) -> float:
        """Ends the step after the last output: learns what is left, adds gradients up, returns devices to stages."""
        decoded = max(decoder.last for decoder in self.decoders)
        for decoder in self.decoders:
            self._label(decoder, decoder.last)
            decoder.track.until(decoded, self.generate, Label.WAIT_TAIL)
        self.now = decoded
        end = self._finish_shared(decoded) if self.terms.shared else self._finish_apart(decoded)
        self.done.sort()
        return end

    def _finish_shared(self, decoded: float) -> float:
        terms = self.terms
        ready = decoded + terms.generate.offload_s
        for helper in self.helpers:
            self._take_back(helper, max(ready, helper.begun[0] if helper.begun else ready))
            self._record(helper)
        helped = max((helper.free for helper in self.helpers), default=decoded)
        tracks = [decoder.track for decoder in self.decoders]
        for track in tracks:
            track.until(decoded + terms.generate.offload_s, self.generate, Label.SWITCH)
        tracks += [*self.spare, *(track for helper in self.helpers for track in helper.tracks)]
        begin = max(helped, decoded + terms.generate.offload_s)
        contributors = self._devices([helper for helper in self.helpers if helper.learned])
        for track in tracks:
            track.until(begin, self.learn, Label.WAIT_DATA)
            track.until(begin + terms.learn.load_s, self.learn, Label.SWITCH)
        begin += terms.learn.load_s
        added = begin + (terms.contribution_s(contributors) if contributors else 0.0)
        for track in tracks:
            track.until(added, self.learn, Label.SYNC)
        self.owner = LearningDevices(added, -1, tracks, owner=True)
        while self.settled:
            self._teach(self.owner, self.owner.free, self._rest())
        self._record(self.owner)
        for track in tracks:
            track.until(self.owner.free + terms.learn.offload_s, self.learn, Label.SWITCH)
        return self.owner.free + terms.learn.offload_s

    def _rest(self) -> list[WaitingGroup]:
        found = list(self.settled)
        self.settled.clear()
        return found

    def _finish_apart(self, decoded: float) -> float:
        terms = self.terms
        borrowed = [decoder for decoder in self.decoders if decoder.owner]
        if borrowed:
            self.decoders = [decoder for decoder in self.decoders if not decoder.owner]
            self._own([decoder.track for decoder in borrowed])
        owner = self.owner or self._own([])
        moves = {move.rollout for move in plan_elastic(self._state(), self.now)}
        for decoder in self.decoders:
            if decoder.name in moves:
                self._help(decoder.track, self.now + terms.join_s)
        self.decoders = [decoder for decoder in self.decoders if decoder.name not in moves]
        while self.settled:
            self._learn(math.inf, decoding=False)
            for helper in self.helpers:
                self._take_back(helper, max(decoded, owner.free))
        for learner in [owner, *self.helpers]:
            self._record(learner)
        end = max(decoded, owner.free)
        helped = [helper for helper in self.helpers if helper.learned]
        if helped:
            last = max(helper.free for helper in helped)
            end = max(end, last) + terms.contribution_s(self._devices(helped))
        for helper in self.helpers:
            for track in helper.tracks:
                track.until(max(helper.free, decoded), self.learn, Label.WAIT_DATA)
                track.until(end - terms.contribution_s(1) if helped else end, self.learn, Label.WAIT_DATA)
                track.until(end, self.learn, Label.SYNC)
                track.until(end + terms.generate.load_s, self.generate, Label.SWITCH)
        if self.helpers or self.spare:
            end += terms.generate.load_s
        for track in [*self.spare, *(decoder.track for decoder in self.decoders), *owner.tracks]:
            track.until(end, self.learn, Label.WAIT_DATA)
        return end
