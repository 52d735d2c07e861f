"""What it costs to have a cluster's engine start a fleet: `python benchmarks/clusters.py`.

For each engine a fleet is started from nothing and one run is submitted: `ENGINE_submit_s` is the time from the
command until the run is RUNNING. `ENGINE_step_s` is the median of its settled steps; `ENGINE_added_share` is what the
engine adds to those of plain processes, over them. Engines take turns, on the same two CPU slots; a cluster that they
need is made before, on this machine. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from _harness import Fleet, emit, machine, say
from headrace.client import Client

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.processes import run_python  # noqa: E402
from harness.ray_cluster import ray_cluster  # noqa: E402
from harness.specs import small_spec  # noqa: E402

GOAL = 0.01
SETTLED = 5
SERVICES = ("--rollout", "1", "--trainer", "1", "--reward", "1", "--simulator", "0")
Start = Callable[[Path], AbstractContextManager[Client]]
"""Starts a fleet below a folder, and ends it."""


@contextmanager
def processes() -> Iterator[Start]:
    """`headrace up` on this host."""

    @contextmanager
    def start(folder: Path) -> Iterator[Client]:
        with Fleet(*SERVICES, "--devices", "cpu:0,cpu:1") as fleet, Client(fleet.url, fleet.token) as client:
            yield client

    yield start


@contextmanager
def ray() -> Iterator[Start]:
    """`headrace up --on ray` on a cluster of one raylet, which is there before."""
    with ray_cluster(2) as cluster:

        @contextmanager
        def start(folder: Path) -> Iterator[Client]:
            words = ("--on", "ray", "--cpus", "2", "--node-dir", str(folder / "node"), *SERVICES)
            with Fleet(*words, environment={"RAY_ADDRESS": cluster.address}) as fleet:
                with Client(fleet.url, fleet.token) as client:
                    yield client

        yield start


ENGINES: dict[str, Callable[[], AbstractContextManager[Start]]] = {"process": processes, "ray": ray}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=[*ENGINES], help="process is always one"
    )
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--turns", type=int, default=2, help="fleets of each engine")
    options = parser.parse_args()
    say(machine())
    names = list(dict.fromkeys(["process", *options.engines]))
    submits: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    with TemporaryDirectory(prefix="headrace-benchmark-") as place, ExitStack() as clusters:
        model = Path(place) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        starts = {name: clusters.enter_context(ENGINES[name]()) for name in names}
        for turn in range(options.turns):
            for name in names[:: -1 if turn % 2 else 1]:
                folder = Path(place) / f"{turn}-{name}"
                folder.mkdir()
                submitted, settled = measured(starts[name], folder, model, options.steps)
                submits[name].append(submitted)
                steps[name] += settled
                say(
                    f"turn {turn + 1}, {name}: RUNNING after {submitted:.1f} s, {median(settled):.4f} s a step"
                )
    figures: dict[str, float | None] = {}
    plain = median(steps["process"])
    for name in names:
        figures |= {f"{name}_submit_s": median(submits[name]), f"{name}_step_s": median(steps[name])}
        if name != "process":
            added = figures[f"{name}_added_share"] = median(steps[name]) / plain - 1
            say(f"{name}_added_share: {added:.4f}, {'met' if added <= GOAL else 'missed'} ({GOAL})")
    say(f"at the end: {machine()}")
    emit("clusters", figures)


def measured(start: Start, folder: Path, model: Path, count: int) -> tuple[float, list[float]]:
    """Seconds until a run on a new fleet is RUNNING, and those of its settled steps."""
    began = time.perf_counter()
    with start(folder) as client:
        spec = small_spec(
            model,
            steps=count,
            placement={"mode": "collocated"},
            algorithm={"prompts_per_step": 16, "group_size": 8},
            evaluation={"every": 0},
            checkpoint={"enabled": False},
        )
        run = client.submit(spec)
        while (state := client.get(run.id).state) != "RUNNING":
            if client.get(run.id).ended:
                raise RuntimeError(f"{run.id} {state}: {client.get(run.id).reason}")
            time.sleep(0.05)
        running = time.perf_counter() - began
        ended = client.wait(run.id, 600)
        if ended.state != "SUCCEEDED":
            raise RuntimeError(f"{run.id} {ended.state}: {ended.reason}")
        return running, [step.raw["wall_s"] for step in client.metrics(run.id)][SETTLED:]


if __name__ == "__main__":
    main()
