"""How long devices take to change hands: `python benchmarks/lease_switch.py`.

A real fleet on two cores makes collocated steps of a small model. Twice a step the devices change hands: one side is
told to give back its memory and its lease, the other takes the lease, is awake and can work; an engine has also
verified the new weights by then. That is what `switch` of a step's `stage_s` covers, from the order until the reply.

Prints one JSON line with `switch_ms`, the median of half a step's `switch`, and `switch_ms_p90`, its nine-tenths
quantile. In these steps the holder gives the devices back itself; a lease that is taken from a working holder waits for
that one's notice as well, which is not measured here.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _harness import Fleet, emit, machine, say
from modes import WORKLOADS, finished, make_spec

CHANGES = 2
"""Times that devices change hands in a step."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="measured steps")
    options = parser.parse_args()
    say(machine())
    with (
        tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder,
        Fleet("--devices", "cpu:0,cpu:1", "--simulator", "0") as fleet,
    ):
        switches = switch_seconds(fleet, Path(folder) / "short", options.steps)
    say(f"{len(switches)} steps; at the end: {machine()}")
    emit("lease_switch", summarise(switches))


def switch_seconds(fleet: Fleet, folder: Path, steps: int) -> list[float]:
    """Seconds of the switches of each measured step, without those of the start."""
    from headrace.client import Client

    spec = make_spec(folder, WORKLOADS["short"])
    with Client(fleet.url, fleet.token) as client:
        run = finished(client, {**spec, "steps": steps + 1, "placement": {"mode": "collocated"}})
        return [step.stage_s["switch"] for step in client.metrics(run) if step.step > 1]


def summarise(switches: list[float]) -> dict[str, float | None]:
    """Milliseconds of one change of hands."""
    ordered = sorted(1000 * seconds / CHANGES for seconds in switches)
    return {
        "switch_ms": ordered[len(ordered) // 2],
        "switch_ms_p90": ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)],
    }


if __name__ == "__main__":
    main()
