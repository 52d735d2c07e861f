"""Real actions that a policy takes to learn with a world model: `python benchmarks/world_models.py [--seeds 0 1 2]`.

On a real fleet, by seed: SAC acts in the real pendulum for a few episodes (`examples/embodied/pendulum_sac.yaml`), a
world model is learned from its replay store, SAC learns from random weights in the model alone
(`examples/embodied/pendulum_world.yaml`), and its policy is judged on 16 real episodes. With `--rounds` above 1 that
policy then acts in the real pendulum, without learning, and the model is learned again from all real episodes.
Prints one JSON line: by seed and round real actions so far, the model's held-out error after 10 and 50 actions, the
return of real episodes, and the share of the last episodes in the model that were cut; and their means.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from _harness import COMMAND, Fleet, emit, machine, say
from headrace.client import Client

EXAMPLES = Path(__file__).parents[1] / "examples"
REAL, WORLD = (EXAMPLES / "embodied" / name for name in ("pendulum_sac.yaml", "pendulum_world.yaml"))
LENGTH, RUN_S, TRAIN_S, EVALUATION_S = 200, 3600.0, 900.0, 300.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=8, help="real ones of 200 actions in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="of 200 actions in the model")
    options = parser.parse_args()
    say(machine())
    figures: dict[str, float | None] = {}
    with Fleet("--devices", "cpu:0,cpu:1") as fleet, Client(fleet.url, fleet.token) as client:
        for seed in options.seeds:
            for place, found in enumerate(rounds(client, fleet, seed, options), 1):
                say(f"seed {seed}, round {place}, {machine()}: {json.dumps(found)}")
                figures |= {f"{name}_seed_{seed}_round_{place}": value for name, value in found.items()}
    for place in range(1, options.rounds + 1):
        for name in ("real_actions", "real_return"):
            key = f"{name}_round_{place}"
            figures[key] = fmean(
                figures[f"{name}_seed_{seed}_round_{place}"] or 0.0 for seed in options.seeds
            )
    say(f"at the end: {machine()}")
    emit("world_models", figures)


def rounds(client: Client, fleet: Fleet, seed: int, options: argparse.Namespace) -> Any:
    """Figures of each round of a seed."""
    world = fleet.directory / f"worlds-{seed}" / "pendulum"
    stores: list[str] = []
    actions, policy = 0.0, ""
    for place in range(options.rounds):
        changes = [
            f"seed={seed + 100 * place}",
            f"steps={options.episodes}",
            "evaluation.every=1000",
            "data.heldout=1",
        ]
        if policy:  # it acts as it is: too few updates would follow to learn anything
            changes += [
                "model.policy=null",
                f"model.path={policy}",
                "algorithm.options.learning_starts=1000000",
            ]
        real = ran(client, REAL, changes)
        actions += sum(step.tokens for step in client.metrics(real.id))
        stores.append(str(fleet.data_dir / "runs" / real.id / "replay"))
        about = learned(world, stores, seed)
        changes = [f"seed={seed}", f"steps={options.steps}", f"environment.tasks=[{world}]", "export=true"]
        run = ran(client, WORLD, [*changes, f"evaluation.every={options.steps}"])
        policy = str(run.export_path)
        last = client.metrics(run.id)[-10:]
        yield {
            "real_actions": actions,
            **{name.replace(" ", "_"): value[0] for name, value in about["errors"].items()},
            "threshold": about["threshold"],
            "model_reward_an_action": fmean(
                (step.reward_mean or 0.0) * step.trained / step.tokens for step in last
            ),
            "cut_early": fmean(step.figures["cut_early"] for step in last),
            "real_return": judged(client, run.id),
        }


def learned(world: Path, stores: list[str], seed: int) -> dict[str, Any]:
    """What `headrace world train` says of the model."""
    command = [
        *COMMAND,
        "world",
        "train",
        str(REAL),
        *stores,
        "--output",
        str(world),
        "--seed",
        str(seed),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ran(client: Client, spec: Path, changes: list[str]) -> Any:
    """A run that succeeded. RuntimeError where it failed."""
    run = client.wait(client.submit(spec, changes).id, RUN_S)
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.id} is {run.state}: {run.reason}")
    return run


def judged(client: Client, run: str) -> float:
    """The mean return of real episodes of a run's last checkpoint."""
    environment = {"backend": "gymnasium", "tasks": ["Pendulum-v1"], "count": 16}
    suite = {"name": "episodes", "options": {"environment": environment, "starts": 16}}
    asked = client.evaluate({"suite": suite, "checkpoint": {"run": run}})
    deadline = time.monotonic() + EVALUATION_S
    while not (now := client.evaluation(asked.id)).ended:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{asked.id} has not ended within {EVALUATION_S:.0f} s")
        time.sleep(0.5)
    if now.result is None:
        raise RuntimeError(f"{asked.id} is {now.state}: {now.reason}")
    return float(now.result.modes[0].score)


if __name__ == "__main__":
    main()
