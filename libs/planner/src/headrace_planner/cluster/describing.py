"""A simulated plan as plain data: predicted beside simulated seconds, what devices did, and why both differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace_planner.cluster.sampling import draw
from headrace_planner.cluster.simulating import Simulated, simulate
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.trees.costs import Evaluation, Workload
from headrace_planner.trees.tree import Node


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
