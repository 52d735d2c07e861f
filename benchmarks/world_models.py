"""Real actions that a policy takes to learn with a world model: `python benchmarks/world_models.py [--seeds 0 1 2]`.

On a real fleet, by seed: SAC acts in the real environment for a few steps (`examples/embodied/pendulum_sac.yaml`; with
`--recipe reach`, `reach_sac.yaml`, after `make simulators SIM=metaworld`), a world model is learned from its replay
store, SAC learns from random weights in the model alone (`pendulum_world.yaml`; for reach the same spec with the model
as its environment), and its policy is judged in fresh real episodes. Below the last goal, where `--real` names another
round, that policy acts in the real environment without learning, the model is learned again from all real episodes, and
the run in the model goes on in it from its checkpoint.
Prints one JSON line: by seed and round real actions so far, the model's held-out error after 10 and 50 actions, the
mean return (reach: success) of real episodes, and the share of the last episodes in the model that were cut; and by
seed the real actions after which a goal was reached (none: it was not). `--sac N` adds those of SAC without a model,
judged on held-out starts after every second of N steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _harness import COMMAND, Fleet, emit, machine, say
from headrace.client import Client, load_spec

EXAMPLES = Path(__file__).parents[1] / "examples" / "embodied"
RUN_S, TRAIN_S, EVALUATION_S = 3600.0, 900.0, 300.0


@dataclass(frozen=True)
class Recipe:
    """What is learned. `real` and `steps` are the steps of each round, in the real environment and in the model."""

    spec: str
    world: str
    changes: tuple[str, ...]
    goals: tuple[float, ...]
    starts: int
    real: tuple[int, ...]
    steps: tuple[int, ...]
    fleet: tuple[str, ...] = ("--devices", "cpu:0,cpu:1")


RECIPES = {
    "pendulum": Recipe(
        "pendulum_sac.yaml", "pendulum_world.yaml", (), (-300.0, -200.0), 16, (4, 2, 2), (40, 20, 20)
    ),
    "reach": Recipe(
        "reach_sac.yaml",
        "reach_sac.yaml",
        ("environment.backend=world", "environment.processes=1", "environment.vectorized=true"),
        (0.5, 0.7),
        48,
        (10, 5, 5),
        (60, 30, 30),
        ("--sim", "metaworld"),
    ),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default="pendulum")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--real", type=int, nargs="+", help="real steps of each round, of 200 actions")
    parser.add_argument("--steps", type=int, nargs="+", help="steps in the model of each round")
    parser.add_argument("--sac", type=int, default=0, help="steps of SAC without a model; 0: it is not run")
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]
    lengths = [*zip(options.real or recipe.real, options.steps or recipe.steps, strict=True)]
    say(machine())
    figures: dict[str, float | None] = {}
    with Fleet(*recipe.fleet) as fleet, Client(fleet.url, fleet.token) as client:
        for seed in options.seeds:
            curves = {"with_model": list[tuple[float, float]]()}
            if options.sac:
                curves["sac"] = alone(client, recipe, seed, options.sac)
            for place, found in enumerate(rounds(client, fleet, recipe, seed, lengths), 1):
                say(f"seed {seed}, round {place}, {machine()}: {json.dumps(found)}")
                figures |= {f"{name}_seed_{seed}_round_{place}": value for name, value in found.items()}
                curves["with_model"].append((found["real_actions"], found["real_score"]))
            for who, curve in curves.items():
                say(f"seed {seed}, {who}: {json.dumps(curve)}")
                for goal in recipe.goals:
                    reached = (actions for actions, value in curve if value > goal)
                    figures[f"{who}_actions_to_{goal:g}_seed_{seed}"] = next(reached, None)
    say(f"at the end: {machine()}")
    emit("world_models", {f"{options.recipe}_{name}": value for name, value in figures.items()})


def alone(client: Client, recipe: Recipe, seed: int, steps: int) -> list[tuple[float, float]]:
    """Real actions and the score of held-out episodes, of SAC in the real environment."""
    run = ran(client, recipe.spec, [f"seed={seed}", f"steps={steps}", "evaluation.every=2"])
    actions = [step.tokens for step in client.metrics(run.id)]
    return [(float(sum(actions[: each.step])), each.score) for each in run.evaluations if each.step]


def rounds(
    client: Client, fleet: Fleet, recipe: Recipe, seed: int, lengths: list[tuple[int, int]]
) -> Iterator[dict[str, float]]:
    """Figures of each round of a seed."""
    world = fleet.directory / f"worlds-{seed}" / "learned"
    stores: list[str] = []
    actions, total, last = 0.0, 0, None
    for place, (steps, more) in enumerate(lengths):
        changes = [f"seed={seed + 100 * place}", f"steps={steps}", "evaluation.every=1000", "data.heldout=1"]
        if last is not None:  # it acts as it is: too few updates would follow to learn anything
            given = ("model.policy=null", f"model.path={last.export_path}")
            changes += [*given, "algorithm.options.learning_starts=1000000"]
        real = ran(client, recipe.spec, changes)
        actions += sum(step.tokens for step in client.metrics(real.id))
        stores.append(str(fleet.data_dir / "runs" / real.id / "replay"))
        about = learned(EXAMPLES / recipe.spec, world, stores, seed)
        total += more
        changes = [f"seed={seed}", f"steps={total}", f"environment.tasks=[{world}]", "export=true"]
        changes += [f"evaluation.every={total}", "data.heldout=4", *recipe.changes]
        if last is not None:
            changes.append(f"from_checkpoint.run={last.id}")
        last = ran(client, recipe.world, changes)
        metrics = client.metrics(last.id)
        score = judged(client, recipe, last.id)
        yield {
            "real_actions": actions,
            **{name.replace(" ", "_"): value[0] for name, value in about["errors"].items()},
            "threshold": about["threshold"],
            "model_actions": float(sum(step.tokens for step in metrics)),
            "cut_early": fmean(step.figures["cut_early"] for step in metrics[-10:]),
            "real_score": score,
        }
        if score > recipe.goals[-1]:
            return


def learned(spec: Path, world: Path, stores: list[str], seed: int) -> dict[str, Any]:
    """What `headrace world train` says of the model."""
    names = ("--output", str(world), "--seed", str(seed), "--json")
    command = [*COMMAND, "world", "train", str(spec), *stores, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAIN_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ran(client: Client, spec: str, changes: list[str]) -> Any:
    """A run that succeeded. RuntimeError where it failed."""
    run = client.wait(client.submit(EXAMPLES / spec, changes).id, RUN_S)
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.id} is {run.state}: {run.reason}")
    return run


def judged(client: Client, recipe: Recipe, run: str) -> float:
    """The mean return, or the success, of real episodes of a run's last checkpoint."""
    environment = load_spec(EXAMPLES / recipe.spec)["environment"]
    suite = {"name": "episodes", "options": {"environment": environment, "starts": recipe.starts}}
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
