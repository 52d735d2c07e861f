"""What running ahead saves: `python benchmarks/asynchronous.py`, measured here, and `--simulated`.

Here: `elastic.py`'s long-tailed workload on two cores. Synchronous steps in each static placement and with devices that
move, then asynchronous ones (disaggregated, a core for each side) with max_staleness 1 and 4. Each run makes the same
answers. Prints one JSON line: `async_vs_sync_here`: the fastest synchronous median step over the asynchronous one with
max_staleness 4 (`..._k1`: 1). `period_vs_ideal`: the asynchronous step over the slower side's own work in it, with
its neighbour at work beside it (`..._k1` too). `waited_share_k1`, `..._k4`: share of the time in which the trainer
waited for a tail. `--every 1` lets every group be learned from: then learning takes about as long as generating.

Simulated: 64 and 1,024 devices with the costs of published 7B runs (as in `elastic.py`) and of the published 30B
mixture of experts (`--profile`), beside the planner's fastest synchronous plan, simulated with the same lengths.
`async_speedup_N_MODEL_kK`: synchronous over asynchronous seconds; `async_predicted_error`: the worst error of the
prediction against the simulation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from _async_here import AsyncHere, figures_here
from _harness import emit, machine, say, table
from _transfers import MEASUREMENTS, load
from elastic import modes, workload
from headrace_planner import DeviceKind, PlanError, Workload, plan
from headrace_planner.asynchronous import best_period, enough_staleness
from headrace_planner.cluster import simulate
from headrace_planner.cluster.asynchronous import simulate_async
from headrace_planner.documents import PlanRequest

SIMULATED = ((64, 16), (64, 32), (64, 128), (1024, 8), (1024, 32))
"""Devices, and answers a device, of the simulated 7B runs; (64, 128) and (1024, 8) are the published batch."""
BOUNDS = (1, 2, 4)
MOE = Path(__file__).parents[1] / "examples" / "plans" / "profile_moe_30b_h100.yaml"
MOE_ITEMS = {64: 3072, 1024: 49152}
"""The published 48 answers a device."""
HERE = {
    "turns": "runs of each",
    "steps": "measured steps of a run",
    "width": "hidden size of the model",
    "layers": "its layers",
    "groups": "groups of a step",
    "size": "answers of a group",
    "every": "one group in so many has different rewards",
    "budget_s": "no turn begins that would end later",
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="simulate in place of measuring here")
    parser.add_argument(
        "--measurements", type=Path, default=MEASUREMENTS, help="published measurements, JSON"
    )
    parser.add_argument("--profile", type=Path, default=MOE, help="profile of the mixture of experts")
    parser.add_argument("--only", metavar="DEVICES", type=int, help="simulate so many devices alone")
    parser.add_argument("--iterations", type=int, default=3, help="simulated steps of each comparison")
    parser.add_argument("--seed", type=int, default=1, help="seed of the drawn lengths")
    here = AsyncHere()
    for name, what in HERE.items():
        kind = type(getattr(here, name))
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(here, name), help=what)
    options = parser.parse_args()
    say(machine())
    if not options.simulated:
        emit("asynchronous", figures_here(AsyncHere(**{name: getattr(options, name) for name in HERE})))
        return
    figures: dict[str, float] = {}
    rows, errors = [], []
    for name, work in workloads(options.measurements, options.profile, options.only):
        for row, error in compared(name, work, options.iterations, options.seed, figures):
            rows.append(row)
            errors.append(error)
    table(("workload", "synchronous, s", "k", "generate / learn", "predicted, s", "simulated, s", "speed-up",
           "waits for a tail, share of the time", "k that ends it"), rows)  # fmt: skip
    emit("asynchronous", {**figures, "async_predicted_error": max(errors)})


def workloads(measurements: Path, profile: Path, only: int | None = None) -> Iterator[tuple[str, Workload]]:
    """The 7B workloads of `elastic.py`, and the 30B mixture of experts, by name."""
    data = load(measurements)
    for devices, answers in SIMULATED:
        if only in (None, devices):
            yield f"{devices}_7b_load_{answers}", workload(data, devices, devices * answers)
    for devices, items in MOE_ITEMS.items():
        if only in (None, devices):
            yield f"{devices}_30b", moe(yaml.safe_load(profile.read_text(encoding="utf-8")), devices, items)


def moe(profile: Mapping[str, Any], devices: int, items: int) -> Workload:
    """The mixture of experts on so many devices, in groups of 16."""
    request = PlanRequest.model_validate(
        {
            "workflow": {"group_size": 16},
            "items": items,
            "profile": profile,
            "cluster": {"gpu": {"count": devices}},
        }
    )
    profiles = {made.stage: made for made in request.profile.made(16)}
    kinds = {"gpu": DeviceKind(devices)}
    return Workload(request.workflow.made(), profiles, kinds, items, request.profile.sync.made())


def compared(
    name: str, work: Workload, iterations: int, seed: int, figures: dict[str, float]
) -> Iterator[tuple[tuple[object, ...], float]]:
    """A row and the prediction's error for each bound; adds the figures."""
    synchronous = fastest(work, iterations, seed)
    for bound in BOUNDS:
        made = best_period(work, bound)
        assert made is not None
        sides = made.generating, made.learning
        found = simulate_async(work, *sides, bound, iterations, seed)
        speedup = synchronous / found.step_s
        figures[f"async_speedup_{name}_k{bound}"] = speedup
        say(f"{name}, max_staleness {bound}: {speedup:.2f}")
        yield (
            (
                name,
                f"{synchronous:.0f}",
                bound,
                f"{sides[0]} / {sides[1]}",
                f"{made.seconds:.0f}",
                f"{found.step_s:.0f}",
                f"{speedup:.2f}",
                f"{found.wait_share:.1%}",
                enough_staleness(work, *sides),
            ),
            abs(made.seconds / found.step_s - 1),
        )


def fastest(work: Workload, iterations: int, seed: int) -> float:
    """Seconds of the fastest synchronous tree of any mode, simulated."""
    seconds = []
    for _, tree in modes(work):
        try:
            seconds.append(simulate(work, tree, iterations, seed).step_s)
        except PlanError:
            continue
    return min(
        seconds or [plan(work.workflow, list(work.profiles.values()), work.devices, work.items).seconds]
    )


if __name__ == "__main__":
    main()
