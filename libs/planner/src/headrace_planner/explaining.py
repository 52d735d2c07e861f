"""A plan as plain data that explains itself: tree, timeline, bottleneck, alternatives, more devices.

The one presenter of plans: the command and the HTTP API show what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace_planner.asynchronous import AsyncPlan, best_period, enough_staleness
from headrace_planner.cluster.asynchronous import simulate_async
from headrace_planner.cluster.simulating import describe
from headrace_planner.documents import PlanRequest
from headrace_planner.errors import PlanError, refuse
from headrace_planner.graph import Workflow
from headrace_planner.planning import Plan, lower_bound, plan
from headrace_planner.profiling.measured import HOST
from headrace_planner.profiling.profiles import Profile
from headrace_planner.seats import Seated, seated
from headrace_planner.trees.costs import NO_SYNC, DeviceKind, Evaluation, Workload
from headrace_planner.trees.search import CHUNKS, Shapes
from headrace_planner.trees.timeline import Bar, bars
from headrace_planner.trees.tree import Cycle, Node, Share, Split, draw, to_data

ALTERNATIVES = {
    "collocated, resident": Shapes(offloaded=False, split=False),
    "collocated, offloaded": Shapes(resident=False, split=False),
    "disaggregated, sequential": Shapes(False, False, chunks=(1,)),
    "disaggregated, pipelined": Shapes(False, False, chunks=CHUNKS),
}
STALENESS = (1, 2, 4)
"""Bounds that asynchronous steps are predicted for, beside the request's own."""
MAX_SIMULATED = 2_000_000
"""Items that one request may simulate: about a minute."""
NOTE = "a prediction from the profile; a run with placement.mode: auto chooses by its own steps"


def explain(request: PlanRequest) -> dict[str, Any]:
    """The best plan of a request and why it is the best; every value is JSON. PlanError names what is wrong."""
    workflow, sync = request.workflow.made(), request.profile.sync.made()
    profiles = in_rounds(workflow, request.profile.made(workflow.group_size), request.rounds)
    cluster = request.kinds()

    def planned(devices: Mapping[str, DeviceKind], shapes: Shapes = Shapes()) -> Plan:  # noqa: B008
        return plan(workflow, profiles, devices, request.items, sync, shapes)

    section = request.seats
    if section is None:
        best = planned(cluster)
        found = _answer(request, best, planned, cluster)
        others = [_alternative(name, best, planned, cluster) for name in ALTERNATIVES]
        beside = _asynchronous(request, best)
        return {**found, "mode": mode(best.tree), "alternatives": others, "asynchronous": beside}
    given = seated(
        workflow,
        profiles,
        cluster,
        section.stages,
        streamed=section.streamed,
        resident=section.resident,
    )

    def placed(devices: Mapping[str, DeviceKind]) -> Plan:
        return plan(workflow, given.profiles, devices, request.items, sync, given.shapes)

    best = placed(given.cluster)
    found = _answer(request, best, placed, given.cluster)
    return {**found, **_seated(request, given, best, planned(cluster))}


def _answer(
    request: PlanRequest, best: Plan, planned: Any, cluster: Mapping[str, DeviceKind]
) -> dict[str, Any]:
    """What is said of any plan; `planned` makes one for other devices."""
    workflow = best.workload.workflow
    profiles = best.workload.profiles.values()
    return {
        "workflow": workflow.name,
        "items": request.items,
        "profile": request.profile.about,
        "fit_errors": {profile.stage: round(profile.error, 4) for profile in profiles},
        "devices": {kind: section.count for kind, section in cluster.items()},
        **described(best),
        "lower_bound_s": lower_bound(best.workload),
        "more_devices": [_more(best, planned, cluster, factors) for factors in _larger(cluster)],
        **_simulated(request, best),
        "note": NOTE,
    }


def _seated(request: PlanRequest, given: Seated, best: Plan, free: Plan) -> dict[str, Any]:
    """What is different where devices are given by stage: one alternative, and each device counted once."""
    assert request.seats is not None
    laid = bars(Evaluation(best.workload), best.tree)
    kinds = {profile.kind for profile in given.profiles if profile.stage in request.seats.stages}
    busy = sum(bar.busy * bar.count for bar in laid if bar.kind in kinds - {HOST})
    change = best.seconds / free.seconds - 1
    why = f"the placement takes {change:+.0%}: {draw(free.tree)[0].strip()}"
    note = NOTE
    if given.on_host:
        stages = ", ".join(given.on_host)
        note += f"; the profile of {stages} is of the host, and takes as long on any number of devices"
    loaded = "resident" if request.seats.resident else "offloaded"
    return {
        "mode": f"collocated, {loaded}" if given.turns else mode(best.tree),
        "seats": {stage: list(names) for stage, names in request.seats.stages.items()},
        "idle_share": max(0.0, 1 - busy / (given.devices * best.seconds)) if given.devices else 0.0,
        "alternatives": [{"mode": f"{mode(free.tree)}, on any of them", "step_s": free.seconds, "why": why}],
        "note": note,
    }


def _asynchronous(request: PlanRequest, best: Plan) -> dict[str, Any] | None:
    """Steps that run ahead of each other, for the request's bound and some others; None where they cannot."""
    work, wanted = best.workload, request.max_staleness
    by_bound = {bound: best_period(work, bound) for bound in sorted({*STALENESS, wanted} - {0})}
    found = {bound: made for bound, made in by_bound.items() if made is not None}
    if not found:
        return None
    chosen = found[wanted or min(found)]
    rows = [
        {
            "max_staleness": bound,
            "step_s": made.seconds,
            "generate_devices": made.generating,
            "learn_devices": made.learning,
            "generate_s": made.generate_s,
            "learn_s": made.learn_s,
            "faster": best.seconds / made.seconds - 1,
            **_waits(request, work, made),
        }
        for bound, made in found.items()
    ]
    return {
        "max_staleness": chosen.max_staleness,
        "step_s": chosen.seconds,
        "enough": enough_staleness(work, chosen.generating, chosen.learning),
        "by_staleness": rows,
    }


def _waits(request: PlanRequest, work: Workload, made: AsyncPlan) -> dict[str, Any]:
    """How often and how long the trainer waits for a tail, where the request asks for a simulation."""
    wanted, filling = request.simulation, 2 * (made.max_staleness + 1)
    if wanted is None or (wanted.iterations + filling) * request.items > MAX_SIMULATED // len(STALENESS):
        return {}
    found = simulate_async(
        work, made.generating, made.learning, made.max_staleness, wanted.iterations, wanted.seed
    )
    return {
        "simulated_s": found.step_s,
        "waited_steps_share": found.waited_share,
        "waited_time_share": found.wait_share,
    }


def in_rounds(workflow: Workflow, profiles: Sequence[Profile], rounds: float) -> list[Profile]:
    """Profiles of a step whose cycles have room for a part of the items: their fixed costs come once a round."""
    turns = {stage for unit in workflow.units if len(unit) > 1 for stage in unit}
    return [
        replace(profile, fixed_s=rounds * profile.fixed_s) if profile.stage in turns else profile
        for profile in profiles
    ]


def _simulated(request: PlanRequest, best: Plan) -> dict[str, Any]:
    wanted = request.simulation
    if wanted is None:
        return {}
    if wanted.iterations * request.items > MAX_SIMULATED:
        problem = f"{wanted.iterations} steps of {request.items} items are more than {MAX_SIMULATED}"
        raise refuse("simulation.iterations", problem, "simulate fewer steps")
    return {
        "simulation": describe(best.workload, best.tree, wanted.iterations, wanted.seed, wanted.chrome_trace)
    }


def described(made: Plan) -> dict[str, Any]:
    """A plan's tree, seconds, throughput, timeline and bottleneck."""
    evaluation = Evaluation(made.workload)
    laid = bars(evaluation, made.tree)
    worst = bottleneck(laid)
    return {
        "step_s": made.seconds,
        "items_per_s": made.workload.items / made.seconds,
        "tree": to_data(made.tree),
        "tree_text": draw(made.tree),
        "timeline": [vars(bar) for bar in laid],
        "bottleneck": {"stage": worst.stage, "busy_share": min(1.0, worst.busy / made.seconds)},
        "idle_share": idle_share(made, laid),
        "idle_shares": {kind: idle_share(made, laid, kind) for kind in made.workload.devices},
        "switch_s": switch_seconds(made),
        "sync_s": _without(made, sync=True),
    }


def bottleneck(laid: list[Bar]) -> Bar:
    """The stage that is at work for the longest."""
    return max(laid, key=lambda bar: (bar.busy, bar.stage))


def idle_share(made: Plan, laid: list[Bar], only: str = "") -> float:
    """Share of device-seconds of a step, of all kinds or one, in which no stage is at work. A tail counts as work."""
    kinds = [only] if only else list(made.workload.devices)
    total = sum(made.workload.devices[kind].count for kind in kinds) * made.seconds
    return max(0.0, 1 - sum(bar.busy * bar.count for bar in laid if bar.kind in kinds) / total)


def switch_seconds(made: Plan) -> float:
    """Seconds of a step that loading and offloading take on the critical path."""
    return _without(made, sync=False)


def _without(made: Plan, sync: bool) -> float:
    work = made.workload
    if sync:
        other = replace(work, sync=replace(NO_SYNC, link_bytes_per_s=work.sync.link_bytes_per_s))
    else:
        free = {
            stage: replace(profile, load_s=0.0, offload_s=0.0) for stage, profile in work.profiles.items()
        }
        other = replace(work, profiles=free)
    return max(0.0, Evaluation(work).seconds(made.tree) - Evaluation(other).seconds(made.tree))


def mode(tree: Node) -> str:
    """What people call a tree: collocated, disaggregated or hybrid, and how."""
    kinds = _shapes(tree)
    splits = {name for name in kinds if name.startswith("split")}
    shares = kinds - splits
    if splits and shares:
        return "hybrid"
    if splits:
        return "disaggregated, pipelined" if "split, chunks" in splits else "disaggregated, sequential"
    return "collocated, offloaded" if "offloaded" in shares else "collocated, resident"


def _shapes(tree: Node) -> set[str]:
    match tree:
        case Share(children, resident):
            return {"resident" if resident else "offloaded"}.union(*(_shapes(child) for child in children))
        case Split(first, second, chunks):
            return {"split, chunks" if chunks > 1 else "split"} | _shapes(first) | _shapes(second)
        case Cycle(_, _, batches, shared):
            return {"resident"} if shared else {"split, chunks" if batches > 1 else "split"}
        case _:
            return set()


def _alternative(name: str, best: Plan, planned: Any, cluster: Mapping[str, DeviceKind]) -> dict[str, Any]:
    try:
        made = planned(cluster, ALTERNATIVES[name])
    except PlanError as error:
        return {"mode": name, "step_s": None, "why": f"not possible: {error}"}
    if made.seconds <= best.seconds * (1 + 1e-9):
        return {"mode": name, "step_s": made.seconds, "why": "as fast: it is the plan, or equals it"}
    return {"mode": name, "step_s": made.seconds, "why": _why(made, best)}


def _why(made: Plan, best: Plan) -> str:
    ours, theirs = described(best), described(made)
    stage, share = theirs["bottleneck"]["stage"], theirs["bottleneck"]["busy_share"]
    reasons = [f"{made.seconds / best.seconds - 1:+.0%}", f"{stage} is busy {share:.0%} of the step"]
    if theirs["idle_share"] > ours["idle_share"] + 0.01:
        reasons.append(f"devices idle {theirs['idle_share']:.0%} of it (the plan: {ours['idle_share']:.0%})")
    for name, key in (("switching", "switch_s"), ("weight sync", "sync_s")):
        if theirs[key] > ours[key] + 0.005 * best.seconds:
            reasons.append(f"{name} takes {theirs[key]:.1f} s (the plan: {ours[key]:.1f})")
    return "; ".join(reasons)


def _larger(cluster: Mapping[str, DeviceKind]) -> list[dict[str, float]]:
    """Factors to look at: all kinds together, then twice of each kind alone where there are several."""
    several = [kind for kind, device in cluster.items() if device.count > 1]
    alone = [{kind: 2.0} for kind in several] if len(several) > 1 else []
    return [dict.fromkeys(cluster, 1.25), dict.fromkeys(cluster, 2.0), *alone]


def _more(
    best: Plan, planned: Any, cluster: Mapping[str, DeviceKind], factors: Mapping[str, float]
) -> dict[str, Any]:
    larger = {
        kind: replace(device, count=math.ceil(device.count * factors.get(kind, 1.0)))
        for kind, device in cluster.items()
    }
    made = planned(larger)
    return {
        "devices": {kind: device.count for kind, device in larger.items()},
        "step_s": made.seconds,
        "faster": best.seconds / made.seconds - 1,
    }
