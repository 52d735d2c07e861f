"""How long a run's trainer group takes to change its size: `python benchmarks/regroup.py [--model DIR]`.

A real fleet with two trainers, on a run of the tiny preset or of a model of yours: the user wants two ranks, then one,
then two again, each as soon as the change before has made a step. `regroup_s` is the median of the stage `regroup` as
the coordinator measures it: from the decision at the end of a step until the new group has published the same version.
`regroup_s_grow` and `regroup_s_shrink` are the medians of each way, `regroups` how many there were.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _harness import Fleet, emit, machine, say

if TYPE_CHECKING:
    from headrace.client import Client

PATIENCE_S = 300.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=8, help="changes of the group's size")
    parser.add_argument("--model", type=Path, help="directory of a model to use in place of the tiny preset")
    options = parser.parse_args()
    say(machine())
    folder = tempfile.TemporaryDirectory(prefix="headrace-benchmark-")
    with folder as made, Fleet("--simulator", "0", "--trainer", "2") as fleet:
        from headrace.client import Client
        from headrace_modelkit.presets.tiny import write_tiny

        model = options.model or Path(made) / "tiny"
        if options.model is None:
            write_tiny(model)
        with Client(fleet.url, fleet.token) as client:
            found = changes(client, options.changes, model)
    say(f"{len(found)} changes; at the end: {machine()}")
    emit("regroup", summarise(found))


def changes(client: Client, count: int, model: Path) -> list[tuple[int, float]]:
    """(ranks, seconds) of each change."""
    run = client.submit(make_spec(10_000, model)).id
    found: list[tuple[int, float]] = []
    for index in range(count):
        ranks = 2 if index % 2 == 0 else 1
        until(client, run, lambda at: at.step >= 1 and not at.wanted_ranks)
        client.set(run, {"trainer.ranks": ranks})
        reached = until(client, run, lambda at, ranks=ranks: at.ranks == ranks).step
        until(client, run, lambda at, reached=reached: at.step > reached + 1)
        steps = [step.stage_s["regroup"] for step in client.metrics(run) if "regroup" in step.stage_s]
        found.append((ranks, steps[-1]))
    client.cancel(run)
    client.wait(run, PATIENCE_S)
    return found


def until(client: Client, run: str, reached: Any) -> Any:
    """The run once `reached` says so; raises TimeoutError."""
    end = time.monotonic() + PATIENCE_S
    while not reached(at := client.get(run)):
        if at.ended or time.monotonic() > end:
            raise TimeoutError(f"{run} is {at.state} at step {at.step} with {at.ranks} ranks: {at.reason}")
        time.sleep(0.05)
    return at


def make_spec(steps: int, model: Path) -> dict[str, Any]:
    """Short steps in turns, without evaluations or checkpoints."""
    return {
        "name": "regroup",
        "steps": steps,
        "model": {"path": str(model)},
        "data": {"source": "copy_digits", "options": {"digits": 2}, "heldout": 0},
        "sampling": {"max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 4, "group_size": 4},
        "placement": {"mode": "collocated"},
        "reward": {"scorers": [{"name": "exact"}, {"name": "length", "options": {"target": 1, "limit": 4}}]},
        "checkpoint": {"enabled": False},
        "evaluation": {"every": 0},
    }


def summarise(found: list[tuple[int, float]]) -> dict[str, float]:
    """Medians, in seconds."""
    return {
        "regroup_s": median(seconds for _, seconds in found),
        "regroup_s_grow": median(seconds for ranks, seconds in found if ranks == 2),
        "regroup_s_shrink": median(seconds for ranks, seconds in found if ranks == 1),
        "regroups": float(len(found)),
    }


if __name__ == "__main__":
    main()
