"""What a run needs before it can start, how it uses its devices, and how many instances all runs could use."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from headrace_schema.sections.generating import engine_hosts, engines_apart, instance_gpus
from headrace_schema.sections.running import PlacementSection
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import generates, is_scored, trains_robots

from headrace_coordinator.domain.devices.leases import all_gpus
from headrace_coordinator.domain.devices.placement import Placement, placement_of
from headrace_coordinator.domain.run_states import RUN
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.state import State


class Demand(msgspec.Struct, frozen=True):
    """What a run needs before it can start."""

    rollouts: int
    fewest_rollouts: int
    trainers: int
    helpers: int
    """Trainers beside the group: all that are free while no run waits."""
    decoders: int
    """Rollouts without own devices: all that are free while no run waits."""
    engine: str
    backend: str
    algorithm: str
    acts: bool
    """Whether the policy is a robot's, which has algorithms of its own."""
    simulator: str
    """Backend of simulators; empty: none is needed."""
    placement: Placement
    """How it uses its devices before any plan."""
    side_by_side: bool
    """Whether it can use devices for both sides at once."""
    engines: int = 1
    """Models with devices of their own in each rollout instance; it holds a CPU slot or more for each."""
    engine_gpus: int = 1
    """GPUs that each rollout instance holds where it runs on GPUs."""
    engine_hosts: int = 1
    """Rollout instances of different hosts that make one engine."""
    scores: bool = True
    """Whether reward instances take part."""
    fair: bool = False
    """Whether it keeps at most its fair part of the devices that it has."""

    @property
    def section(self) -> PlacementSection:
        """The names of the devices that it asks for, and whether runs that share may be granted them too."""
        return self.placement.section

    @property
    def algorithms(self) -> str:
        """The trainer's registry in which the algorithm is."""
        return "episode_algorithms" if self.acts else "algorithms"


def demand_of(run: RunState) -> Demand:
    """A run's demand from its spec. A run that has begun, or trains nothing, goes on with at least one rollout, but one
    in which none takes part.
    """
    spec, section = run.spec, PlacementSection.model_validate(run.spec["placement"])
    evaluated = (spec.get("evaluation") or {}).get("data")
    given = not generates(spec["workflow"], evaluated)
    rollouts = 0 if given else spec["rollout"]["instances"]
    engines, options = 1 + engines_apart(spec), spec["rollout"].get("engine_options", {})
    hosts = engine_hosts(options)
    begun = bool(run.lineage.head or run.evaluation)
    helpers = 0 if run.evaluation else spec["trainer"].get("helpers", 0)
    ahead = spec["algorithm"].get("max_staleness", 0) > 0 and not run.evaluation
    placement = placement_of(section, ahead=ahead)
    return Demand(
        rollouts=rollouts,
        fewest_rollouts=hosts if begun and not given else rollouts,
        trainers=0 if run.evaluation else run.ranks,
        helpers=helpers,
        decoders=0 if run.evaluation else spec["rollout"].get("helpers", 0),
        engine=spec["rollout"]["engine"],
        backend=spec["trainer"]["backend"],
        algorithm=spec["algorithm"]["name"],
        acts=trains_robots(spec["workflow"], spec["data"]["source"]),
        simulator=(spec.get("environment") or {}).get("backend", ""),
        placement=placement,
        side_by_side=placement.apart or bool(section.measured_steps(spec.get("steps", 0)) and not helpers),
        engines=engines,
        engine_gpus=engines * instance_gpus(options),
        engine_hosts=hosts,
        scores=is_scored(spec["workflow"], evaluated),
    )


def devices_each(spec: RunSpec, devices: Sequence[str]) -> int:
    """How many of `devices` each rollout instance needs: on GPUs those that its engines span, else a slot for each."""
    return spec.engines * (instance_gpus(spec.rollout.engine_options) if all_gpus(devices) else 1)


def shares(run: RunState) -> bool:
    """Whether a run's spec lets other runs use what idles in its steps."""
    return bool(run.spec["placement"].get("share", False))


BUSY, IDLE = 0.6, 0.1
"""Shares of a step that a stage takes from which a kind that all runs share has one more, or one fewer."""
SHARED = {"reward": "score", "simulator": "simulate"}
"""Kinds of which a run uses all that there are, and the stage that they work on."""


def instances_wanted(state: State) -> dict[str, int]:
    """Count by kind. Rollouts and trainers: what specs ask for, of runs that wait too.

    Of kinds that runs share: one more than there are while their stage takes most of some run's step, one fewer while
    it takes next to nothing.
    """
    demands = [(run, demand_of(run)) for run in state.active_runs() if run.intent == RUN and not run.awaited]
    wanted = {
        "rollout": sum(demand.rollouts + demand.decoders for _, demand in demands),
        "trainer": sum(demand.trainers + demand.helpers for _, demand in demands),
    }
    scored = [each for each in demands if each[1].scores]
    users = {"reward": scored, "simulator": [each for each in demands if each[1].simulator]}
    for kind, stage in SHARED.items():
        views = [run.totals.last_step for run, _ in users[kind] if run.totals.last_step]
        shares = [view["stage_s"].get(stage, 0.0) / max(view["wall_s"], 1e-9) for view in views]
        there = sum(each.kind == kind and not each.draining for each in state.instances.values())
        change = (max(shares) > BUSY) - (max(shares) < IDLE) if shares else 0
        wanted[kind] = max(1, there + change) if users[kind] else 0
    return wanted
