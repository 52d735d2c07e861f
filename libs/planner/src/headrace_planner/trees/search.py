"""The search for the fastest plan tree: dynamic programming over down-sets, device counts and chunk sizes.

Exact up to `divisions.DENSE` devices. Above, a part of several stages gets its devices from a ladder of counts (a part
of one stage any count), so that the work grows with the ladder and not with the devices. Knows no spec and no text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_planner.errors import refuse
from headrace_planner.trees.costs import CYCLE_BATCHES, Workload, overlapped, pipelined
from headrace_planner.trees.divisions import Counts, divisions, promising
from headrace_planner.trees.tree import Cycle, Leaf

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
MAX_CHUNKS = CHUNKS[-1]
MAX_CUTS = 50_000
"""Cuts of parts that a search may look at, seconds' worth: four stages on 4,096 devices take about 5,000."""


@dataclass(frozen=True)
class Shapes:
    """Which trees the search may build. `chunks`: ladder of chunk counts, rising from 1."""

    resident: bool = True
    offloaded: bool = True
    split: bool = True
    chunks: tuple[int, ...] = CHUNKS


ALL_SHAPES = Shapes()


@dataclass(frozen=True)
class Found:
    """Best seconds of a part and how: the node's shape, the cut and the devices of its children, chunks."""

    seconds: float = math.inf
    shape: str = ""
    cut: tuple[int, int] = (0, 0)
    counts: tuple[Counts, Counts] = ((), ())
    chunks: int = 1


NOTHING = Found()


class Search:
    """One search over one workload. A part is (units as a bit mask, devices of each kind, items of one pass)."""

    def __init__(self, workload: Workload, shapes: Shapes = ALL_SHAPES) -> None:
        self.work = workload
        self.shapes = shapes
        self.units = workload.workflow.units
        self.kinds = sorted(workload.devices)
        masks = range(1, 1 << len(self.units))
        self._stages = {
            units: [stage for n, unit in enumerate(self.units) if units >> n & 1 for stage in unit]
            for units in masks
        }
        self._needs = {
            units: {workload.profiles[stage].kind for stage in self._stages[units]} for units in masks
        }
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self._looked_at = 0
        self._best: dict[tuple[int, Counts, float], Found] = {}
        self._plain: dict[tuple[int, Counts, float], Found] = {}
        self._turns: dict[tuple[int, Counts, float], Found] = {}

    def stages(self, units: int) -> list[str]:
        """Stages of a set of units."""
        return self._stages[units]

    def leaf(self, stage: str, counts: Counts) -> Leaf:
        """A stage on the devices of its kind."""
        kind = self.work.profiles[stage].kind
        return Leaf(stage, kind, counts[self.kinds.index(kind)])

    def best(self, units: int, counts: Counts, items: float) -> Found:
        """The fastest tree of a part, of any shape."""
        key = (units, counts, items)
        found = self._best.get(key)
        if found is None:
            found = self.unshared(units, counts, items)
            turns = self.offloaded(units, counts, items)
            found = self._best[key] = turns if turns.seconds < found.seconds else found
        return found

    def unshared(self, units: int, counts: Counts, items: float) -> Found:
        """The fastest tree that is not a Share whose children are loaded for each turn."""
        key = (units, counts, items)
        found = self._plain.get(key)
        if found is None:
            if units & (units - 1) == 0:
                found = self._unit(units, counts, items)
            else:
                found = self._resident(units, counts, items)
                for cut in self._cuts_of(units) if self.shapes.split else ():
                    found = self._split(cut, counts, items, found)
            self._plain[key] = found
        return found

    def offloaded(self, units: int, counts: Counts, items: float) -> Found:
        """The fastest Share whose children are loaded for each turn; its first child is no such Share."""
        key = (units, counts, items)
        found = self._turns.get(key)
        if found is None:
            found = NOTHING
            for first, second in self._cuts_of(units) if self.shapes.offloaded else ():
                seconds = self._turn(first, counts, items) + self.work.sync_seconds(
                    first, second, items, False
                )
                if seconds < found.seconds:
                    rest = min(
                        self._turn(second, counts, items), self.offloaded(second, counts, items).seconds
                    )
                    if seconds + rest < found.seconds:
                        found = Found(seconds + rest, "offloaded", (first, second), (counts, counts))
            self._turns[key] = found
        return found

    def _cuts_of(self, units: int) -> list[tuple[int, int]]:
        if units not in self._cuts:
            self._cuts[units] = self.work.workflow.cuts(units)
        self._looked_at += len(self._cuts[units])
        if self._looked_at > MAX_CUTS:
            problem = f"{len(self.units)} stages and cycles on these devices are too many to search"
            raise refuse("stages", problem, "join stages, or plan for fewer devices")
        return self._cuts[units]

    def _turn(self, units: int, counts: Counts, items: float) -> float:
        return self.unshared(units, counts, items).seconds + self.work.turn_seconds(self.stages(units))

    def _unit(self, units: int, counts: Counts, items: float) -> Found:
        names = self.stages(units)
        if len(names) == 1:
            return Found(self.work.leaf_seconds(self.leaf(names[0], counts), items), "leaf")
        return min(self._cycles(names, counts, items), key=lambda found: found.seconds)

    def _cycles(self, names: list[str], counts: Counts, items: float) -> Iterator[Found]:
        first, second = (self.leaf(name, counts) for name in names)
        together = first.kind == second.kind and (self.shapes.resident or not self.shapes.split)
        yield NOTHING
        if together:
            seconds = self.work.cycle_seconds(Cycle(first, second, shared=True), items)
            yield Found(seconds, "shared cycle", (0, 0), (counts, counts))
        if self.shapes.split or not together:
            for batches in CYCLE_BATCHES:
                if items / batches >= 1:
                    yield self._beside(names, counts, items / batches, batches)

    def _beside(self, names: list[str], counts: Counts, part: float, batches: int) -> Found:
        best, kinds = NOTHING, [{self.work.profiles[name].kind} for name in names]

        def first(given: Counts) -> float:
            return self.work.leaf_seconds(self.leaf(names[0], given), part)

        def second(given: Counts) -> float:
            return self.work.leaf_seconds(self.leaf(names[1], given), part)

        def bound() -> float:
            return best.seconds

        rows = self._rows(kinds[0], kinds[1], counts, True, True)
        for mine, theirs, one, other in promising(rows, first, second, bound):
            seconds = overlapped(one, other, batches)
            if seconds < best.seconds:
                best = Found(seconds, "cycle", (0, 0), (mine, theirs), batches)
        return best

    def _rows(
        self, first: set[str], second: set[str], counts: Counts, first_alone: bool, second_alone: bool
    ) -> tuple[tuple[tuple[Counts, Counts], ...], ...]:
        shared = tuple(kind in first and kind in second for kind in self.kinds)
        theirs = tuple(kind not in first for kind in self.kinds)
        return divisions(counts, shared, theirs, first_alone, second_alone)

    def _resident(self, units: int, counts: Counts, items: float) -> Found:
        if not self.shapes.resident or len(self._needs[units]) > 1:
            return NOTHING
        made = [self.leaf(stage, counts) for stage in self.stages(units)]
        kept = [self.work.kept(leaf, items) for leaf in made]
        total = sum(kept)
        if total > self.work.memory(made[0].kind):
            return NOTHING
        seconds = self.work.sync_seconds(units, units, items, False)
        for leaf, own in zip(made, kept, strict=True):
            seconds += self.work.leaf_seconds(leaf, items, total - own)
        return Found(seconds, "resident", (units, 0), (counts, counts))

    def _split(self, cut: tuple[int, int], counts: Counts, items: float, best: Found) -> Found:
        limit = self.work.chunk_limit(*cut)
        if limit is None:
            return self._pipeline(cut, counts, items, 1, 0.0, best)
        for chunks in self.shapes.chunks:
            piece = items / chunks
            if chunks > 1 and (piece < limit or piece * MAX_CHUNKS < self.work.items):
                break
            best = self._pipeline(cut, counts, items, chunks, limit, best)
        return best

    def _pipeline(
        self, cut: tuple[int, int], counts: Counts, items: float, chunks: int, limit: float, best: Found
    ) -> Found:
        """The best of `best` and all divisions of the devices; `limit` 0 means that the parts exchange nothing."""
        source = self.work.source(cut[0]) if limit else None
        passes = chunks if source is None else 1  # sequences of a source all begin at once
        transfer = self.work.transfer_seconds(*cut, items / chunks)
        sync = self.work.sync_seconds(*cut, items, True)
        even = tuple((index + 1) / chunks for index in range(chunks))

        def first(given: Counts) -> float:
            return passes * self.best(cut[0], given, items / passes).seconds

        def second(given: Counts) -> float:
            return chunks * (self.best(cut[1], given, items / chunks).seconds + transfer)

        def bound() -> float:
            return best.seconds - sync

        alone = [part & (part - 1) == 0 and len(self.stages(part)) == 1 for part in cut]
        rows = self._rows(self._needs[cut[0]], self._needs[cut[1]], counts, alone[0], alone[1])
        for mine, theirs, ahead, after in promising(rows, first, second, bound):
            behind = after / chunks
            if not limit:
                seconds = max(ahead, behind) + sync
            elif ahead + behind + sync >= best.seconds:
                continue
            else:
                times = self._times(source, mine, items, limit, chunks) if source else even
                if times[0] * ahead + after + sync >= best.seconds:
                    continue
                seconds = pipelined(times, ahead, behind) + sync
            if seconds < best.seconds:
                best = Found(seconds, "split", cut, (mine, theirs), chunks)
        return best

    def _times(
        self, source: str, counts: Counts, items: float, limit: float, chunks: int
    ) -> tuple[float, ...]:
        count = counts[self.kinds.index(self.work.profiles[source].kind)]
        return self.work.arrivals(source, count, items, limit, chunks)
