"""SAC through the services beside stable-baselines3: `python benchmarks/off_policy.py --peer PYTHON [--seeds 0 1 2]`.

A real fleet of one rollout, trainer and simulator trains `examples/embodied/pendulum_sac.yaml`; the peer trains its
own SAC with the same networks, rates and numbers of actions and updates, on one thread as each of our processes has.
PYTHON is one that has stable-baselines3; without it the peer is left out. Runs of a seed follow each other, ours first.
Prints one JSON line: the mean return of 16 held-out episodes after the run, of each and of both over the seeds; the
actions after which the mean return of five training episodes was above -300; and `actions_a_second_vs_peer`, the median
over the seeds of ours against the peer's, from wall times of whole runs (evaluations are in neither).
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _harness import Fleet, emit, machine, say
from headrace.client import Client

RECIPE = Path(__file__).parents[1] / "examples" / "embodied" / "pendulum_sac.yaml"
PEER = Path(__file__).parent / "peers" / "sb3_sac.py"
LENGTH, LEARNED, WINDOW, RUN_S = 200, -300.0, 5, 3600.0
GOALS = {"actions_a_second_vs_peer": 0.8}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="a Python that has stable-baselines3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=30, help="of 200 actions, in a run")
    options = parser.parse_args()
    say(machine())
    figures: dict[str, float | None] = {}
    with Fleet("--devices", "cpu:0,cpu:1") as fleet, Client(fleet.url, fleet.token) as client:
        for seed in options.seeds:
            found = {"ours": trained(client, seed, options.episodes)}
            if options.peer:
                found["peer"] = peer(options.peer, seed, options.episodes)
            for who, own in found.items():
                say(f"seed {seed}, {who}: {json.dumps(own)}")
                figures |= {f"{who}_{name}_seed_{seed}": value for name, value in own.items()}
    for who in ("ours", "peer") if options.peer else ("ours",):
        figures[f"{who}_heldout"] = fmean(
            figures[f"{who}_heldout_seed_{seed}"] or 0.0 for seed in options.seeds
        )
    if options.peer:
        name = "actions_a_second"
        pairs = (
            (figures[f"ours_{name}_seed_{seed}"], figures[f"peer_{name}_seed_{seed}"])
            for seed in options.seeds
        )
        figures["actions_a_second_vs_peer"] = median(
            ours / theirs for ours, theirs in pairs if ours and theirs
        )
        say(f"actions_a_second_vs_peer: {figures['actions_a_second_vs_peer']:.2f} (goal at least 0.8)")
    say(f"at the end: {machine()}")
    emit("off_policy", figures)


def trained(client: Client, seed: int, episodes: int) -> dict[str, float | None]:
    """A run of ours. RuntimeError where it failed."""
    changes = [f"seed={seed}", f"steps={episodes}", f"evaluation.every={episodes}"]
    run = client.wait(client.submit(RECIPE, changes).id, RUN_S)
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.id} is {run.state}: {run.reason}")
    steps = client.metrics(run.id)
    returns = [step.figures["reward_mean"] for step in steps]
    seconds = sum(step.wall_s for step in steps)
    return told(returns, run.evaluations[-1].score, seconds)


def peer(python: str, seed: int, episodes: int) -> dict[str, float | None]:
    """The peer's run."""
    command = [python, str(PEER), str(seed), str(episodes * LENGTH)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return told(found["returns"], found["heldout"], found["seconds"])


def told(returns: list[float], heldout: float, seconds: float) -> dict[str, float | None]:
    """What is shown of a run."""
    windows = [fmean(returns[first : first + WINDOW]) for first in range(len(returns) - WINDOW + 1)]
    learned = next((place for place, value in enumerate(windows) if value > LEARNED), None)
    return {
        "heldout": heldout,
        "actions_to_learn": None if learned is None else float((learned + WINDOW) * LENGTH),
        "actions_a_second": len(returns) * LENGTH / seconds,
    }


if __name__ == "__main__":
    main()
