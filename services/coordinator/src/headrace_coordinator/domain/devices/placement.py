"""Who has a run's devices when. The names of modes mean this, and nothing else in the coordinator asks for them."""

from __future__ import annotations

from typing import Any

import msgspec
from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain import events as ev

TURNS, SIDES = "collocated", "disaggregated"
"""Stages that take turns on the same devices; stages that have devices of their own."""
JOINS = "hybrid"
"""Stages that have devices of their own while answers are made; then the trainer group has all of them."""


class Placement(msgspec.Struct, frozen=True):
    """How a run uses its devices now: as its spec and its plan say."""

    section: PlacementSection
    """The names of the devices, and their parts; its mode is never `auto`."""
    turns: bool
    """Whether generating and learning take turns on devices."""
    joins: bool
    """Whether the trainer group has the rollouts' devices too, once the answers of a step are complete."""
    streams: bool
    """Whether groups can be learned from while others are generated."""
    resident: bool
    """Whether a side that has no devices for a while stays loaded."""

    @property
    def apart(self) -> bool:
        """Whether both sides have devices of their own while answers are made, or would if the run shared none."""
        return self.section.mode != TURNS

    @property
    def spans(self) -> bool:
        """Whether some ranks are on the rollouts' devices, and sleep while these generate: a rank has one GPU."""
        return self.turns and self.joins

    @property
    def rollouts_wait(self) -> bool:
        """Whether rollouts can begin a step only once the trainer group has released devices."""
        return self.turns or self.joins


def placement_of(
    section: PlacementSection,
    plan: ev.PlanAdopted | None = None,
    *,
    ahead: bool = False,
    gpus: bool = False,
) -> Placement:
    """A spec's placement, with what a plan chose where that was left to it; before any plan, in turns.

    `ahead`: the run has `max_staleness` above 0, and begins side by side. `gpus`: it has some.
    """
    if section.mode == "auto":
        chosen: dict[str, Any] = {"mode": first_mode(ahead=ahead)}
        if plan is not None:
            chosen = {"mode": plan.mode, "rollout": plan.rollout, "trainer": plan.trainer}
            chosen |= {key: value for key in ("flow", "memory") if (value := getattr(plan, key))}
        section = section.model_copy(update=chosen)
    joins = section.mode == JOINS
    turns = section.mode == TURNS or section.share or (joins and gpus)
    resident = section.resident and not section.share and not (joins and turns)
    return Placement(section, turns, joins, section.pipelined and not turns, resident)


def first_mode(*, ahead: bool) -> str:
    """The mode with which `auto` begins."""
    return SIDES if ahead else TURNS
