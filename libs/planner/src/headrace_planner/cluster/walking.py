"""One pass of items through a plan tree, in simulated time. Knows no policy that moves devices.

A pass means what the tree says: children of a Share follow one another, the second part of a Split takes one chunk
after the other, and a part's pass is over before its next one begins. Nothing flows back within a step, so that every
event's time follows from the times of what it needs, and no event queue is necessary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headrace_planner.cluster.decoding import Finished, Replica, spread
from headrace_planner.cluster.sampling import Draws
from headrace_planner.cluster.spans import UNPLANNED, Label, Place, Timeline
from headrace_planner.errors import refuse
from headrace_planner.profiling.profiles import Pace
from headrace_planner.trees.costs import Evaluation, Workload, overlapped
from headrace_planner.trees.tree import Cycle, Leaf, Node, Share, Split, devices, leaves

Offset = dict[str, int]


@dataclass(frozen=True)
class TreePass:
    """What a pass made: when it ended, and (seconds, item) of all items by time.

    `dry`: when the first replica of its generator had nothing left to decode; `decoded`: when the last one had.
    """

    end: float
    done: list[Finished] = field(default_factory=list)
    dry: float = math.inf
    decoded: float = -math.inf


class TreeWalk:
    """Walks over one tree, onto one timeline."""

    def __init__(self, work: Workload, timeline: Timeline) -> None:
        self.work = work
        self.timeline = timeline
        self.evaluation = Evaluation(work)

    def run(self, node: Node, items: Sequence[int], draws: Draws, begin: float, offset: Offset) -> TreePass:
        """One pass through a node whose first devices are at `offset`; labels all of its devices until the end."""
        match node:
            case Leaf():
                return self.leaf(node, items, draws, begin, offset, 0.0)
            case Cycle():
                return self._cycle(node, items, draws, begin, offset)
            case Share():
                return self._share(node, items, draws, begin, offset)
            case Split():
                return self._split(node, items, draws, begin, offset)

    def leaf(
        self, leaf: Leaf, items: Sequence[int], draws: Draws, begin: float, offset: Offset, kept: float
    ) -> TreePass:
        """A stage whose neighbours keep `kept` bytes of each device."""
        profile, budget = self.work.profiles[leaf.stage], self.work.memory(leaf.kind) - kept
        used, first = profile.used(len(items), leaf.devices), offset[leaf.kind]
        if not used or profile.concurrency(used, budget) < 1:
            raise refuse(f"stages.{leaf.stage}", f"does not fit {leaf.devices} {leaf.kind}", "add devices")
        if leaf.stage in draws.lengths:
            made = self._decode(leaf, used, profile.pace(used, budget), items, draws, begin, first)
        else:
            end = begin + profile.seconds(draws.weight(items), used, budget)
            place = Place(leaf.kind, first, used)
            self.timeline.add(place, begin, end, leaf.stage, label_of(self.work, leaf.stage), len(items))
            made = TreePass(end, [(end, item) for item in items])
        idle = Place(leaf.kind, first + used, leaf.devices - used)
        self.timeline.add(idle, begin, made.end, UNPLANNED, Label.WAIT_LEASE)
        return made

    def _decode(
        self,
        leaf: Leaf,
        used: int,
        pace: Pace,
        items: Sequence[int],
        draws: Draws,
        begin: float,
        first: int,
    ) -> TreePass:
        size, lengths = self.work.profiles[leaf.stage].replica_devices, draws.lengths[leaf.stage]
        dealt = spread(items, used // size)
        runs = [Replica(pace, begin, [(lengths[i], i) for i in own]).run() for own in dealt]
        ends = [run[-1][0] for run in runs]
        for index, (end, own) in enumerate(zip(ends, dealt, strict=True)):
            place = Place(leaf.kind, first + index * size, size)
            self.timeline.add(place, begin, end, leaf.stage, Label.DECODE, len(own))
            self.timeline.add(place, end, max(ends), leaf.stage, Label.WAIT_TAIL)
        return TreePass(max(ends), sorted(pair for run in runs for pair in run), min(ends), max(ends))

    def _cycle(
        self, cycle: Cycle, items: Sequence[int], draws: Draws, begin: float, offset: Offset
    ) -> TreePass:
        """Turns of each stage are drawn as one span: first the one, then the other, or side by side."""
        alone = TreeWalk(self.work, Timeline())  # how long each takes alone; its turns lie elsewhere in time
        pair = (cycle.first, cycle.second)
        part = list(items) if cycle.shared else items[:: cycle.batches]
        kept = [
            self.evaluation.kept_beside(leaf, cycle, len(items)) if cycle.shared else 0.0 for leaf in pair
        ]
        one, two = (
            alone.leaf(leaf, part, draws, 0.0, offset, own) for leaf, own in zip(pair, kept, strict=True)
        )
        if cycle.shared:
            seconds, busy = one.end + two.end, (one.end, two.end)
        else:
            seconds = overlapped(one.end, two.end, cycle.batches)
            busy = (cycle.batches * one.end, cycle.batches * two.end)
        self._draw_cycle(cycle, (begin, begin + seconds), busy, len(items), offset)
        finished = _stretched(one, two, list(items), begin, seconds)
        return TreePass(begin + seconds, finished)

    def _draw_cycle(
        self, cycle: Cycle, window: tuple[float, float], busy: tuple[float, float], items: int, offset: Offset
    ) -> None:
        begin, end = window
        beside = offset if cycle.shared else after(cycle.first, offset)
        for leaf, seconds, own in ((cycle.first, busy[0], offset), (cycle.second, busy[1], beside)):
            used = self.work.profiles[leaf.stage].used(items / cycle.batches, leaf.devices)
            place, worked = Place(leaf.kind, own[leaf.kind], used), begin + seconds
            until = worked if cycle.shared else end
            self.timeline.add(place, begin, worked, leaf.stage, label_of(self.work, leaf.stage), items)
            self.timeline.add(place, worked, until, leaf.stage, Label.WAIT_DATA)
            idle = Place(leaf.kind, own[leaf.kind] + used, leaf.devices - used)
            self.timeline.add(idle, begin, until, UNPLANNED, Label.WAIT_LEASE)
            begin = until if cycle.shared else begin

    def _share(
        self, share: Share, items: Sequence[int], draws: Draws, begin: float, offset: Offset
    ) -> TreePass:
        now, before, sync = begin, 0, 0.0
        made, generated = TreePass(begin), TreePass(begin)
        for child in share.children:
            units, stages = self.evaluation.units(child), [leaf.stage for leaf in leaves(child)]
            sync += self.work.sync_seconds(before, units, len(items), between=False)
            before |= units
            start = now
            if share.resident:
                made = self._resident(child, share, items, draws, now, offset)
                now = made.end
            else:
                now = self.switch(child, start, sum(self.work.profiles[s].load_s for s in stages), offset)
                made = self.run(child, items, draws, now, offset)
                unload = sum(self.work.profiles[s].offload_s for s in stages)
                now = self.switch(child, made.end, unload, offset)
            generated = made if made.decoded > generated.decoded else generated
            self._unused(share, child, start, now, offset)
        end = now + sync
        self.hold(share, now, end, offset, Label.SYNC)
        return TreePass(end, made.done, generated.dry, generated.decoded)

    def _resident(
        self, child: Node, share: Share, items: Sequence[int], draws: Draws, begin: float, offset: Offset
    ) -> TreePass:
        if isinstance(child, Leaf):
            kept = self.evaluation.kept_beside(child, share, len(items))
            return self.leaf(child, items, draws, begin, offset, kept)
        made = TreePass(begin)
        for leaf in leaves(child):  # a shared cycle: the turns of its stages add up
            kept = self.evaluation.kept_beside(leaf, share, len(items))
            made = self.leaf(leaf, items, draws, made.end, offset, kept)
        return made

    def _split(
        self, split: Split, items: Sequence[int], draws: Draws, begin: float, offset: Offset
    ) -> TreePass:
        first, second = self.evaluation.units(split.first), self.evaluation.units(split.second)
        limit, theirs = self.work.chunk_limit(first, second), after(split.first, offset)
        ahead, pieces = self._first(split, items, draws, begin, offset, limit)
        now, done = begin, []
        if limit is None:
            made = self.run(split.second, items, draws, begin, theirs)
            late = {item: when for when, item in ahead.done}
            now, done = made.end, sorted((max(when, late[item]), item) for when, item in made.done)
            self.hold(split.second, now, ahead.end, theirs, Label.WAIT_DATA)
        for ready, piece in pieces:
            start = max(ready, now)
            self._wait(split.second, now, start, theirs, ahead)
            now = start + self.work.transfer_seconds(first, second, len(piece))
            self.hold(split.second, start, now, theirs, Label.WAIT_DATA)
            made = self.run(split.second, piece, draws, now, theirs)
            now = made.end
            done += made.done
        until = max(now, ahead.end)
        self.hold(split.first, ahead.end, until, offset, Label.WAIT_DATA)
        end = until + self.work.sync_seconds(first, second, len(items), between=True)
        self.hold(split, until, end, offset, Label.SYNC)
        return TreePass(end, done, ahead.dry, ahead.decoded)

    def _first(
        self,
        split: Split,
        items: Sequence[int],
        draws: Draws,
        begin: float,
        offset: Offset,
        limit: float | None,
    ) -> tuple[TreePass, list[tuple[float, list[int]]]]:
        """The first part's pass or passes, and when each chunk for the second part is ready."""
        units = self.evaluation.units(split.first)
        if limit is None:
            return self.run(split.first, items, draws, begin, offset), []
        group = self.work.workflow.group_size if limit == self.work.workflow.group_size else 1
        if split.chunks == 1 or self.work.source(units) is not None:
            made = self.run(split.first, items, draws, begin, offset)
            return made, list(pieces_of(made.done, draws, group, split.chunks))
        pieces, made = [], TreePass(begin)
        for piece in _parts(items, split.chunks):
            made = self.run(split.first, piece, draws, made.end, offset)
            pieces.append((made.end, piece))
        return made, pieces

    def _wait(self, node: Node, begin: float, end: float, offset: Offset, ahead: TreePass) -> None:
        """Idle devices until a chunk is ready: its data, the tail of what is generated, or the stages after that."""
        tail, rest = min(max(begin, ahead.dry), end), min(max(begin, ahead.decoded), end)
        tail = min(tail, rest) if ahead.decoded > -math.inf else end
        rest = rest if ahead.decoded > -math.inf else end
        self.hold(node, begin, tail, offset, Label.WAIT_DATA)
        self.hold(node, tail, rest, offset, Label.WAIT_TAIL)
        self.hold(node, rest, end, offset, Label.WAIT_REWARD)

    def _unused(self, share: Share, child: Node, begin: float, end: float, offset: Offset) -> None:
        """Devices of a Share that its child does not need."""
        own, needs = devices(share), devices(child)
        for kind, count in own.items():
            rest = Place(kind, offset[kind] + needs.get(kind, 0), count - needs.get(kind, 0))
            self.timeline.add(rest, begin, end, UNPLANNED, Label.WAIT_LEASE)

    def switch(self, node: Node, begin: float, seconds: float, offset: Offset) -> float:
        """Loads or offloads a node's stages; returns when it is done."""
        self.hold(node, begin, begin + seconds, offset, Label.SWITCH)
        return begin + seconds

    def hold(self, node: Node, begin: float, end: float, offset: Offset, label: Label) -> None:
        """One label for all devices of a node."""
        stage = "+".join(leaf.stage for leaf in leaves(node))
        places = [Place(kind, offset[kind], count) for kind, count in devices(node).items()]
        self.timeline.add_all(places, begin, end, stage, label)


def after(node: Node, offset: Offset) -> Offset:
    """Where the devices behind a node's begin."""
    return {kind: first + devices(node).get(kind, 0) for kind, first in offset.items()}


def label_of(work: Workload, stage: str) -> Label:
    """What a stage's devices do: the last stages train, those with lengths or new weights decode."""
    if work.profiles[stage].lengths is not None or any(
        target == stage for _, target in work.workflow.weights
    ):
        return Label.DECODE
    return Label.WORK if any(edge.source == stage for edge in work.workflow.edges) else Label.TRAIN


def pieces_of(
    done: Sequence[Finished], draws: Draws, group: int, chunks: int
) -> Iterator[tuple[float, list[int]]]:
    """(seconds, items) of chunks of equal work, made of whole groups in the order in which they are complete."""
    missing = Counter(item // group for _, item in done)
    members: dict[int, list[int]] = {}
    total = draws.weight([item for _, item in done])
    piece: list[int] = []
    handed, target, last = 0.0, 1, 0.0
    for when, item in done:
        number, last = item // group, when
        members.setdefault(number, []).append(item)
        missing[number] -= 1
        if missing[number]:
            continue
        whole = members.pop(number)
        piece += whole
        handed += draws.weight(whole)
        if handed >= total * target / chunks - 1e-9 * total:
            yield when, piece
            piece = []
            while handed >= total * target / chunks - 1e-9 * total:
                target += 1
    if piece:
        yield last, piece


def _parts(items: Sequence[int], count: int) -> list[list[int]]:
    """Items in `count` equal parts (or as many as there are items)."""
    ends = [round(index * len(items) / count) for index in range(count + 1)]
    return [list(items[a:b]) for a, b in pairwise(ends) if b > a]


def _stretched(
    one: TreePass, two: TreePass, items: Sequence[int], begin: float, seconds: float
) -> list[Finished]:
    """Items of a cycle finish as its generator alone would finish them, over the cycle's time."""
    source = next((made for made in (one, two) if made.decoded > -math.inf), None)
    if source is None or len(source.done) != len(items):
        return [(begin + seconds, item) for item in items]
    return [(begin + seconds * when / source.end, item) for when, item in source.done]
