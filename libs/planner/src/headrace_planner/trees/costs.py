"""Seconds of plan trees: how the costs of stages add up. Knows nothing of the search for a good tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headrace_planner.errors import refuse
from headrace_planner.graph import Granularity, Workflow
from headrace_planner.profiling.profiles import Profile
from headrace_planner.trees.tree import Cycle, Leaf, Node, Share, Split, devices, leaves

CYCLE_BATCHES = (1, 2)
MAX_ASSIGNMENTS = 16


@dataclass(frozen=True)
class DeviceKind:
    """`count` devices with `memory_bytes` each."""

    count: int
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Sync:
    """Seconds of one weight transfer from learner to generator: between devices, or re-sharded on the same ones.

    `link_bytes_per_s`: rate at which items pass from one part of a Split to the other.
    """

    between_s: float = 0.0
    same_s: float = 0.0
    link_bytes_per_s: float = math.inf


NO_SYNC = Sync()


@dataclass(frozen=True)
class Workload:
    """A workflow with one profile a stage, the devices, and the items of one step."""

    workflow: Workflow
    profiles: Mapping[str, Profile]
    devices: Mapping[str, DeviceKind]
    items: float
    sync: Sync = NO_SYNC
    _arrivals: dict[tuple[str, int, float, int], tuple[float, ...]] = field(
        default_factory=dict, compare=False
    )

    def memory(self, kind: str) -> float:
        """Bytes of one device of a kind."""
        return self.devices[kind].memory_bytes

    def leaf_seconds(self, leaf: Leaf, items: float, reserved: float = 0.0) -> float:
        """Seconds of a stage whose neighbours keep `reserved` bytes of each device."""
        return self.profiles[leaf.stage].seconds(items, leaf.devices, self.memory(leaf.kind) - reserved)

    def kept(self, leaf: Leaf, items: float) -> float:
        """Bytes a device that a loaded stage keeps."""
        profile = self.profiles[leaf.stage]
        used = profile.used(items, leaf.devices)
        return profile.reserved_bytes(used) if used else math.inf

    def cycle_seconds(self, cycle: Cycle, items: float) -> float:
        """Seconds of a cycle: the turns of both stages add up when shared, and overlap when side by side."""
        first, second, part = cycle.first, cycle.second, items / cycle.batches
        if cycle.shared:
            kept = self.kept(second, items), self.kept(first, items)
            return self.leaf_seconds(first, items, kept[0]) + self.leaf_seconds(second, items, kept[1])
        if part < 1:
            return math.inf
        return overlapped(self.leaf_seconds(first, part), self.leaf_seconds(second, part), cycle.batches)

    def turn_seconds(self, stages: Sequence[str]) -> float:
        """Seconds to load stages for their turn on shared devices and to offload them after it."""
        return sum(self.profiles[stage].load_s + self.profiles[stage].offload_s for stage in stages)

    def sync_seconds(self, first: int, second: int, items: float, between: bool) -> float:
        """Seconds of the weight transfers between two sets of units, for this part of a step's items."""
        each = self.sync.between_s if between else self.sync.same_s
        return self.workflow.syncs(first, second) * each * items / self.items

    def chunk_limit(self, first: int, second: int) -> float | None:
        """The fewest items that the first set may hand over at once; infinity: all; None: it hands over nothing."""
        edges = self.workflow.between(first, second)
        if not edges:
            return None
        if any(edge.granularity is Granularity.BATCH for edge in edges):
            return math.inf
        grouped = any(edge.granularity is Granularity.GROUP for edge in edges)
        return float(self.workflow.group_size) if grouped else 1.0

    def source(self, units: int) -> str | None:
        """The stage of a set whose output lengths decide when its items are complete, if there is one."""
        named = [stage for n, unit in enumerate(self.workflow.units) if units >> n & 1 for stage in unit]
        return next((stage for stage in named if self.profiles[stage].lengths is not None), None)

    def arrivals(
        self, source: str, devices: int, items: float, limit: float, chunks: int
    ) -> tuple[float, ...]:
        """When each chunk of a source's output is complete, as shares of the time of its part of the tree."""
        group = self.workflow.group_size if limit == self.workflow.group_size else 1
        key = (source, devices, items, chunks * group)
        if key not in self._arrivals:
            self._arrivals[key] = self.profiles[source].arrivals(items, devices, group, chunks)
        return self._arrivals[key]

    def transfer_seconds(self, first: int, second: int, items: float) -> float:
        """Seconds to pass `items` from one set of units to another over the link."""
        edges = self.workflow.between(first, second)
        return sum(edge.item_bytes for edge in edges) * items / self.sync.link_bytes_per_s


def overlapped(first: float, second: float, batches: int) -> float:
    """Seconds of two stages that alternate over `batches` parts, given the seconds of one part of each."""
    return max(batches * first, batches * second, first + second)


def pipelined(times: Sequence[float], first: float, second: float) -> float:
    """Seconds of a pipeline: the part before ends after `first` and has chunk k at `times[k] * first`.

    `second` is the seconds of one chunk in the part behind it, which takes chunks one after the other.
    """
    chunks = len(times)
    return max([time * first + (chunks - index) * second for index, time in enumerate(times)])


class Evaluation:
    """Seconds of any given tree over a workload, from its leaves up. PlanError when the tree does not fit it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._place = {stage: 1 << n for n, unit in enumerate(workload.workflow.units) for stage in unit}

    def check(self, tree: Node) -> None:
        """PlanError unless the tree holds every stage once, in an order that the edges allow."""
        named = [leaf.stage for leaf in leaves(tree)]
        wanted = list(self.workload.workflow.stages)
        wrong = sorted(set(named) ^ set(wanted)) or sorted({name for name in named if named.count(name) > 1})
        if wrong:
            raise refuse(
                f"tree.{wrong[0]}", f"the tree has {named}, the workflow {wanted}", "place each stage once"
            )
        self._order(tree)

    def _order(self, tree: Node) -> None:
        children = tree.children if isinstance(tree, Share) else ()
        children = (tree.first, tree.second) if isinstance(tree, Split) else children
        for before, after in pairwise(children):
            if backward := self.workload.workflow.between(self.units(after), self.units(before)):
                edge = backward[0]
                raise refuse(
                    f"tree.{edge.source}", f"comes after {edge.target}, which needs it", "put it before"
                )
        for child in children:
            self._order(child)

    def units(self, tree: Node) -> int:
        """The set of units below a node, as a bit mask."""
        mask = 0
        for leaf in leaves(tree):
            mask |= self._place[leaf.stage]
        return mask

    def seconds(self, tree: Node, items: float | None = None) -> float:
        """Seconds of one pass of `items` (the step's, unless given) through a tree; infinity where it does not fit."""
        count = self.workload.items if items is None else items
        match tree:
            case Leaf():
                return self.workload.leaf_seconds(tree, count)
            case Cycle():
                return self.workload.cycle_seconds(tree, count)
            case Share():
                return self._share(tree, count)
            case Split():
                return self._split(tree, count)

    def _share(self, share: Share, items: float) -> float:
        total, before = 0.0, 0
        for child in share.children:
            units = self.units(child)
            total += self.workload.sync_seconds(before, units, items, between=False)
            before |= units
            if share.resident:
                total += self._beside(child, share, items)
            else:
                total += self.seconds(child, items)
                total += self.workload.turn_seconds([leaf.stage for leaf in leaves(child)])
        return total

    def _beside(self, child: Node, share: Share, items: float) -> float:
        if isinstance(child, Leaf) or (isinstance(child, Cycle) and child.shared):
            return sum(self.leaf_beside(leaf, share, items) for leaf in leaves(child))
        return math.inf

    def leaf_beside(self, leaf: Leaf, share: Node, items: float) -> float:
        """Seconds of a leaf while the other leaves below `share` stay loaded on its devices."""
        return self.workload.leaf_seconds(leaf, items, self.kept_beside(leaf, share, items))

    def kept_beside(self, leaf: Leaf, share: Node, items: float) -> float:
        """Bytes a device that the other leaves below `share` keep of a leaf's devices."""
        others = [other for other in leaves(share) if other is not leaf and other.kind == leaf.kind]
        return sum(self.workload.kept(other, items) for other in others)

    def _split(self, split: Split, items: float) -> float:
        work, chunks = self.workload, split.chunks
        first, second = self.units(split.first), self.units(split.second)
        sync = work.sync_seconds(first, second, items, between=True)
        limit = work.chunk_limit(first, second)
        if limit is None:
            return max(self.seconds(split.first, items), self.seconds(split.second, items)) + sync
        if chunks > 1 and items / chunks < limit:
            return math.inf
        behind = self.seconds(split.second, items / chunks) + work.transfer_seconds(
            first, second, items / chunks
        )
        ahead, times = self.produced(split, items)
        return pipelined(times, ahead, behind) + sync

    def produced(self, split: Split, items: float) -> tuple[float, tuple[float, ...]]:
        """(seconds of a Split's first part, when each chunk of it is complete as shares of these)."""
        first, chunks = self.units(split.first), split.chunks
        limit = self.workload.chunk_limit(first, self.units(split.second)) or 1.0
        source = self.workload.source(first)
        if source is None:
            each = self.seconds(split.first, items / chunks)
            return chunks * each, tuple((index + 1) / chunks for index in range(chunks))
        count = devices(split.first)[self.workload.profiles[source].kind]
        return self.seconds(split.first, items), self.workload.arrivals(source, count, items, limit, chunks)


def assignments(
    workflow: Workflow, profiles: Mapping[str, Mapping[str, Profile]], devices: Mapping[str, DeviceKind]
) -> Iterator[dict[str, Profile]]:
    """Every choice of a kind of device for each stage. PlanError for a stage without a profile on these devices."""
    chosen: list[dict[str, Profile]] = [{}]
    for stage in sorted(workflow.stages):
        kinds = [kind for kind in sorted(profiles.get(stage, {})) if devices.get(kind, DeviceKind(0)).count]
        if not kinds:
            known = (
                ", ".join(f"{count.count} {kind}" for kind, count in sorted(devices.items())) or "no devices"
            )
            has = ", ".join(sorted(profiles.get(stage, {}))) or "no kind"
            raise refuse(
                f"stages.{stage}", f"its profile covers {has}, the cluster has {known}", "add a profile"
            )
        chosen = [{**choice, stage: profiles[stage][kind]} for choice in chosen for kind in kinds]
        if len(chosen) > MAX_ASSIGNMENTS:
            problem = f"has profiles on {len(kinds)} kinds, which makes {len(chosen)} assignments of stages to kinds"
            raise refuse(
                f"stages.{stage}", problem, f"remove profiles; at most {MAX_ASSIGNMENTS} are searched"
            )
    yield from chosen
