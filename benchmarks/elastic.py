"""What moving devices inside a step saves: `python benchmarks/elastic.py`, simulated, and `--here`, measured.

Simulated: a 7B model with a long tail of output lengths. The costs of its stages are fitted to published GRPO runs
(`data/published_measurements.json`, collocated, 64 to 256 GPUs); the tail has the published shape. What is not
published is listed when the script starts. Static: the fastest, simulated, of the planner's best trees of every mode
on the same devices. Elastic: the same devices with the policy of `headrace_planner.elastic`, over the tree
that is best with another seed. Both draw the same lengths. Helpers pay for their weights and gradient over the link.

Prints one JSON line. `elastic_speedup_N_load_Q`: N devices, Q answers a device, helpers of eight devices (a host);
`..._single_N_load_Q`: of one. `elastic_bound_N_load_Q`: static over what no policy can beat (`_elastic_bound.least`);
`elastic_ideal_N_load_Q`: over the longer of all work spread over all devices and generation alone on all of them.
`elastic_speedup_N` is that of the load whose generation comes nearest to the 260 s of the published tail's run.
`simulate_s_1024`: CPU seconds of ten static steps.

With `--here` a real fleet on two cores runs steps with a tail of that shape in each static mode (collocated, pipelined,
hybrid), and with devices that move: `elastic turns` (collocated, a helper in the tail) and `elastic apart` (each side
has a core, and works on the other's at the step's begin and end). `elastic_speedup_here`: the median step of the
fastest static mode over that of the faster elastic one. `simulated_vs_measured_error`: the simulated cluster with what
the static runs say of themselves against what was measured, for the fastest elastic mode and the faster of collocated
and pipelined, the worse. `elastic_bound_here`: the simulated static step over what no policy can beat. `switch_s` is
`lease_switch.py`'s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from _elastic_bound import ideal, least
from _elastic_here import Here, figures_here
from _harness import emit, machine, say, table
from _transfers import MEASUREMENTS, load
from headrace_planner import (
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    Node,
    PlanError,
    Point,
    Profile,
    Shapes,
    Share,
    Split,
    Sync,
    Workflow,
    Workload,
    fit,
    plan,
)
from headrace_planner.cluster import simulate, simulate_elastic
from headrace_planner.cluster.sampling import draw
from headrace_planner.elastic.outlook import MoveCosts
from headrace_planner.explaining import ALTERNATIVES

PUBLISHED = 512 * 16
SMALLEST = 64
"""Devices of the smallest published trainer group."""
FITTED = ("64", "128", "256")
LOADS = {64: (8, 16, 24, 32, 48, 64, 128), 1024: (8, 16, 24, 32, 48)}
NEAREST = 32
"""Answers a device whose generation comes nearest to the 260 s of the published tail's run, of those above."""
HELPERS = (1, 8)
"""Devices of a helper."""
SYNC = Sync(between_s=3, same_s=2)
OWNERS = (2, 4, 8)
"""Trainer groups that elastic steps are tried with: these parts of the devices, or all of them in turns."""
HERE = {
    "turns": "runs of each mode, if they end in time",
    "steps": "measured steps of a run",
    "width": "hidden size of the model",
    "layers": "its layers",
    "groups": "groups of a step",
    "size": "answers of a group",
    "alike": "1: answers of a group are alike in length; 0: independent",
    "every": "one group in so many has different rewards, so that there is something to learn",
    "budget_s": "no turn begins that would end later",
}
"""Options of what is measured here."""
ASSUMED = """not published, and assumed (one value, not chosen by the result):
  link 50e9 bytes/s a device (400 Gb/s); a helper loads 14e9 bytes (bf16) and sends 28e9 (fp32 gradient)
  a helper's devices learn as those of a trainer group of 64, the smallest published; whole groups of 16 answers
  notice 1 s; a moved answer's cache is computed again at the pace of the published log-prob stage
  load and offload: generate 3 and 1 s, learn 4 and 3 s; weight sync 3 s to other devices, 2 s on the same
  memory limits neither side, so that static modes and elastic ones may keep both stages loaded
  answers of a group are alike in length (group_correlation 1, as in planner_assumptions.json)
  no log-prob stage; scoring is free
  a move saves at least 2% of the rest of the step, and comes 10 s after the last one"""


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step: static and its mode, elastic and its tree by devices of a helper, and two bounds."""

    static: tuple[float, str]
    elastic: dict[int, tuple[float, str]]
    ideal_s: float
    bound_s: float

    def speedup(self, helper: int) -> float:
        """Static over elastic with helpers of so many devices."""
        return self.static[0] / self.elastic[helper][0]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measurements", type=Path, default=MEASUREMENTS, help="published measurements, JSON"
    )
    parser.add_argument("--iterations", type=int, default=2, help="steps of each comparison")
    parser.add_argument("--seed", type=int, default=1, help="seed of the drawn lengths")
    parser.add_argument(
        "--only", metavar="DEVICESxANSWERS", action="append", help="simulate such as 1024x32 alone"
    )
    parser.add_argument(
        "--slow-helpers",
        action="store_true",
        help="helpers learn no faster than one trainer group of all devices that learn",
    )
    parser.add_argument(
        "--here", action="store_true", help="measure on this machine in place of the simulation"
    )
    here = Here()
    for name, what in HERE.items():
        kind = type(getattr(here, name))
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=getattr(here, name), help=f"{what}, with --here"
        )
    options = parser.parse_args()
    say(machine())
    if options.here:
        emit("elastic", figures_here(Here(**{name: getattr(options, name) for name in HERE})))
        return
    say(ASSUMED)
    data, figures, rows = load(options.measurements), {}, []
    costs = move_costs(data)
    if options.slow_helpers:
        costs = replace(costs, helper_item_s=0.0)
    for devices, loads in LOADS.items():
        for answers in loads:
            if options.only and f"{devices}x{answers}" not in options.only:
                continue
            found = compare(data, devices, answers * devices, options.iterations, options.seed, costs)
            at = f"{devices}_load_{answers}"
            figures[f"elastic_speedup_{at}"] = found.speedup(HELPERS[-1])
            figures[f"elastic_speedup_single_{at}"] = found.speedup(HELPERS[0])
            figures[f"elastic_bound_{at}"] = found.static[0] / found.bound_s
            figures[f"elastic_ideal_{at}"] = found.static[0] / found.ideal_s
            rows.append(row(devices, answers, found))
            say(f"{devices} devices, {answers} answers a device: {found.speedup(HELPERS[-1]):.3f}")
            if answers == NEAREST:
                figures[f"elastic_speedup_{devices}"] = found.speedup(HELPERS[-1])
    table(
        ("devices", "answers a device", "static, s", "mode", "elastic, s", "over", "speed-up", "helpers of 1",
         "bound", "ideal"),
        rows,
    )  # fmt: skip
    figures["simulate_s_1024"] = simulate_seconds(data, options.seed)
    emit("elastic", dict(sorted(figures.items())))


def row(devices: int, answers: int, found: Comparison) -> tuple[object, ...]:
    """One comparison for the reader."""
    (static_s, mode), (elastic_s, over) = found.static, found.elastic[HELPERS[-1]]
    ratios = (
        *(found.speedup(size) for size in reversed(HELPERS)),
        static_s / found.bound_s,
        static_s / found.ideal_s,
    )
    published = " (published batch)" if answers * devices == PUBLISHED else ""
    seconds = f"{static_s:.0f}", mode, f"{elastic_s:.0f}", over
    return devices, f"{answers}{published}", *seconds, *(f"{ratio:.2f}" for ratio in ratios)


def compare(
    data: Mapping[str, Any], devices: int, items: int, iterations: int, seed: int, costs: MoveCosts
) -> Comparison:
    """The fastest static mode and the elastic policy, with the same drawn lengths."""
    work = workload(data, devices, items)
    static = min((simulate(work, tree, iterations, seed).step_s, name) for name, tree in modes(work))
    both = resident(work)
    trees = dict(elastic_trees(devices))
    elastic: dict[int, tuple[float, str]] = {}
    for size in HELPERS:
        tried = {
            name: simulate_elastic(both, tree, costs, 1, seed + 1000, size).step_s
            for name, tree in trees.items()
        }
        best = min(tried, key=lambda name: tried[name])
        elastic[size] = simulate_elastic(both, trees[best], costs, iterations, seed, size).step_s, best
    drawn = [draw(work, seed, iteration) for iteration in range(iterations)]
    bounds = [fmean(bound(work, each, costs.helper_item_s) for each in drawn) for bound in (ideal, least)]
    return Comparison(static, elastic, *bounds)


def resident(work: Workload) -> Workload:
    """Memory limits neither side: both stages stay loaded on all devices, as in the fastest static modes."""
    loaded = {stage: replace(profile, load_s=0.0, offload_s=0.0) for stage, profile in work.profiles.items()}
    return replace(work, profiles=loaded)


def modes(work: Workload) -> Iterator[tuple[str, Node]]:
    """The planner's best tree of all, and of each mode."""
    for name, shapes in {"auto": Shapes(), **ALTERNATIVES}.items():
        try:
            found = plan(
                work.workflow, list(work.profiles.values()), work.devices, work.items, work.sync, shapes
            )
        except PlanError:
            continue
        yield name, found.tree


def elastic_trees(devices: int) -> Iterator[tuple[str, Node]]:
    """Trees that devices move in: one trainer group on all devices, or on a part of its own."""
    yield "collocated", Share((Leaf("generate", "gpu", devices), Leaf("learn", "gpu", devices)))
    for part in OWNERS:
        own = devices // part
        sides = Leaf("generate", "gpu", devices - own), Leaf("learn", "gpu", own)
        yield f"{own} owners apart", Split(*sides, chunks=16)


def workload(data: Mapping[str, Any], devices: int, items: int) -> Workload:
    """GRPO of a 7B model: generate → learn in groups of 16."""
    published = data["grpo_7B_latency_s"]["RLinf_temporal"]
    tail = data["rollout_cdf_7B_64gpu_s"]
    lengths = Lengths.from_quantiles(
        {0.5: tail["p50"], 0.9: tail["p90"], 0.95: tail["p95"], 1: tail["max"]}, group_correlation=1.0
    )
    generate = Profile("generate", item_s=1, lengths=lengths, load_s=3, offload_s=1)
    learn = Profile("learn", item_s=1, load_s=4, offload_s=3)
    profiles = {
        stage: fit(template, [Point(PUBLISHED, int(size), published[size][name]) for size in FITTED])
        for stage, template, name in (("generate", generate, "rollout"), ("learn", learn, "train"))
    }
    edges = (Edge("generate", "learn", Granularity.GROUP),)
    workflow = Workflow("grpo", ("generate", "learn"), edges, (("learn", "generate"),), group_size=16)
    return Workload(workflow, profiles, {"gpu": DeviceKind(devices)}, items, SYNC)


def move_costs(data: Mapping[str, Any]) -> MoveCosts:
    """What moves cost; see ASSUMED."""
    logprob = data["grpo_7B_latency_s"]["RLinf_temporal"]["64"]["logprob"]
    return MoveCosts(
        notice_s=1.0,
        weight_bytes=14e9,
        gradient_bytes=28e9,
        link_bytes_per_s=50e9,
        helper_item_s=workload(data, SMALLEST, SMALLEST).profiles["learn"].seconds(SMALLEST, SMALLEST),
        resume_item_s=logprob * 64 / PUBLISHED,
    )


def simulate_seconds(data: Mapping[str, Any], seed: int) -> float:
    """CPU seconds of ten simulated steps of the planner's tree at 1,024 devices."""
    work = workload(data, 1024, PUBLISHED)
    tree = next(modes(work))[1]
    started = time.process_time()
    simulate(work, tree, 10, seed)
    return time.process_time() - started


if __name__ == "__main__":
    main()
