"""What a user writes for the planner, as typed sections: workflow, profile, cluster. Reads no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from headrace_schema.sections.base import FEW, MANY, Count, Section
from pydantic import Field, PositiveFloat

from headrace_planner.asynchronous import MAX_STALENESS
from headrace_planner.errors import refuse
from headrace_planner.graph import Edge, Granularity, Workflow, embodied, reasoning
from headrace_planner.profiling.fitting import Point, fit
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.profiling.profiles import Memory, Profile
from headrace_planner.trees.costs import DeviceKind, Sync

GIB = 2.0**30
MOST_DEVICES = 16_384
"""Of one kind: the time that a plan takes grows with them."""
Seconds = Annotated[float, Field(ge=0)]


class PointSection(Section):
    """One measurement of a stage."""

    items: PositiveFloat = Field(description="items of the measured pass")
    devices: Count = Field(description="devices that the stage had")
    seconds: PositiveFloat = Field(description="seconds it took")
    concurrency: PositiveFloat | None = Field(default=None, description="most items in flight on a replica")
    used_gib: PositiveFloat | None = Field(default=None, description="peak memory of one device")


class MemorySection(Section):
    """Memory that a stage needs; see `Memory`."""

    state_gib: Seconds = Field(
        default=0.0, description="weights and what belongs to them, over a replica's devices"
    )
    device_gib: Seconds = Field(default=0.0, description="workspace on every device")
    item_gib: Seconds = Field(default=0.0, description="one item in flight, over a replica's devices")
    sharded_over_all: bool = Field(
        default=False, description="the state is divided over all devices of the stage"
    )

    def made(self) -> Memory:
        """The section as bytes."""
        return Memory(self.state_gib * GIB, self.device_gib * GIB, self.item_gib * GIB, self.sharded_over_all)


class LengthsSection(Section):
    """Distribution of output lengths."""

    quantiles: dict[float, PositiveFloat] = Field(
        max_length=MANY, description="share of outputs: length; 1 is the longest"
    )
    mean: PositiveFloat | None = Field(default=None, description="scale the shape to this mean")
    limit: PositiveFloat | None = Field(default=None, description="cut at this length; needs mean")
    group_correlation: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="how alike the lengths within a group are: 1 alike, 0 independent"
    )
    group_size: Count | None = Field(
        default=None, description="outputs of a group where they were measured; default: the workflow's"
    )

    def made(self, key: str, group: int = 1) -> Lengths:
        """The distribution, of groups of `group` unless the section says otherwise; PlanError names `key`."""
        shape = Lengths.from_quantiles(self.quantiles, self.group_correlation, self.group_size or group)
        if self.limit is not None and self.mean is None:
            raise refuse(f"{key}.mean", "is missing beside limit", "add the mean length")
        return (
            shape
            if self.mean is None
            else shape.scaled(self.mean, self.limit or self.mean * shape.stretch * 1.001)
        )


class StageSection(Section):
    """Profile of a stage on one kind of device: either measured points, or the costs themselves."""

    kind: str = Field(default="gpu", description="kind of device")
    points: list[PointSection] = Field(
        default_factory=list, max_length=4 * FEW, description="measurements to fit; three or more"
    )
    fixed_s: Seconds = Field(default=0.0, description="seconds whatever the number of items")
    item_s: Seconds = Field(default=0.0, description="seconds that one item adds on one replica")
    host_item_s: Seconds = Field(default=0.0, description="seconds of an item that no device shortens")
    batch_power: Annotated[float, Field(ge=0.1, le=3)] = Field(
        default=1.0,
        description="exponent of the items in flight on a replica in what they add to a pass; 1: a straight line",
    )
    scaling_loss: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="exponent of lost scaling"
    )
    replica_devices: Count = Field(default=1, description="devices of one replica")
    sizes: list[Count] = Field(
        default_factory=list, max_length=MANY, description="valid device counts; default: whole replicas"
    )
    max_concurrency: PositiveFloat | None = Field(
        default=None, description="most items in flight on a replica"
    )
    lengths: LengthsSection | None = Field(
        default=None, description="output lengths, for a stage with a tail"
    )
    memory: MemorySection = MemorySection()
    load_s: Seconds = Field(default=0.0, description="seconds to take the devices' memory")
    offload_s: Seconds = Field(default=0.0, description="seconds to give it back")

    def made(self, stage: str, group: int = 1) -> Profile:
        """The profile, fitted when there are points; `group`: outputs of a group. PlanError names the stage."""
        key = f"profile.stages.{stage}"
        if self.points and (self.fixed_s or self.item_s):
            raise refuse(key, "has points and costs", "give points, or fixed_s and item_s")
        template = Profile(
            stage,
            self.kind,
            fixed_s=self.fixed_s,
            item_s=1.0 if self.points else self.item_s,
            host_item_s=self.host_item_s,
            scaling_loss=self.scaling_loss,
            batch_power=self.batch_power,
            replica_devices=self.replica_devices,
            sizes=tuple(sorted(self.sizes)),
            max_concurrency=self.max_concurrency or math.inf,
            lengths=self.lengths.made(f"{key}.lengths", group) if self.lengths else None,
            memory=self.memory.made(),
            load_s=self.load_s,
            offload_s=self.offload_s,
        )
        points = [
            Point(
                point.items,
                point.devices,
                point.seconds,
                point.concurrency or math.inf,
                None if point.used_gib is None else point.used_gib * GIB,
            )
            for point in self.points
        ]
        return fit(template, points) if points else template


class SyncSection(Section):
    """Weight transfers and the link between parts of a plan."""

    between_s: Seconds = Field(default=0.0, description="seconds to send weights to other devices")
    same_s: Seconds = Field(default=0.0, description="seconds to re-shard weights on the same devices")
    link_gib_per_s: PositiveFloat | None = Field(
        default=None, description="rate of items between parts; default: free"
    )

    def made(self) -> Sync:
        """The section as costs."""
        return Sync(
            self.between_s, self.same_s, self.link_gib_per_s * GIB if self.link_gib_per_s else math.inf
        )


class ProfileDocument(Section):
    """Profiles of a workflow's stages on some hardware. `about` says where the figures come from."""

    about: str = Field(default="", description="model, hardware, where the figures come from")
    stages: dict[str, StageSection | Annotated[list[StageSection], Field(max_length=FEW)]] = Field(
        max_length=FEW, description="stage: profile, or one for each kind"
    )
    sync: SyncSection = SyncSection()
    memory_gib: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        max_length=FEW,
        description="kind of device: memory of one, where a cluster does not say it",
    )

    def made(self, group: int = 1) -> list[Profile]:
        """All profiles, for groups of `group` outputs."""
        listed = {name: one if isinstance(one, list) else [one] for name, one in self.stages.items()}
        return [section.made(stage, group) for stage, sections in listed.items() for section in sections]


class EdgeSection(Section):
    """What one stage hands to another."""

    source: str = Field(description="stage that produces")
    target: str = Field(description="stage that receives")
    granularity: Granularity = Field(default=Granularity.TRAJECTORY, description="smallest piece handed over")
    item_bytes: Seconds = Field(default=0.0, description="bytes of one item")


class WorkflowSection(Section):
    """A built-in workflow by name, or stages and edges of one's own."""

    name: str = Field(default="reasoning", description="reasoning, embodied, or any name beside stages")
    barrier: Granularity | None = Field(
        default=None, description="what learn waits for; default: group, embodied batch"
    )
    group_size: Count = Field(default=1, description="trajectories of a group")
    infer: bool = Field(
        default=False, description="reasoning: reference or old log-probs, or values, in a stage of its own"
    )
    critic: bool = Field(default=False, description="reasoning: a critic infers and learns beside the policy")
    stages: list[str] = Field(
        default_factory=list, max_length=FEW, description="stages of a workflow of one's own"
    )
    edges: list[EdgeSection] = Field(
        default_factory=list, max_length=4 * FEW, description="edges between these stages"
    )
    weights: list[tuple[str, str]] = Field(
        default_factory=list, max_length=FEW, description="learner and generator of each weight sync"
    )

    def made(self) -> Workflow:
        """The graph. PlanError names what is wrong with it."""
        if self.stages:
            edges = tuple(Edge(e.source, e.target, e.granularity, e.item_bytes) for e in self.edges)
            return Workflow(self.name, tuple(self.stages), edges, tuple(self.weights), self.group_size)
        if self.name == "reasoning":
            return reasoning(self.barrier or Granularity.GROUP, self.group_size, self.infer, self.critic)
        if self.name == "embodied":
            return embodied(self.barrier or Granularity.BATCH, self.group_size)
        raise refuse(
            "workflow.name", f"{self.name!r} is not built in", "use reasoning or embodied, or give stages"
        )


class DevicesSection(Section):
    """Devices of one kind."""

    count: Annotated[int, Field(strict=True, ge=1, le=MOST_DEVICES)] = Field(description="how many")
    memory_gib: PositiveFloat | None = Field(default=None, description="memory of each; default: not limited")

    def made(self, known: float | None = None) -> DeviceKind:
        """The section as bytes; `known`: GiB of one device where the section does not say it."""
        memory = self.memory_gib or known
        return DeviceKind(self.count, memory * GIB if memory else math.inf)


class SimulationSection(Section):
    """Steps of the plan on a simulated cluster."""

    iterations: Annotated[int, Field(strict=True, ge=1, le=100)] = Field(
        default=3, description="steps to simulate"
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = Field(
        default=0, description="seed of the drawn output lengths"
    )
    chrome_trace: bool = Field(default=False, description="answer the timeline as a Chrome trace as well")


class SeatsSection(Section):
    """Devices that stages have for themselves, as a run's placement names them; stages that share some take turns."""

    stages: dict[str, Annotated[list[str], Field(max_length=MOST_DEVICES)]] = Field(
        min_length=1,
        max_length=FEW,
        description="stage: names of its devices; two stages of a cycle have none in common",
    )
    streamed: bool = Field(
        default=True, description="sides with devices of their own hand over in chunks, not once a step"
    )
    resident: bool = Field(default=False, description="stages that take turns stay loaded")


class PlanRequest(Section):
    """Everything that a plan is made from."""

    workflow: WorkflowSection = WorkflowSection()
    items: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] = Field(
        description="trajectories of one step"
    )
    profile: ProfileDocument
    cluster: dict[str, DevicesSection] = Field(
        max_length=FEW, description="kind of device: how many, and their memory"
    )
    seats: SeatsSection | None = Field(
        default=None, description="devices by stage; default: the planner divides them"
    )
    environments: Count | None = Field(
        default=None,
        description="environments at work at once, of a workflow with a cycle: further trajectories wait for another "
        "round; default: as many as trajectories",
    )
    simulation: SimulationSection | None = Field(
        default=None, description="simulate the plan as well; default: predict alone"
    )
    max_staleness: Annotated[int, Field(strict=True, ge=0, le=MAX_STALENESS)] = Field(
        default=0,
        description="steps that a trajectory may lag behind its base: the run's bound; 0: synchronous",
    )

    @property
    def rounds(self) -> float:
        """How many times a cycle begins anew for the step's trajectories."""
        return max(1.0, self.items / self.environments) if self.environments else 1.0

    def kinds(self) -> Mapping[str, DeviceKind]:
        """The cluster as plain data."""
        known = self.profile.memory_gib
        return {kind: section.made(known.get(kind)) for kind, section in self.cluster.items()}
