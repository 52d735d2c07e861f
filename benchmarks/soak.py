"""Hours of runs under random kills: `python benchmarks/soak.py --minutes 120` (`make soak`).

One fleet trains small runs, one after the other, while a process chosen at random is killed every few seconds; each run
must succeed with no slot trained twice, and then its files are deleted. What must not grow is looked at after each run:
memory, descriptors and threads of the processes that live through it (launcher; coordinator and store between their
own kills), and the data directory but for logs and the audit, which rotate; the store's own file has a bound. Prints
one JSON line: `runs`, `steps`, `kills`, `store_mib` and `..._growth`: the median of the last third over that of the
second third. `--check` fails above `MOST`; where a run fails, that line comes first. `--log FILE` gets a JSON line
after each run: what was looked at, the load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
from _harness import emit, machine, say

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.fleet import Fleet  # noqa: E402
from harness.ledger import audit  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.specs import small_spec  # noqa: E402

KILLED = ("rollout-0", "trainer-0", "reward-0", "coordinator", "store")
LIVING = ("launcher", "coordinator", "store")
MOST = {"memory": 1.15, "descriptors": 1.1, "threads": 1.1, "disk": 1.15}
MOST_STORE_MIB = 256.0
"""The store's file is rewritten once it has doubled beyond 64 MiB."""
RUN_STEPS = 8


class Looks:
    """What was measured after each run, by figure."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {name: [] for name in MOST}
        self.store_mib = 0.0

    def look(self, fleet: Fleet) -> None:
        """The sum over the living processes, and the size of the data directory."""
        processes = [fleet.process(name) for name in LIVING]
        self.found["memory"].append(sum(each.memory_full_info().uss for each in processes))
        self.found["descriptors"].append(sum(each.num_fds() for each in processes))
        self.found["threads"].append(sum(each.num_threads() for each in processes))
        self.found["disk"].append(_bytes(fleet.data_dir, {"logs", "redis", "audit"}))
        self.store_mib = _bytes(fleet.data_dir / "redis", set()) / 2**20

    def growth(self) -> dict[str, float]:
        """By figure, of the last third over the second one."""
        return {name: growth(values) for name, values in self.found.items()}


def _bytes(folder: Path, but: set[str]) -> float:
    """Of the files below a folder; one may be gone before it is looked at."""
    total = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in but]
        for name in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return float(total)


def growth(values: Sequence[float]) -> float:
    """The median of the last third over that of the second third; 1 for less than six values."""
    third = len(values) // 3
    if third < 2:
        return 1.0
    return median(values[-third:]) / median(values[third : 2 * third])


class Killer(threading.Thread):
    """Kills one process after another; seeded. `rests` keeps it from that while others look."""

    def __init__(self, fleet: Fleet, seed: int, gap_s: float) -> None:
        super().__init__(daemon=True)
        self._fleet, self._random, self._gap_s = fleet, random.Random(seed), gap_s
        self._ended = threading.Event()
        self.rests = threading.Lock()
        self.kills = 0

    def run(self) -> None:
        """Until `end`."""
        while not self._ended.wait(self._random.uniform(0.5, 1.5) * self._gap_s):
            with self.rests:
                with suppress(psutil.Error):  # it ended by itself, or is being started
                    if process := self._fleet._find(self._random.choice(KILLED)):
                        process.kill()
                        self.kills += 1

    def end(self) -> None:
        """Kills nobody any more."""
        self._ended.set()
        self.join()


def soak(options: argparse.Namespace, looks: Looks, counts: dict[str, float]) -> None:
    """Runs until the time is over; what was looked at and counted is there too where a run fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        with Fleet(Path(folder) / "fleet", "--simulator", "0") as fleet:
            killer = Killer(fleet, options.seed, options.gap)
            killer.start()
            while time.monotonic() - began < options.minutes * 60:
                spec = small_spec(
                    model, steps=RUN_STEPS, seed=int(counts["runs"]), limits={"recoveries": 100}
                )
                run = fleet.succeed(fleet.submit(spec), timeout_s=900)
                audit(fleet, run)
                fleet.client.delete(run.id)
                with killer.rests:
                    fleet.ready("rollout-0", "trainer-0", "reward-0")
                    looks.look(fleet)
                counts |= {"runs": counts["runs"] + 1, "steps": counts["steps"] + run.step}
                counts |= {"kills": killer.kills, "store_mib": looks.store_mib}
                _tell(options.log, began, counts, looks)
            killer.end()


def _tell(log: Path | None, began: float, counts: Mapping[str, float], looks: Looks) -> None:
    minutes, load = (time.monotonic() - began) / 60, os.getloadavg()[0]
    found = {name: values[-1] for name, values in looks.found.items()}
    line = json.dumps({"minutes": round(minutes, 2), "load": round(load, 1), **counts, **found})
    say(line)
    if log:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def main() -> int:
    """Command line; 1 where `--check` finds something that grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--gap", type=float, default=10.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file to which a JSON line is added after each run")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    say(machine())
    looks, counts = Looks(), {"runs": 0.0, "steps": 0.0, "kills": 0.0, "store_mib": 0.0}
    try:
        soak(options, looks, counts)
    finally:
        found = looks.growth()
        emit("soak", {**counts, **{f"{name}_growth": value for name, value in found.items()}})
    grown = {name: value for name, value in found.items() if value > MOST[name]}
    if counts["store_mib"] > MOST_STORE_MIB:
        grown["store_mib"] = counts["store_mib"]
    if options.check and grown:
        say(f"grows: {grown}; the most are {MOST}")
    return int(options.check and bool(grown))


if __name__ == "__main__":
    raise SystemExit(main())
