"""What it costs to have a cluster's engine start a fleet: `python benchmarks/clusters.py`.

For each engine a fleet is started from nothing and one run is submitted: `ENGINE_submit_s` is the time from the
command until the run's first step begins. `ENGINE_step_s` is the median of its settled steps; `ENGINE_added_share` is
what the engine adds to those of plain processes, over them. Engines take turns, on the same two CPU slots; a cluster
that they need is made before, on this machine. `slurm` is a real Slurm of one node, which needs root. Prints one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from _harness import COMMAND, Fleet, emit, machine, say
from headrace.client import Client

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from clusters.slurm_nodes import slurm, why_not  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.ray_cluster import ray_cluster  # noqa: E402
from harness.specs import small_spec  # noqa: E402

GOAL = 0.01
SETTLED = 5
SERVICES = ("--rollout", "1", "--trainer", "1", "--reward", "1", "--simulator", "0")
LONGEST_S = 600
LOOK_S = 0.05
Steps = Callable[[], list[float]]
"""Seconds of each step that a run has made so far. Raises RuntimeError where the run has failed."""
Start = Callable[[Path, Mapping[str, Any]], AbstractContextManager[Steps]]
"""Starts a fleet below a folder and submits a run of this spec to it; ends it."""


@contextmanager
def processes() -> Iterator[Start]:
    """`headrace up` on this host."""

    @contextmanager
    def start(folder: Path, spec: Mapping[str, Any]) -> Iterator[Steps]:
        with Fleet(*SERVICES, "--devices", "cpu:0,cpu:1") as fleet, submitted(fleet, spec) as steps:
            yield steps

    yield start


@contextmanager
def ray() -> Iterator[Start]:
    """`headrace up --on ray` on a cluster of one raylet, which is there before."""
    with ray_cluster(2) as cluster:

        @contextmanager
        def start(folder: Path, spec: Mapping[str, Any]) -> Iterator[Steps]:
            words = ("--on", "ray", "--cpus", "2", "--node-dir", str(folder / "node"), *SERVICES)
            address = {"RAY_ADDRESS": cluster.address}
            with Fleet(*words, environment=address) as fleet, submitted(fleet, spec) as steps:
                yield steps

        yield start


@contextmanager
def slurm_job() -> Iterator[Start]:
    """`headrace slurm submit` on a real Slurm of one node, which is there before."""
    if reason := why_not():
        raise SystemExit(f"--engines slurm: {reason}")
    with TemporaryDirectory(prefix="headrace-slurm-") as place, slurm(Path(place), "n1") as cluster:

        @contextmanager
        def start(folder: Path, spec: Mapping[str, Any]) -> Iterator[Steps]:
            file = folder / "run.yaml"
            file.write_text(yaml.safe_dump(dict(spec)))
            job = json.loads(
                cluster.said(
                    *COMMAND, "slurm", "submit", str(file), "--nodes", "1", "--simulator", "0", "--json"
                )
            )

            def steps() -> list[float]:
                if (state := cluster.job(job["job"])["JobState"]) == "FAILED":
                    raise RuntimeError(f"job {job['job']} {state}: {Path(job['log']).read_text()}")
                files = Path(job["data_dir"]).glob("runs/*/metrics.jsonl")
                lines = [json.loads(line) for found in files for line in found.read_text().splitlines()]
                return [line["wall_s"] for line in lines if line["type"] == "step"]

            yield steps
            cluster.run("scancel", job["job"])

        yield start


@contextmanager
def submitted(fleet: Fleet, spec: Mapping[str, Any]) -> Iterator[Steps]:
    """A run of this spec on a fleet that is up."""
    with Client(fleet.url, fleet.token) as client:
        run = client.submit(dict(spec))

        def steps() -> list[float]:
            if (now := client.get(run.id)).state == "FAILED":
                raise RuntimeError(f"{run.id}: {now.reason}")
            return [step.raw["wall_s"] for step in client.metrics(run.id)]

        yield steps


ENGINES: dict[str, Callable[[], AbstractContextManager[Start]]] = {
    "process": processes,
    "ray": ray,
    "slurm": slurm_job,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["ray"], help="beside process")
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
                began, settled = measured(starts[name], folder, model, options.steps)
                submits[name].append(began)
                steps[name] += settled
                say(f"turn {turn + 1}, {name}: begins after {began:.1f} s, {median(settled):.4f} s a step")
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
    """Seconds until the first step of a run on a new fleet begins, and those of its settled steps."""
    spec = small_spec(
        model,
        steps=count,
        placement={"mode": "collocated"},
        algorithm={"prompts_per_step": 16, "group_size": 8},
        evaluation={"every": 0},
        checkpoint={"enabled": False},
    )
    asked = time.perf_counter()
    with start(folder, spec) as steps:
        while not (found := steps()):
            wait(asked)
        began = time.perf_counter() - asked - sum(found)
        while len(found := steps()) < count:
            wait(asked)
        return began, found[SETTLED:]


def wait(asked: float) -> None:
    """A little. Raises RuntimeError after LONGEST_S."""
    if time.perf_counter() - asked > LONGEST_S:
        raise RuntimeError(f"the run has not made its steps within {LONGEST_S} s")
    time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
