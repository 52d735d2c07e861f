"""What it costs to have a cluster's engine start a fleet: `python benchmarks/clusters.py`.

For each engine a fleet is started from nothing and one run is submitted: `ENGINE_submit_s` is the time from the
command until the run's first step begins. Then all fleets stand beside each other on the same two CPU slots, and one
run at a time makes a few steps while the others are paused, by turns: so whoever else uses the machine, and the
clusters' own daemons, slow all of them alike. `ENGINE_added_share` is the median over turns of an engine's median step
over that of plain processes in the same turn, less 1; `ENGINE_added_cpu_share` the same of the CPU seconds of the
fleet's processes. A cluster that an engine needs is made before, on this machine. `slurm` is a real Slurm of one node,
which needs root. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from _harness import COMMAND, CpuUse, Fleet, emit, machine, say
from headrace.client import Client
from headrace_servicekit.rpc.addresses import outward_addresses

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.processes import mentioning, run_python  # noqa: E402
from harness.ray_cluster import ray_cluster  # noqa: E402
from harness.slurm_cluster import slurm, why_not  # noqa: E402
from harness.specs import small_spec  # noqa: E402

GOAL = 0.01
SETTLED = 2
"""Steps after each pause that are not counted."""
SERVICES = ("--rollout", "1", "--trainer", "1", "--reward", "1", "--simulator", "0")
LONGEST_S = 300
LOOK_S = 0.05


@dataclass(frozen=True)
class Standing:
    """A run on a fleet of its own. `pause` and `resume` return once it has been told; `state` asks for it."""

    files: Path
    """The fleet's data directory, which its processes name."""
    pause: Callable[[], object]
    resume: Callable[[], object]
    state: Callable[[], str]

    def steps(self) -> list[float]:
        """Seconds of each step that it has made."""
        lines = [
            json.loads(line)
            for file in self.files.glob("runs/*/metrics.jsonl")
            for line in file.read_text().splitlines()
        ]
        return [line["wall_s"] for line in lines if line["type"] == "step"]

    def begun(self) -> float:
        """When its first step began, by perf_counter."""
        self._until(1)
        return time.perf_counter() - sum(self.steps())

    def hold(self) -> None:
        """Pauses it."""
        self.pause()
        began = time.perf_counter()
        while (state := self.state()) != "PAUSED":
            self._wait(began, state)

    def made(self, count: int) -> tuple[float, float]:
        """Resumes it for so many settled steps: their median in seconds, and CPU seconds of one."""
        before = len(self.steps()) + SETTLED
        self.resume()
        self._until(before)
        use = CpuUse(lambda: mentioning(str(self.files)))
        first = len(self.steps())
        self._until(before + count)
        steps = self.steps()
        cpu_s = use.seconds() / (len(steps) - first)
        self.hold()
        return median(steps[before : before + count]), cpu_s

    def _until(self, count: int) -> None:
        began = time.perf_counter()
        while len(self.steps()) < count:
            self._wait(began, "")

    def _wait(self, began: float, state: str) -> None:
        if time.perf_counter() - began > LONGEST_S:
            raise RuntimeError(f"{self.files}: nothing for {LONGEST_S} s; its run is {state or self.state()}")
        time.sleep(LOOK_S)


Start = Callable[[Path, Mapping[str, Any]], AbstractContextManager[Standing]]
"""Starts a fleet below a folder and submits a run of this spec to it; ends it."""


@contextmanager
def processes() -> Iterator[Start]:
    """`headrace up` on this host, at the address of it that a cluster's nodes would use: so both sides encrypt."""
    address = next(iter(outward_addresses()), "127.0.0.1")

    @contextmanager
    def start(folder: Path, spec: Mapping[str, Any]) -> Iterator[Standing]:
        with (
            Fleet(*SERVICES, "--devices", "cpu:0,cpu:1", "--listen", address) as fleet,
            submitted(fleet, spec) as run,
        ):
            yield run

    yield start


@contextmanager
def ray() -> Iterator[Start]:
    """`headrace up --on ray` on a cluster of one raylet, which is there before."""
    with ray_cluster(2) as cluster:

        @contextmanager
        def start(folder: Path, spec: Mapping[str, Any]) -> Iterator[Standing]:
            files = folder / "node"
            words = ("--on", "ray", "--cpus", "2", "--node-dir", str(files), *SERVICES)
            address = {"RAY_ADDRESS": cluster.address}
            with Fleet(*words, environment=address) as fleet, submitted(fleet, spec, files) as run:
                yield run

        yield start


@contextmanager
def slurm_job() -> Iterator[Start]:
    """`headrace slurm submit` on a real Slurm of one node, which is there before."""
    if reason := why_not():
        raise SystemExit(f"--engines slurm: {reason}")
    with TemporaryDirectory(prefix="headrace-slurm-") as place, slurm(Path(place), "n1") as cluster:

        @contextmanager
        def start(folder: Path, spec: Mapping[str, Any]) -> Iterator[Standing]:
            file = folder / "run.yaml"
            file.write_text(yaml.safe_dump(dict(spec)))
            submit = ("slurm", "submit", str(file), "--nodes", "1", "--simulator", "0", "--json")
            job = json.loads(cluster.said(*COMMAND, *submit))
            files = Path(job["data_dir"])

            def tell(*words: str) -> str:
                return cluster.said(*COMMAND, "run", *words, "--data-dir", str(files))

            def run() -> dict[str, Any]:
                found: dict[str, Any]
                (found,) = json.loads(tell("list", "--json"))["runs"]
                return found

            yield Standing(
                files,
                lambda: tell("pause", run()["id"]),
                lambda: tell("resume", run()["id"]),
                lambda: run()["state"],
            )
            cluster.run("scancel", job["job"])

        yield start


@contextmanager
def submitted(fleet: Fleet, spec: Mapping[str, Any], files: Path | None = None) -> Iterator[Standing]:
    """A run of this spec on a fleet that is up."""
    with Client(fleet.url, fleet.token) as client:
        run = client.submit(dict(spec)).id
        yield Standing(
            files or fleet.data_dir,
            lambda: client.pause(run),
            lambda: client.resume(run),
            lambda: client.get(run).state,
        )


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
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    parser.add_argument("--turns", type=int, default=15, help="of each run")
    options = parser.parse_args()
    say(machine())
    names = list(dict.fromkeys(["process", *options.engines]))
    submits: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    with TemporaryDirectory(prefix="headrace-benchmark-") as place, ExitStack() as held:
        model = Path(place) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        starts = {name: held.enter_context(ENGINES[name]()) for name in names}
        runs: dict[str, Standing] = {}
        for name in names:
            (folder := Path(place) / name).mkdir()
            asked = time.perf_counter()
            run = runs[name] = held.enter_context(starts[name](folder, spec_of(model)))
            submits[name] = run.begun() - asked
            run.hold()
            say(f"{name}: its first step begins after {submits[name]:.1f} s")
        for turn in range(options.turns):
            for name in names[:: -1 if turn % 2 else 1]:
                wall_s, cpu_s = runs[name].made(options.steps)
                seconds[name].append(wall_s)
                cpu[name].append(cpu_s)
            say(f"turn {turn + 1}: " + ", ".join(f"{name} {seconds[name][-1]:.4f} s" for name in names))
        say(f"at the end: {machine()}")
    figures: dict[str, float | None] = {}
    for name in names:
        figures |= {f"{name}_submit_s": submits[name], f"{name}_step_s": median(seconds[name])}
        figures[f"{name}_step_cpu_s"] = median(cpu[name])
        if name != "process":
            added = figures[f"{name}_added_share"] = median_share(seconds[name], seconds["process"])
            figures[f"{name}_added_cpu_share"] = median_share(cpu[name], cpu["process"])
            say(f"{name}_added_share: {added:.4f}, {'met' if added <= GOAL else 'missed'} ({GOAL})")
    emit("clusters", figures)


def median_share(these: list[float], those: list[float]) -> float:
    """What these are more than those of the same turns, over them."""
    return median(one / other for one, other in zip(these, those, strict=True)) - 1


def spec_of(model: Path) -> dict[str, Any]:
    """A run that does not end by itself, saves only as it is paused, and shows nothing but steps."""
    return small_spec(
        model,
        steps=1_000_000,
        placement={"mode": "collocated"},
        algorithm={"prompts_per_step": 16, "group_size": 8},
        evaluation={"every": 0},
        checkpoint={"interval_steps": 0},
    )


if __name__ == "__main__":
    main()
