"""Two runs on one machine, one core each: `python benchmarks/side_by_side.py [--turns N] [--steps N]`.

Real fleets with two rollouts and two trainers run the tiny preset: first each run alone on its own core, then both
at the same time. Prints one JSON line: `two_runs_vs_bound`, the seconds until both have ended over
max(the longer one alone, half of the CPU seconds that the whole fleet used for both), the median over the turns;
`longest_gap_vs_median`, the longest time between two steps of a run over the run's median, the worst of all runs that
shared the machine; `cores_leased_twice`, how often a look at the leases found one core in two of them; and the
seconds behind the ratio. Runs start together and include their start and end (open, warm-up, evaluation, checkpoint).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from _harness import Fleet, emit, machine, say
from headrace.client import Client, Run, load_spec

TINY = Path(__file__).parents[1] / "examples" / "tiny.yaml"
CORES = ("cpu:0", "cpu:1")
RUN_S, LOOK_S = 900.0, 0.2
GOALS = {"two_runs_vs_bound": 1.15, "longest_gap_vs_median": 5.0, "cores_leased_twice": 0}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="times to measure each alone, then both")
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model = Path(folder) / "model"
        make = [sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        specs = [make_spec(model, core, options.steps, seed) for seed, core in enumerate(CORES)]
        turns = [measure(specs) for _ in range(options.turns)]
    say(f"at the end: {machine()}")
    figures = {name: median(turn[name] for turn in turns) for name in turns[0]}
    figures["longest_gap_vs_median"] = max(turn["longest_gap_vs_median"] for turn in turns)
    figures["cores_leased_twice"] = sum(turn["cores_leased_twice"] for turn in turns)
    for name, goal in GOALS.items():
        say(f"{name}: {figures[name]:.3f} (goal at most {goal})")
    emit("side_by_side", figures)


def make_spec(model: Path, core: str, steps: int, seed: int) -> dict[str, Any]:
    """The tiny preset on one core."""
    placement = {"mode": "collocated", "rollout": [core], "trainer": [core]}
    changes = {"steps": steps, "seed": seed, "model.path": str(model), "placement": placement}
    return load_spec(TINY, changes)


def measure(specs: list[dict[str, Any]]) -> dict[str, float]:
    """Each run alone, then both; a new fleet each time, so that all begin with cold processes."""
    *alone, both = [Load(started) for started in (*([spec] for spec in specs), specs)]
    longest, half_cpu = max(load.wall_s for load in alone), both.cpu_s / 2
    say(
        f"alone {', '.join(f'{load.wall_s:.1f}' for load in alone)} s; both {both.wall_s:.1f} s, "
        f"{both.cpu_s:.1f} CPU seconds; longest gap {both.longest_gap_vs_median:.1f} medians"
    )
    return {
        "two_runs_vs_bound": both.wall_s / max(longest, half_cpu),
        "longest_gap_vs_median": both.longest_gap_vs_median,
        "cores_leased_twice": float(both.cores_leased_twice),
        "both_s": both.wall_s,
        "longer_alone_s": longest,
        "half_cpu_s": half_cpu,
    }


class Load:
    """Runs specs at the same time; what that took. RuntimeError when one does not succeed."""

    def __init__(self, specs: list[dict[str, Any]]) -> None:
        self.cores_leased_twice = 0
        wide = Fleet("--rollout", "2", "--trainer", "2", "--simulator", "0")
        with wide as fleet, Client(fleet.url, fleet.token) as client:
            launcher = psutil.Process(fleet.ready["launcher_pid"])
            before, started = cpu_seconds(launcher), time.monotonic()
            runs = self._wait(client, [client.submit(spec) for spec in specs])
            self.wall_s, self.cpu_s = time.monotonic() - started, cpu_seconds(launcher) - before
            self.longest_gap_vs_median = max(longest_gap(client, run) for run in runs)

    def _wait(self, client: Client, runs: list[Run]) -> list[Run]:
        deadline = time.monotonic() + RUN_S
        while not all(run.ended for run in runs) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            cores = [device for lease in client.leases().leases for device in lease.devices]
            self.cores_leased_twice += len(cores) != len(set(cores))
            runs = [run if run.ended else client.get(run.id) for run in runs]
        for run in runs:
            if run.state != "SUCCEEDED":
                raise RuntimeError(f"{run.name} is {run.state}: {run.reason}")
        return runs


def cpu_seconds(launcher: psutil.Process) -> float:
    """User and system time of a fleet's living processes and of their children that have ended."""
    total = 0.0
    for process in (launcher, *launcher.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def longest_gap(client: Client, run: Run) -> float:
    """The longest time between two steps over the median one."""
    ends = [event.time for event in client.events(run.id) if event.type == "step_committed"]
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    return max(gaps) / median(gaps)


if __name__ == "__main__":
    main()
