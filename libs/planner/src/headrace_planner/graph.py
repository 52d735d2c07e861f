"""The workflow as data: stages, what flows between them and in which pieces, cycles. Knows no cost and no device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from headrace_planner.errors import PlanError, PlanProblem, refuse

MAX_STAGES = 12


class Granularity(StrEnum):
    """The smallest piece that an edge hands over: the algorithm's barrier on edges into `learn`."""

    TURN = "turn"
    TRAJECTORY = "trajectory"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True)
class Edge:
    """What `source` makes and `target` needs. `item_bytes`: bytes of one item. Two TURN edges make a cycle."""

    source: str
    target: str
    granularity: Granularity = Granularity.TRAJECTORY
    item_bytes: float = 0.0


@dataclass(frozen=True)
class Workflow:
    """A graph of stages.

    `weights` are edges into the next step (learn → generate): they order nothing within a step, and cost a sync.
    `group_size` is the number of trajectories that an advantage compares. Stages in a cycle advance turn by turn.
    PlanError when an edge names no stage, or cycles overlap.
    """

    name: str
    stages: tuple[str, ...]
    edges: tuple[Edge, ...]
    weights: tuple[tuple[str, str], ...] = ()
    group_size: int = 1

    def __post_init__(self) -> None:
        """Checks names, then cycles."""
        wrong = list(self._problems())
        if wrong:
            raise PlanError(*wrong)
        for unit in self.units:
            _check_cycle(unit, self.edges)

    def _problems(self) -> Iterator[PlanProblem]:
        if not self.stages or len(self.stages) > MAX_STAGES:
            yield PlanProblem("stages", f"{len(self.stages)} stages", f"declare 1 to {MAX_STAGES}")
        for name in sorted({name for name in self.stages if self.stages.count(name) > 1}):
            yield PlanProblem(
                f"stages.{name}", f"declared {self.stages.count(name)} times", "declare it once"
            )
        if self.group_size < 1:
            yield PlanProblem("group_size", f"is {self.group_size}", "use 1 or more")
        known = ", ".join(sorted(self.stages))
        ends = [(f"edges[{n}]", edge.source, edge.target) for n, edge in enumerate(self.edges)]
        ends += [(f"weights[{n}]", *pair) for n, pair in enumerate(self.weights)]
        for key, source, target in ends:
            if source not in self.stages:
                yield PlanProblem(f"{key}.source", f"no stage {source!r} produces it", f"name one of {known}")
            if target not in self.stages:
                yield PlanProblem(f"{key}.target", f"no stage {target!r} receives it", f"name one of {known}")

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Stages, with each cycle's stages together, by name: what a plan places. Independent of the given order."""
        reach = _reachable(self.stages, [(edge.source, edge.target) for edge in self.edges])
        together = {
            tuple(
                sorted(
                    {other for other in self.stages if other in reach[name] and name in reach[other]} | {name}
                )
            )
            for name in self.stages
        }
        return tuple(sorted(together))

    @cached_property
    def crossing(self) -> tuple[tuple[int, int, Edge], ...]:
        """Edges between units, by the units' positions."""
        place = {stage: index for index, unit in enumerate(self.units) for stage in unit}
        placed = [(place[edge.source], place[edge.target], edge) for edge in self.edges]
        return tuple(item for item in placed if item[0] != item[1])

    def between(self, first: int, second: int) -> list[Edge]:
        """Edges from one set of units into another; sets are bit masks over `units`."""
        return [edge for a, b, edge in self.crossing if first >> a & 1 and second >> b & 1]

    def cuts(self, units: int) -> list[tuple[int, int]]:
        """Every way to part a set of units in two so that nothing flows from the second part into the first.

        These are the set's proper down-sets, from the smallest bit mask on.
        """
        inner = [(1 << a, 1 << b) for a, b, _ in self.crossing if units >> a & 1 and units >> b & 1]
        found, first = [], (units - 1) & units
        while first:
            if all(first & a or not first & b for a, b in inner):
                found.append((first, units & ~first))
            first = (first - 1) & units
        return found[::-1]

    def syncs(self, first: int, second: int) -> int:
        """Number of weight edges that run between two sets of units, in either direction."""
        pairs = self._synced
        return sum([bool((a & first and b & second) or (a & second and b & first)) for a, b in pairs])

    @cached_property
    def _synced(self) -> list[tuple[int, int]]:
        """Weight edges by the bits of their units."""
        place = {stage: 1 << index for index, unit in enumerate(self.units) for stage in unit}
        return [(place[a], place[b]) for a, b in self.weights]


def _reachable(stages: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    reach = {stage: {b for a, b in pairs if a == stage} for stage in stages}
    for middle in stages:
        for stage in stages:
            if middle in reach[stage]:
                reach[stage] |= reach[middle]
    return reach


def _check_cycle(unit: tuple[str, ...], edges: Sequence[Edge]) -> None:
    inner = [edge for edge in edges if edge.source in unit and edge.target in unit]
    if len(unit) == 1 and not inner:
        return
    for stage in unit:
        out = sum(edge.source == stage for edge in inner)
        if out > 1 or len(unit) != 2:
            cycle = " ⇄ ".join(unit)
            problem = (
                f"lies on cycles that overlap, or on one of other than two stages ({cycle}, {out} edges out)"
            )
            raise refuse(f"stages.{stage}", problem, "join two stages by one edge each way; part the others")


def reasoning(
    barrier: Granularity = Granularity.GROUP, group_size: int = 16, infer: bool = True, critic: bool = False
) -> Workflow:
    """generate → score → [infer] → learn, for language models; with a critic infer and learn are two stages each.

    `barrier` is the algorithm's: GRPO needs groups; PPO with several epochs needs the batch.
    """
    learners = ("learn", "learn_critic") if critic else ("learn",)
    inferrers = (("infer", "infer_critic") if critic else ("infer",)) if infer else ()
    edges = [Edge("generate", "score"), *(Edge("generate", name) for name in inferrers)]
    edges += [Edge(source, target, barrier) for target in learners for source in (*inferrers, "score")]
    stages = ("generate", "score", *inferrers, *learners)
    return Workflow("reasoning", stages, tuple(edges), (("learn", "generate"),), group_size)


def embodied(barrier: Granularity = Granularity.BATCH, group_size: int = 1) -> Workflow:
    """generate ⇄ simulate → learn, for robot policies: a policy and a simulator advance turn by turn."""
    edges = (
        Edge("generate", "simulate", Granularity.TURN),
        Edge("simulate", "generate", Granularity.TURN),
        Edge("generate", "learn", barrier),
    )
    stages = ("generate", "simulate", "learn")
    return Workflow("embodied", stages, edges, (("learn", "generate"),), group_size)
