"""The simulated cluster against published measurements: `python benchmarks/simulator.py`.

Timelines: two published runs have times within a step: the pipelined mixture of experts (rollout's end, training's
begin and end) and the pipelined PPO (ends of rollout and training). The inputs are the stages' seconds in another mode,
as in the transfers of `planner.py`, with the same assumptions; the lengths are drawn. When training begins is shown and
not counted: it is near 0. Transfers: all cases of `planner.py`, simulated instead of predicted.

Prints one JSON line: `step_error_moe`, `step_error_ppo`, `rollout_end_error_moe`, `rollout_end_error_ppo` (means of the
absolute relative errors over the inputs), `mean_error_transfers_simulated`, `worst_error_transfers_simulated`,
`rankings_right_simulated`, and `simulated_vs_predicted` (mean absolute relative distance over all transfers).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from _harness import emit, machine, say, table
from _transfers import ASSUMPTIONS, MEASUREMENTS, Case, Values, cases, load, values_of
from headrace_planner import Workload
from headrace_planner.cluster import Label, simulate

COLUMNS = (
    "case",
    "rollout ends",
    "published",
    "training begins",
    "published",
    "step",
    "published",
    "predicted",
)


@dataclass(frozen=True)
class Ends:
    """Seconds from a step's begin: rollout's end, training's begin (if known) and end."""

    rollout: float
    begin: float | None
    end: float


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10, help="steps to simulate of each case")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn lengths")
    options = parser.parse_args()
    say(machine())
    data, values = load(MEASUREMENTS), values_of(load(ASSUMPTIONS))
    rows: list[tuple[object, ...]] = []
    errors: dict[str, list[tuple[float, float]]] = {"moe": [], "ppo": []}
    for kind, case, published in timelines(data):
        found, predicted = simulated(case, values, options.iterations, options.seed), case.predict(values)
        errors[kind].append((found.rollout / published.rollout - 1, found.end / published.end - 1))
        begin = "-" if published.begin is None else f"{published.begin:.0f}"
        rows.append(
            (case.name, f"{found.rollout:.1f}", published.rollout, f"{found.begin:.1f}", begin,
             f"{found.end:.1f}", published.end, f"{predicted:.1f}")
        )  # fmt: skip
    table(COLUMNS, rows)
    figures = transfers(data, values, options.iterations, options.seed)
    for kind, pairs in errors.items():
        figures[f"rollout_end_error_{kind}"] = mean(abs(rollout) for rollout, _ in pairs)
        figures[f"step_error_{kind}"] = mean(abs(end) for _, end in pairs)
    emit("simulator", figures)


def timelines(data: Mapping[str, Any]) -> Iterator[tuple[str, Case, Ends]]:
    """The transfers whose published target has times within a step."""
    moe, ppo = (
        data["moe_32gpu_latency_s"]["RLinf_spatial"],
        data["ppo_7B_32gpu_latency_s"]["spatial_end_times"],
    )
    for case in cases(data):
        if case.name.endswith("→ RLinf_spatial"):
            yield "moe", case, Ends(moe["rollout_end"], moe["train_start"], moe["train_end"])
        if case.name.startswith("PPO"):
            yield "ppo", case, Ends(ppo["rollout"], None, ppo["train"])


def transfers(data: Mapping[str, Any], values: Values, iterations: int, seed: int) -> dict[str, float]:
    """Errors and rankings of all transfers when they are simulated."""
    found = [(case, simulated(case, values, iterations, seed).end) for case in cases(data)]
    errors = [abs(end / case.measured - 1) for case, end in found if case.counted]
    ranks = [
        all((end < other) == (case.measured < other) for other in case.beside.values()) for case, end in found
    ]
    return {
        "mean_error_transfers_simulated": mean(errors),
        "worst_error_transfers_simulated": max(errors),
        "rankings_right_simulated": mean(ranks),
        "simulated_vs_predicted": mean(
            abs(end / case.predict(values) - 1) for case, end in found if case.counted
        ),
    }


def simulated(case: Case, values: Values, iterations: int, seed: int) -> Ends:
    """Mean times of simulated steps."""
    made = case.setting(values)
    profiles = {profile.stage: profile for profile in made.profiles}
    work = Workload(made.workflow, profiles, made.cluster, made.items, made.sync)
    rollout = begin = end = 0.0
    for number in range(iterations):
        found = simulate(work, made.tree, 1, seed + number)
        spans = found.timeline.spans
        rollout += max(span.end for span in spans if span.label is Label.DECODE)
        begin += min(span.begin for span in spans if span.label is Label.TRAIN)
        end += found.step_s
    return Ends(rollout / iterations, begin / iterations, end / iterations)


if __name__ == "__main__":
    main()
