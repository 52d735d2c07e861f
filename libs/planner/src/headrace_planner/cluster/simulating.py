"""The simulated cluster: steps of a plan tree with drawn output lengths, on any number of devices, by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace_planner.cluster.elastic_step import ElasticStep
from headrace_planner.cluster.sampling import Draws, draw
from headrace_planner.cluster.spans import UNPLANNED, Label, Place, Timeline
from headrace_planner.cluster.walking import TreePass, TreeWalk
from headrace_planner.elastic.outlook import MoveCosts, Terms
from headrace_planner.errors import refuse
from headrace_planner.graph import Granularity
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.trees.costs import Evaluation, Workload
from headrace_planner.trees.tree import Leaf, Node, Share, Split, devices


@dataclass(frozen=True)
class Simulated:
    """Seconds of each simulated step, the items in the order in which each step learned them, and the timeline."""

    seconds: tuple[float, ...]
    learned: tuple[tuple[int, ...], ...]
    timeline: Timeline

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds) / len(self.seconds)


def simulate(
    work: Workload, tree: Node, iterations: int = 1, seed: int = 0, given: Sequence[Draws] = ()
) -> Simulated:
    """`iterations` steps of a tree, one after the other. The same seed gives the same answer.

    `given`: output lengths of each step, such as measured ones; without them they are drawn by the seed. Whole items
    are simulated, and in chunks of whole items or groups: where numbers do not divide, a replica or a chunk has one
    more, which the prediction smooths over. PlanError when the tree does not hold or fit the workload.

    >>> from headrace_planner import DeviceKind, Leaf, Profile, Share, reasoning
    >>> profiles = {"generate": Profile("generate", fixed_s=10, item_s=0.5), "score": Profile("score", item_s=0.1),
    ...             "learn": Profile("learn", item_s=1.0)}
    >>> work = Workload(reasoning(infer=False), profiles, {"gpu": DeviceKind(8)}, items=64)
    >>> tree = Share(tuple(Leaf(stage, "gpu", 8) for stage in ("generate", "score", "learn")))
    >>> [round(seconds, 1) for seconds in simulate(work, tree, iterations=2).seconds]
    [22.8, 22.8]
    """
    checked(work, tree, iterations)
    walk, origin = TreeWalk(work, Timeline()), dict.fromkeys(work.devices, 0)
    now, seconds, learned = 0.0, [], []
    for iteration in range(iterations):
        draws = given[iteration] if given else draw(work, seed, iteration)
        made = walk.run(tree, range(len(draws.weights)), draws, now, origin)
        _rest(walk, tree, work.devices, now, made)
        seconds.append(made.end - now)
        learned.append(tuple(item for _, item in made.done))
        now = made.end
    return Simulated(tuple(seconds), tuple(learned), walk.timeline)


def simulate_elastic(
    work: Workload,
    tree: Node,
    costs: MoveCosts,
    iterations: int = 1,
    seed: int = 0,
    helper_devices: int = 1,
    given: Sequence[Draws] = (),
) -> Simulated:
    """The same with the elastic policy: the tree is a Share or a Split of one generator and one learner.

    A helper is `helper_devices` devices. Groups are handed over whole; passing items over the link costs nothing.
    PlanError for other workloads.
    """
    checked(work, tree, iterations)
    terms, rollouts, owners, chunks = elastic_terms(work, tree, costs, helper_devices)
    timeline = Timeline()
    walk = TreeWalk(work, timeline)
    units = [
        walk.evaluation.units(Leaf(stage, rollouts.kind, 1))
        for stage in (terms.generate.stage, terms.learn.stage)
    ]
    sync = work.sync_seconds(units[0], units[1], work.items, between=not terms.shared)
    now, seconds, learned = 0.0, [], []
    for iteration in range(iterations):
        draws = given[iteration] if given else draw(work, seed, iteration)
        step = ElasticStep(terms, rollouts, owners, work.items / chunks, timeline, now)
        made = TreePass(step.run(draws), step.done)
        walk.hold(tree, made.end, made.end + sync, dict.fromkeys(work.devices, 0), Label.SYNC)
        made = TreePass(made.end + sync, step.done)
        _rest(walk, tree, work.devices, now, made)
        seconds.append(made.end - now)
        learned.append(tuple(item for _, item in made.done))
        now = made.end
    return Simulated(tuple(seconds), tuple(learned), timeline)


def elastic_terms(
    work: Workload, tree: Node, costs: MoveCosts, helper_devices: int = 1
) -> tuple[Terms, Place, Place, int]:
    """(terms, devices that roll out, owners' devices, chunks) of a tree. PlanError for other trees."""
    match tree:
        case Share((Leaf() as first, Leaf() as second), False):
            shared, chunks, at = True, 1, 0
        case Split(Leaf() as first, Leaf() as second, chunks):
            shared, at = False, first.devices
        case _:
            raise refuse("tree", "is no Share or Split of two stages", "plan generate and learn alone")
    generate, learn = work.profiles[first.stage], work.profiles[second.stage]
    if generate.lengths is None or first.kind != second.kind or (shared and first.devices != second.devices):
        raise refuse("tree", "its first stage has no lengths, or other devices", "use one kind of device")
    if any(edge.granularity is Granularity.BATCH for edge in work.workflow.edges):
        raise refuse("edges", "learn waits for the batch", "elastic steps need a barrier of a group or less")
    if generate.used(work.items, first.devices) < first.devices:
        problem = f"{work.items:g} items do not occupy {first.devices} {first.kind}"
        raise refuse("items", problem, "use more items, or fewer devices")
    terms = Terms(
        generate, learn, work.workflow.group_size, second.devices, shared,
        costs, work.memory(first.kind), helper_devices,
    )  # fmt: skip
    return terms, Place(first.kind, 0, first.devices), Place(first.kind, at, second.devices), chunks


def checked(work: Workload, tree: Node, iterations: int) -> None:
    """PlanError unless the tree holds every stage once, has no more devices than there are, and fits them."""
    if iterations < 1:
        raise refuse("simulation.iterations", f"is {iterations}", "simulate at least 1 step")
    if work.items != round(work.items) or work.items < 1:
        raise refuse("items", f"{work.items} are no whole items", "use a whole number, at least 1")
    evaluation = Evaluation(work)
    evaluation.check(tree)
    for kind, count in devices(tree).items():
        has = work.devices[kind].count if kind in work.devices else 0
        if has < count:
            raise refuse(
                f"devices.{kind}", f"the tree needs {count}, the cluster has {has}", "use a smaller tree"
            )
    if evaluation.seconds(tree) == float("inf"):
        raise refuse("tree", "does not fit the memory or hands over too small chunks", "plan another tree")


def _rest(walk: TreeWalk, tree: Node, cluster: Mapping[str, object], begin: float, made: TreePass) -> None:
    """Devices of the cluster that the tree leaves idle."""
    for kind in cluster:
        used = devices(tree).get(kind, 0)
        place = Place(kind, used, walk.work.devices[kind].count - used)
        walk.timeline.add(place, begin, made.end, UNPLANNED, Label.WAIT_LEASE)


def describe(work: Workload, tree: Node, iterations: int, seed: int, trace: bool = False) -> dict[str, Any]:
    """Simulates a plan and compares; every value is JSON. `trace` adds the timeline as a Chrome trace."""
    found, predicted = simulate(work, tree, iterations, seed), Evaluation(work).seconds(tree)
    whole = _whole_items(work, tree)
    total = sum(found.timeline.device_seconds().values())
    described = {
        "iterations": iterations,
        "seed": seed,
        "predicted_s": predicted,
        "step_s": found.step_s,
        "steps_s": list(found.seconds),
        "whole_items_s": whole,
        "lengths_s": found.step_s - predicted - whole,
        "drawn": _drawn(work, iterations, seed),
        "device_seconds": [
            {"stage": stage, "label": label.value, "device_s": value / iterations, "share": value / total}
            for (stage, label), value in _largest_first(found)
        ],
    }
    return {**described, "chrome_trace": found.timeline.chrome_trace()} if trace else described


def _largest_first(found: Simulated) -> list[Any]:
    return sorted(found.timeline.device_seconds().items(), key=lambda entry: (-entry[1], entry[0]))


def _whole_items(work: Workload, tree: Node) -> float:
    """Seconds that whole items, rounds and chunks add to what the prediction smooths over, with equal lengths."""
    profiles = {
        stage: replace(profile, lengths=Lengths((1.0,), profile.lengths.group_correlation))
        if profile.lengths
        else profile
        for stage, profile in work.profiles.items()
    }
    equal = Workload(work.workflow, profiles, work.devices, work.items, work.sync)
    return simulate(equal, tree).step_s - Evaluation(equal).seconds(tree)


def _drawn(work: Workload, iterations: int, seed: int) -> dict[str, Any]:
    """For each stage with lengths: mean and longest of the drawn outputs, and the longest that there is, in means."""
    found: dict[str, list[list[float]]] = {}
    for iteration in range(iterations):
        for stage, lengths in draw(work, seed, iteration).lengths.items():
            found.setdefault(stage, []).append(lengths)
    return {
        stage: {
            "mean": sum(sum(step) / len(step) for step in steps) / len(steps),
            "longest": sum(max(step) for step in steps) / len(steps),
            "limit": getattr(work.profiles[stage].lengths, "stretch", 1.0),
        }
        for stage, steps in found.items()
    }
