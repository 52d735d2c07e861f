"""What the coordinator keeps of what is past: `python benchmarks/growth.py [--slots N]`; `--runs 100`: every service.

A coordinator in a process of its own, with the embedded store, works with imaginary instances behind real gRPC
servers; eight runs follow each other, in steps of 128 slots. Prints one JSON line: `bytes_per_slot` (slope of the
coordinator's resident set from a fifth of the slots on), `store_bytes_per_slot` (the same of the store's
`used_memory`), `coordinator_us_per_slot` (CPU time), `certificates_ms` (a page of 50, the slowest of the first, a
middle and the last one), `run_ms` (a run's view) and `restart_s` (SIGKILL to an answer over HTTP).

With `--runs`, so many small runs (forks, robots and data sets of their own among them) follow each other on a real
fleet: `SERVICE_growth` is a service's resident set after the last run over that after the tenth, `worst_growth` the
largest of these, and `runs` how many there were: no run begins after `--within` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import redis
from _growth_runs import FIRST, growth_of
from _harness import emit, free_port, machine, say
from headrace_cli.launcher.store import store_command, store_url

RUNS = 8
GROUP_SIZE, PROMPTS = 8, 16
SLOTS_A_STEP = GROUP_SIZE * PROMPTS
SETTLED = 0.2  # of the slots: before, caches fill and the heap finds its size
LOOK_S = 0.5
START_S = 30.0
GOALS = {
    "bytes_per_slot": 8.0,
    "restart_s": 5.0,
    "certificates_ms": 50.0,
    "run_ms": 50.0,
    "store_bytes_per_slot": 8.0,
    "coordinator_us_per_slot": 80.0,
}
Sample = tuple[int, int, int, float]


class System:
    """Store, coordinator and instances, in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "store.sock"
        self._http, self._grpc = free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._store = redis.Redis.from_url(store_url(self._socket))

    def start(self) -> None:
        """Starts everything; returns when the coordinator answers."""
        self._spawn("store", store_command(self._directory / "store", self._socket))
        self.coordinator = self._coordinate()
        self._wait()
        script = str(Path(__file__).parent / "_growth_instances.py")
        self._spawn("instances", [sys.executable, script, f"127.0.0.1:{self._grpc}"])

    def _spawn(self, name: str, command: list[str]) -> int:
        """Starts a process, whose words go to a file; returns its id."""
        with (self._directory / f"{name}.log").open("ab") as words:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
        self._processes[name] = process
        return process.pid

    def _coordinate(self) -> psutil.Process:
        command = [sys.executable, "-m", "headrace_coordinator", "--log-level", "warning"]
        command += ["--listen", f"127.0.0.1:{self._grpc}", "--http", f"127.0.0.1:{self._http}"]
        command += [
            "--redis",
            store_url(self._socket),
            "--data-dir",
            str(self._directory / "data"),
            "--no-token",
        ]
        return psutil.Process(self._spawn("coordinator", command))

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.get("/v1/runs?page_size=1")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise RuntimeError((self._directory / "coordinator.log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def restart(self) -> float:
        """Seconds from a SIGKILL of the coordinator to an answer of the next."""
        killed = self._processes["coordinator"]
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        started = time.perf_counter()
        self.coordinator = self._coordinate()
        self._wait()
        return time.perf_counter() - started

    def get(self, path: str, body: object = None) -> Any:
        """A request's answer."""
        return json.loads(self.fetch(path, body))

    def fetch(self, path: str, body: object = None) -> bytes:
        """A request's answer as it came: reading 10⁵ bytes of JSON costs this process as much as its request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._http}{path}", data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
            return found

    def sample(self, slots: int) -> Sample:
        """(slots, resident bytes, the store's bytes, CPU seconds) now."""
        times = self.coordinator.cpu_times()
        used: int = self._store.info("memory")["used_memory"]
        return slots, self.coordinator.memory_info().rss, used, times.user + times.system

    def end(self) -> None:
        """Kills everything."""
        for process in self._processes.values():
            process.kill()
            process.wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=1_000_000, help="slots over all runs")
    parser.add_argument("--runs", type=int, help="small runs on a real fleet instead; more than ten")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for --runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    say(machine())
    if options.runs is not None:
        if options.runs <= FIRST:
            parser.error(f"--runs: more than {FIRST}")
        emit("growth", growth_of(options.runs, options.within))
        return
    with tempfile.TemporaryDirectory(prefix="headrace-growth-") as directory:
        system = System(Path(directory))
        try:
            system.start()
            figures = measure(system, max(1, options.slots // SLOTS_A_STEP // RUNS))
        finally:
            system.end()
    missed = [name for name, goal in GOALS.items() if figures[name] >= goal]
    say(f"missed: {', '.join(missed)}" if missed else "all goals are met")
    emit("growth", figures)


def measure(system: System, steps: int) -> dict[str, float]:
    """All figures of RUNS runs of so many steps."""
    samples: list[Sample] = []
    name = ""
    for number in range(RUNS):
        name = submit(system, steps)
        follow(system, name, number * steps * SLOTS_A_STEP, samples)
        say(f"run {number + 1} of {RUNS}: {samples[-1][0]} slots, {samples[-1][1] / 1e6:.1f} MB")
    settled = [each for each in samples if each[0] >= SETTLED * samples[-1][0]]
    slots = settled[-1][0] - settled[0][0]
    places = sorted({-1, max(-1, steps // 2 - 25), max(-1, steps - 51)})
    pages = [f"/v1/runs/{name}/certificates?page_size=50" + _token(place) for place in places]
    return {
        "bytes_per_slot": slope([each[0] for each in settled], [each[1] for each in settled]),
        "store_bytes_per_slot": slope([each[0] for each in settled], [each[2] for each in settled]),
        "coordinator_us_per_slot": 1e6 * (settled[-1][3] - settled[0][3]) / slots,
        "certificates_ms": max(milliseconds(lambda: system.fetch(page)) for page in pages),  # noqa: B023
        "run_ms": milliseconds(lambda: system.fetch(f"/v1/runs/{name}")),
        "restart_s": system.restart(),
        "slots": samples[-1][0],
        "resident_mb": samples[-1][1] / 1e6,
    }


def _token(place: int) -> str:
    return f"&page_token={place}" if place >= 0 else ""


def submit(system: System, steps: int) -> str:
    """Submits a run, once the fleet can run it; returns its id."""
    spec = make_spec(steps)
    deadline = time.monotonic() + START_S
    while True:
        try:
            name: str = system.get("/v1/runs", spec)["id"]
            return name
        except urllib.error.HTTPError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(error.read().decode()) from error
            time.sleep(0.2)


def make_spec(steps: int) -> dict[str, Any]:
    """A run that evaluates nothing and saves now and then."""
    return {
        "name": "growth",
        "steps": steps,
        "model": {"path": "imaginary"},
        "data": {"source": "copy_digits", "options": {"digits": 1}, "heldout": 2},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": PROMPTS},
        "reward": {"scorers": [{"name": "exact"}]},
        "placement": {"mode": "disaggregated"},
        "checkpoint": {"interval_steps": 100},
        "evaluation": {"every": 0},
    }


def follow(system: System, name: str, before: int, samples: list[Sample]) -> None:
    """Samples until the run has ended; RuntimeError when it does not succeed."""
    while True:
        view = system.get(f"/v1/runs/{name}")
        samples.append(system.sample(before + view["step"] * SLOTS_A_STEP))
        if view["state"] == "SUCCEEDED":
            return
        if view["state"] in ("FAILED", "CANCELLED"):
            raise RuntimeError(f"run {name} ended {view['state']}: {view['reason']}")
        time.sleep(LOOK_S)


def slope(x: list[int], y: list[int]) -> float:
    """Least squares."""
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle_x) ** 2 for each in x)
    together = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return together / spread if spread else 0.0


def milliseconds(action: Callable[[], object]) -> float:
    """Median of nine."""
    found = []
    for _ in range(9):
        started = time.perf_counter()
        action()
        found.append(1000 * (time.perf_counter() - started))
    return median(found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
