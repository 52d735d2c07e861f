"""How many instances of each kind the runs of now could use: what an autoscaler follows. Starts none."""

from __future__ import annotations

from headrace_coordinator.domain.devices.demand import demand_of
from headrace_coordinator.domain.run_states import RUN
from headrace_coordinator.domain.state import State

BUSY, IDLE = 0.6, 0.1
"""Shares of a step that a stage takes from which a kind that all runs share has one more, or one fewer."""
SHARED = {"reward": "score", "simulator": "simulate"}
"""Kinds of which a run uses as many as there are, and the stage that they work on."""


def instances_wanted(state: State) -> dict[str, int]:
    """Count by kind. Rollouts and trainers: what specs ask for, of runs that wait too.

    Of kinds that runs share: one more than there are while their stage takes most of some run's step, one fewer while
    it takes next to nothing.
    """
    demands = [(run, demand_of(run)) for run in state.active_runs() if run.intent == RUN]
    wanted = {
        "rollout": sum(demand.rollouts + demand.decoders for _, demand in demands),
        "trainer": sum(demand.trainers + demand.helpers for _, demand in demands),
    }
    users = {"reward": demands, "simulator": [each for each in demands if each[1].simulator]}
    for kind, stage in SHARED.items():
        views = [run.totals.last_step for run, _ in users[kind] if run.totals.last_step]
        shares = [view["stage_s"].get(stage, 0.0) / max(view["wall_s"], 1e-9) for view in views]
        there = sum(each.kind == kind and not each.draining for each in state.instances.values())
        change = (max(shares) > BUSY) - (max(shares) < IDLE) if shares else 0
        wanted[kind] = max(1, there + change) if users[kind] else 0
    return wanted
