"""`python -m headrace_coordinator.simulation`: many seeds, one JSON line."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter

from headrace_coordinator.simulation.world import run_world


def main() -> None:
    """Runs the seeds; a violation ends with its seed."""
    parser = argparse.ArgumentParser(prog="headrace_coordinator.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="without faults")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    started, faults, recoveries = time.monotonic(), Counter[str](), 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            outcome = run_world(seed, faults=not arguments.calm)
        except BaseException:
            print(f"seed {seed} failed", flush=True)
            raise
        faults += outcome.faults
        recoveries += outcome.recoveries
    seconds = time.monotonic() - started
    print(
        json.dumps(
            {
                "seeds": arguments.seeds,
                "faults": dict(faults),
                "recoveries": recoveries,
                "wall_s": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
