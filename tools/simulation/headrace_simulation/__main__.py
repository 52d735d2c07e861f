"""`python -m headrace_simulation`: many seeds, one JSON line."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter

from headrace_simulation.judging.replay import NEVER, REACHABLE, Pair
from headrace_simulation.world import run_world

COVERED_FROM = 200
"""So many seeds with faults must visit every reachable pair of state and intent."""


def main() -> None:
    """Runs the seeds; a violation ends with its seed, a pair that no seed visited with its name."""
    parser = argparse.ArgumentParser(prog="headrace_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="without faults")
    parser.add_argument("--stale", action="store_true", help="every run that may has max_staleness 0 to 4")
    parser.add_argument("--leaders-die", action="store_true", help="leaders are killed as their ranks meet")
    parser.add_argument(
        "--containers",
        action="store_true",
        help="each process is in a container, and some of these are removed",
    )
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    started, faults, requests, recoveries = time.monotonic(), Counter[str](), Counter[str](), 0
    refilled = helped = borrowed = ahead = 0
    pairs, ends = Counter[Pair](), Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            outcome = run_world(
                seed,
                faults=not arguments.calm,
                stale=arguments.stale,
                leaders_die=arguments.leaders_die,
                containers=arguments.containers,
            )
        except BaseException:  # any end, Ctrl-C too, is told with the seed that repeats it
            print(f"seed {seed} failed", flush=True)
            raise
        faults += outcome.faults
        requests += outcome.requests
        recoveries += outcome.recoveries
        refilled += outcome.refilled
        helped += outcome.helped
        borrowed += outcome.borrowed
        ahead = max(ahead, outcome.ahead)
        pairs += outcome.pairs
        ends.update(outcome.states.values())
    missed = sorted("/".join(pair) for pair in REACHABLE - pairs.keys())
    impossible = sorted("/".join(pair) for pair in NEVER & pairs.keys())
    report = {
        "seeds": arguments.seeds,
        "runs": dict(ends),
        "faults": dict(faults),
        "requests": dict(requests),
        "recoveries": recoveries,
        "refilled": refilled,
        "helped": helped,
        "borrowed": borrowed,
        "steps_ahead": ahead,
        "pairs": {"visited": len(pairs), "missed": missed, "impossible": impossible},
        "wall_s": round(time.monotonic() - started, 1),
    }
    print(json.dumps(report))
    if not refilled and arguments.seeds >= COVERED_FROM:
        raise SystemExit("no step took a group in place of a dropped one")
    if not ahead and arguments.seeds >= COVERED_FROM:
        raise SystemExit("no answer was made ahead of its step")
    if arguments.stale:
        return  # Helpers and turns on shared devices need answers of one version.
    if not helped and arguments.seeds >= COVERED_FROM:
        raise SystemExit("no helper contributed a gradient")
    if not borrowed and arguments.seeds >= COVERED_FROM:
        raise SystemExit("no trainer's device decoded")
    if not arguments.calm and not requests["evaluation of a checkpoint"] and arguments.seeds >= COVERED_FROM:
        raise SystemExit("nobody evaluated a checkpoint")
    if impossible or (missed and arguments.seeds >= COVERED_FROM and not arguments.calm):
        raise SystemExit(f"pairs of state and intent: missed {missed}, impossible {impossible}")


if __name__ == "__main__":
    main()
