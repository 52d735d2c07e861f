"""The layouts that a run can use its devices in, the present one, and why others cannot be used. Knows no cost."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_planner.placements.layouts import (
    COLLOCATED,
    DISAGGREGATED,
    HYBRID,
    OFFLOADED,
    PIPELINED,
    RESIDENT,
    SEQUENTIAL,
    Layout,
    Shape,
    Style,
)

from headrace_coordinator.domain.devices.demand import devices_each
from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.devices.places import device_order, machines
from headrace_coordinator.run.context import RunContext


class Layouts:
    """The layouts of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._spec = context.spec
        self._workers = context.workers

    @property
    def devices(self) -> list[str]:
        """Devices of the run's grant, in order."""
        return sorted(self._workers.grant.devices, key=device_order)

    @property
    def divisible(self) -> bool:
        """Whether devices can be divided freely: those of one machine, of which an instance can use several."""
        return self._one_machine and not any(map(is_gpu, self.devices))

    @property
    def _one_machine(self) -> bool:
        workers = [*self._workers.rollouts, *self._workers.trainers]
        return len(set(machines(worker.instance for worker in workers).values())) == 1

    @property
    def present(self) -> Layout:
        """How the run uses its devices now."""
        generate, learn = (
            {device for worker in side for device in worker.devices}
            for side in (self._workers.rollouts, self._workers.trainers)
        )
        mode, style = self._style
        if mode == HYBRID:
            learn -= generate  # Which it has once the answers are complete.
        return Layout(len(generate), len(learn), mode, style)

    @property
    def _style(self) -> Style:
        section = self._workers.section
        if section.mode == COLLOCATED:
            return COLLOCATED, RESIDENT if section.resident else OFFLOADED
        return section.mode, PIPELINED if section.pipelined else SEQUENTIAL

    @property
    def shape(self) -> Shape:
        """Groups of a step, their size, and whether they are learned from while others are generated."""
        algorithm = self._spec.algorithm
        streams = not self._context.waits_for_batch and self._spec.placement.pipelined
        ahead = algorithm.max_staleness > 0
        return Shape(algorithm.prompts_per_step, algorithm.group_size, streams, ahead)

    @property
    def fewest(self) -> tuple[int, int]:
        """The least devices that generate, and that learn."""
        return len(self._workers.rollouts) * devices_each(self._spec, self.devices), len(
            self._workers.trainers
        )

    @property
    def obstacle(self) -> str:
        """Why this run can only take turns; empty where it can generate and learn side by side."""
        needed, there = sum(self.fewest), len(self.devices)
        if self._spec.deterministic:
            return "a deterministic run keeps one placement: collocated"
        if there < needed:
            return f"side by side needs {needed} devices and the run has {there}: collocated"
        return ""

    @property
    def measured_first(self) -> list[Style]:
        """Styles that a run measures before anything can be predicted: in turns, and side by side."""
        section = self._spec.placement
        streams = self._streams and section.pipelined
        apart = (DISAGGREGATED, PIPELINED if streams else SEQUENTIAL)
        return [apart] if self._ahead else [(COLLOCATED, section.memory or OFFLOADED), apart]

    def executable(self) -> tuple[list[Style], Mapping[Style, str]]:
        """Styles that the run can be given, and of the others why not."""
        found, section = list(self.measured_first), self._spec.placement
        if self._spec.deterministic:
            return found[:1], {}
        if self._ahead:  # Sides that do not wait for each other leave hybrid little to lend.
            return found, {(HYBRID, PIPELINED): "is not tried with max_staleness"}
        gpus = any(map(is_gpu, self.devices))
        why: dict[Style, str] = {}
        if section.memory is None:
            if gpus:
                why[COLLOCATED, RESIDENT] = "needs CPU slots"
            else:
                found.append((COLLOCATED, RESIDENT))
        if section.flow is None and self._streams:
            found.append((DISAGGREGATED, SEQUENTIAL))
        hybrid = HYBRID, PIPELINED
        if gpus:
            why[hybrid] = "needs CPU slots"
        elif self._workers.ranks > 1:
            why[hybrid] = "needs trainer.ranks: 1"
        elif not self._one_machine:
            why[hybrid] = "needs all devices on one machine"
        elif not (self._streams and section.pipelined):
            why[hybrid] = "needs a trainer that works beside generation"
        else:
            found.append(hybrid)
        return found, why

    @property
    def _ahead(self) -> bool:
        """Whether answers are made ahead of the step that is learned, so that neither side waits for the other."""
        return self._spec.algorithm.max_staleness > 0

    @property
    def _streams(self) -> bool:
        """Whether a trainer beside the rollouts has anything to do before their answers are complete."""
        return not (self._spec.deterministic or self._spec.graph.whole_batch)
