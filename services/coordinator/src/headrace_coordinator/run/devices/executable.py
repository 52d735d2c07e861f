"""Which layouts a run can be given, and in a few words why it cannot have the others. Knows no cost."""

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
    Style,
)
from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.run.context import RunContext


def style_of(section: PlacementSection) -> Style:
    """What a placement says; its mode is not `auto`."""
    if section.mode == COLLOCATED:
        return COLLOCATED, RESIDENT if section.resident else OFFLOADED
    return section.mode, PIPELINED if section.pipelined else SEQUENTIAL


def measured_first(context: RunContext) -> list[Style]:
    """What a run that chooses by its steps makes before anything can be predicted."""
    section = context.spec.placement
    streams = _streams(context) and section.pipelined
    return [
        (COLLOCATED, section.memory or OFFLOADED),
        (DISAGGREGATED, PIPELINED if streams else SEQUENTIAL),
    ]


def executable(context: RunContext, *, one_machine: bool) -> tuple[list[Style], Mapping[Style, str]]:
    """Styles that a run can be given, and of the others why not."""
    spec, found = context.spec, list(measured_first(context))
    if spec.deterministic:
        return found[:1], {}
    section, devices = spec.placement, context.workers.grant.devices
    gpus = any(map(is_gpu, devices))
    why: dict[Style, str] = {}
    if section.memory is None:
        if gpus:
            why[COLLOCATED, RESIDENT] = "needs CPU slots"
        else:
            found.append((COLLOCATED, RESIDENT))
    if section.flow is None and _streams(context):
        found.append((DISAGGREGATED, SEQUENTIAL))
    hybrid = HYBRID, PIPELINED
    if gpus:
        why[hybrid] = "needs CPU slots"
    elif context.workers.ranks > 1:
        why[hybrid] = "needs trainer.ranks: 1"
    elif not one_machine:
        why[hybrid] = "needs all devices on one machine"
    elif not (_streams(context) and section.pipelined):
        why[hybrid] = "needs a trainer that works beside generation"
    else:
        found.append(hybrid)
    return found, why


def _streams(context: RunContext) -> bool:
    """Whether a trainer beside the rollouts has anything to do before their answers are complete."""
    return not (context.spec.deterministic or context.spec.graph.whole_batch)
