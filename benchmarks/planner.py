"""The planner's accuracy and speed: `python benchmarks/planner.py`.

Accuracy: *mode transfers* over published measurements. The inputs of a case are the seconds of stages in one mode, the
prediction is the iteration of another mode on the same GPUs. What the file does not give is an assumption in
`data/planner_assumptions.json`, with one value for all cases; each case is also shown over the assumptions' ranges.

Speed: CPU seconds of one search for the built-in workflows, the slower of the two, median of the repetitions.

Prints one JSON line with `transfers_counted`, `mean_error_transfers`, `worst_error_transfers`, `rankings_right` (share
of the cases whose mode ranks as measured), `rankings_total`, `plan_s_1024` and `plan_s_4096`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from _harness import emit, machine, say, table
from _transfers import ASSUMPTIONS, MEASUREMENTS, Case, cases, load, over_range, values_of
from headrace_planner import (
    DeviceKind,
    Granularity,
    Lengths,
    Memory,
    Point,
    Profile,
    Sync,
    Workflow,
    embodied,
    fit,
    plan,
    reasoning,
)

GIB = 2.0**30
COLUMNS = (
    "case",
    "inputs (s)",
    "predicted",
    "measured",
    "error",
    "over the ranges",
    "moved most by",
    "rank",
    "",
)
SCALE = {"rollout": "generate", "logprob": "infer", "train": "learn"}
SEQUENCES = 512 * 16


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measurements", type=Path, default=MEASUREMENTS, help="published measurements, JSON"
    )
    parser.add_argument("--assumptions", type=Path, default=ASSUMPTIONS, help="what they do not give, JSON")
    parser.add_argument("--repetitions", type=int, default=3, help="searches of each size")
    options = parser.parse_args()
    say(machine())
    data, assumptions = load(options.measurements), load(options.assumptions)
    found = accuracy(data, assumptions)
    show_scale_fits(data)
    speed = {
        f"plan_s_{devices}": search_seconds(data, devices, options.repetitions) for devices in (1024, 4096)
    }
    say(f"search, CPU seconds: {speed}; at the end: {machine()}")
    emit("planner", {**found, **speed})


def accuracy(data: Mapping[str, Any], assumptions: Mapping[str, Any]) -> dict[str, float]:
    """Shows every case and returns the figures."""
    values, made = values_of(assumptions), list(cases(data))
    table(COLUMNS, [row(case, assumptions) for case in made])
    errors = [abs(case.error(values)) for case in made if case.counted]
    ranks = [case.rank_right(values) for case in made]
    return {
        "transfers_counted": len(errors),
        "mean_error_transfers": mean(errors),
        "worst_error_transfers": max(errors),
        "rankings_right": mean(ranks),
        "rankings_total": len(ranks),
    }


def row(case: Case, assumptions: Mapping[str, Any]) -> tuple[object, ...]:
    """The cells of a row under COLUMNS."""
    values = values_of(assumptions)
    low, high, widest = over_range(case, assumptions)
    return (
        case.name,
        case.inputs,
        f"{case.predict(values):.1f}",
        f"{case.measured:.1f}",
        f"{case.error(values):+.1%}",
        f"{low:.0f} to {high:.0f}",
        widest,
        "right" if case.rank_right(values) else "WRONG",
        case.note,
    )


def show_scale_fits(data: Mapping[str, Any]) -> None:
    """Fits over scale, one mode: 64 and 128 GPUs predict 256. Shown, not counted."""
    published = data["grpo_7B_latency_s"]["RLinf_temporal"]
    say("\nfits over scale (GRPO 7B, collocated, 64 and 128 → 256 GPUs), not counted:")
    for name, profile in scale_profiles(data, ("64", "128")).items():
        found, measured = profile.seconds(SEQUENCES, 256), published["256"][name]
        say(f"  {name:8} predicted {found:6.1f}  measured {measured:6.1f}  {found / measured - 1:+.1%}")


def scale_profiles(
    data: Mapping[str, Any], sizes: tuple[str, ...] = ("64", "128", "256")
) -> dict[str, Profile]:
    """Each stage of GRPO 7B fitted over device counts. A pair of counts needs a third point: their own mean law."""
    published = data["grpo_7B_latency_s"]["RLinf_temporal"]
    tokens = data["grpo_qwen25_tokens_per_s"]["7B"]["RLinf_temporal"]["64"] * published["64"]["total"]
    shape = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260}).scaled(tokens / SEQUENCES, 28672)
    made = {}
    for name, stage in SCALE.items():
        points = [Point(SEQUENCES, int(size), published[size][name]) for size in sizes]
        template = Profile(stage, item_s=1.0, lengths=shape if stage == "generate" else None)
        made[name] = fit(template, points + points[: max(0, 3 - len(points))])
    return made


def search_seconds(data: Mapping[str, Any], devices: int, repetitions: int) -> float:
    """Median CPU seconds of a search on one core: the slower of the built-in workflows."""
    slowest = 0.0
    for workflow, profiles in workloads(data):
        times = []
        for _ in range(repetitions):
            started = time.process_time()
            plan(workflow, profiles, {"gpu": DeviceKind(devices, 80 * GIB)}, SEQUENCES, Sync(3.0, 2.0))
            times.append(time.process_time() - started)
        slowest = max(slowest, median(times))
    return slowest


def workloads(data: Mapping[str, Any]) -> list[tuple[Workflow, list[Profile]]]:
    """The built-in workflows with profiles of a 7B model, and memory that rules out some trees."""
    costs = {profile.stage: profile for profile in scale_profiles(data).values()}
    memory = {
        "generate": Memory(15 * GIB, 8 * GIB, 0.8 * GIB),
        "infer": Memory(15 * GIB, 8 * GIB, 2 * GIB, sharded_over_all=True),
        "learn": Memory(112 * GIB, 10 * GIB, 2 * GIB, sharded_over_all=True),
    }
    profiles = [
        Profile(
            stage, fixed_s=cost.fixed_s, item_s=cost.item_s, scaling_loss=cost.scaling_loss, lengths=cost.lengths,
            memory=memory[stage], load_s=3.0, offload_s=1.0,
        )
        for stage, cost in costs.items()
    ]  # fmt: skip
    score, simulate = Profile("score", item_s=0.02), Profile("simulate", fixed_s=60, item_s=0.4)
    policy = Profile("generate", fixed_s=12, item_s=2.0, memory=memory["generate"])
    return [
        (reasoning(Granularity.GROUP), [*profiles, score]),
        (embodied(), [policy, simulate, profiles[-1]]),
    ]


if __name__ == "__main__":
    main()
