"""What a run's placement is: the spec's, with what its plan chose where that was left to it. Pure."""

from __future__ import annotations

from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain import events as ev


def section_of(section: PlacementSection, plan: ev.PlanAdopted | None) -> PlacementSection:
    """A spec's placement, with what a plan chose where that was left to it; before any plan, in turns."""
    if section.mode != "auto":
        return section
    if plan is None:
        return section.model_copy(update={"mode": "collocated"})
    chosen = {"flow": plan.flow, "memory": plan.memory}
    return section.model_copy(
        update={"mode": plan.mode, "rollout": plan.rollout, "trainer": plan.trainer}
        | {key: value for key, value in chosen.items() if value}
    )
