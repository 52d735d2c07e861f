"""What robot policies learn from the command line: `python benchmarks/embodied.py --recipes reach push --seeds 0 1 2`.

For each recipe, `examples/embodied/NAME.yaml`, a fleet is started with its simulator (`make simulators SIM=…` first)
and demonstrations are collected where the recipe clones. Then the run is made for each seed, and its last checkpoint
judged on 48 start states of the suite `episodes`, whose seeds no run trains on and none was tuned on.

Prints one JSON line. By recipe and seed: `heldout_before` and `heldout_after` (success rate on the run's own held-out
start states, or the mean return where the environment never says success), `unseen` (on the suite's), `actions` (that
episodes executed), `actions_to_level` (before the first evaluation whose score was at least `--level`), `seconds` (from
submitting to the run's end, its evaluations and checkpoints included); by recipe `collect_s` and `cloning_loss`.
`--record FILE` adds each run to a JSON file as it ends and skips those that the file has; `--draw FILE` writes the
curves as an SVG.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _curves import draw
from _harness import Fleet, emit, headrace, machine, say
from headrace.client import Client, Event, Trajectory, load_spec, load_specs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "embodied"
UNSEEN = 48
EVALUATION_S = 600.0
LABEL = "share of a step's training episodes that succeeded, or their mean return where no success is said"
Found = dict[str, Any]
"""Figures of one run; `curve`: what each step's episodes came to (LABEL), noise of the policy included; `scores`: of
each evaluation, the actions before it and the score."""


def main(arguments: Sequence[str] | None = None, runs_of: Callable[..., Any] | None = None) -> None:
    """Command line; `runs_of` makes the runs in place of `made`."""
    options = parse(arguments)
    runs: dict[str, dict[str, Found]] = {}
    if options.record is not None and options.record.exists():
        runs = json.loads(options.record.read_text(encoding="utf-8"))
    for name in options.recipes:
        missing = [seed for seed in options.seeds if str(seed) not in runs.get(name, {})]
        if missing:
            for seed, found in (runs_of or made)(name, missing, options.set, options.limit):
                runs.setdefault(name, {})[str(seed)] = found
                if options.record is not None:
                    options.record.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    if options.draw is not None:
        curves = {
            name: {int(seed): found["curve"] for seed, found in seeds.items()} for name, seeds in runs.items()
        }
        most = {name: max(each["actions"] for each in seeds.values()) for name, seeds in runs.items()}
        ends = {name: f"{actions:,} actions" for name, actions in most.items()}
        options.draw.write_text(draw(curves, LABEL, ends), encoding="utf-8")
    say(f"at the end: {machine()}")
    emit("embodied", flat(runs, options.level))


def recipes() -> list[str]:
    """Names of the examples of one run."""
    return sorted(path.stem for path in EXAMPLES.glob("*.yaml") if len(load_specs(path)) == 1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; those of the command line where `arguments` is None."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=recipes(), default=["reach", "push", "reach_sparse"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's spec")
    parser.add_argument("--level", type=float, default=0.9, help="score whose actions are counted")
    parser.add_argument("--limit", type=float, default=900.0, help="longest run in seconds")
    parser.add_argument("--record", type=Path, help="JSON file that runs are added to, and not repeated")
    parser.add_argument("--draw", type=Path, help="SVG file for the curves")
    return parser.parse_args(arguments)


def made(name: str, seeds: list[int], sets: list[str], limit_s: float) -> Any:
    """Yields (seed, figures) as the recipe's runs end, in a fleet of their own."""
    path = EXAMPLES / f"{name}.yaml"
    spec = load_spec(path)
    with (
        Fleet("--sim", spec["environment"]["backend"]) as fleet,
        Client(fleet.url, token=fleet.token) as client,
    ):
        overrides, collect_s = list(sets), 0.0
        if "demonstrations" in spec.get("trainer", {}).get("warmup", {}):
            folder = fleet.directory / "demonstrations"
            collect_s = collected(path, spec, folder)
            overrides.append(f"trainer.warmup.demonstrations={folder}")
        for seed in seeds:
            say(f"{name}, seed {seed}: {machine()}")
            found = trained(client, path, [f"seed={seed}", *overrides], limit_s) | {"collect_s": collect_s}
            say(f"  {json.dumps({key: value for key, value in found.items() if key != 'curve'})}")
            yield seed, found


def collected(path: Path, spec: Mapping[str, Any], folder: Path) -> float:
    """Seconds that the recipe's demonstrations took."""
    began = time.perf_counter()
    episodes = spec["trainer"]["warmup"].get("episodes") or 32
    exact = [] if spec["algorithm"]["name"] == "ppo" else ["--noise", "0"]  # critics read what was done
    headrace("demonstrations", "collect", str(path), "--to", str(folder), "--episodes", str(episodes), *exact)
    return time.perf_counter() - began


def trained(client: Client, path: Path, overrides: list[str], limit_s: float) -> Found:
    """One run and the judgement of its last checkpoint; RuntimeError where it failed."""
    began = time.perf_counter()
    run = client.wait(client.submit(path, overrides).id, limit_s)
    seconds = time.perf_counter() - began
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.id} is {run.state}: {run.reason}")
    found = figures(list(client.events(run.id))) | {"curve": outcomes(client.trajectories(run.id))}
    judged = client.evaluate(judgement(run.id, run.spec["environment"]))
    deadline = time.monotonic() + EVALUATION_S
    while not (now := client.evaluation(judged.id)).ended:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{judged.id} has not ended within {EVALUATION_S:.0f} s")
        time.sleep(0.5)
    if now.result is None:
        raise RuntimeError(f"{judged.id} is {now.state}: {now.reason}")
    return {**found, "seconds": seconds, "unseen": now.result.modes[0].score}


def judgement(run: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation of a run's last checkpoint on start states that no run trains on."""
    suite = {"name": "episodes", "options": {"environment": environment, "starts": UNSEEN}}
    return {"suite": suite, "checkpoint": {"run": run}}


def figures(events: list[Event]) -> Found:
    """What a run's events say: its held-out scores, its actions, the loss of its cloning."""
    views = [event.data["view"] for event in events if event.type == "step_committed"]
    told = [event.data["view"] for event in events if event.type == "evaluated"]
    scores = [view["score"] for view in told]
    restored = next(event.data["figures"] for event in events if event.type == "version_restored")
    cloning = {"cloning_loss": restored["warmup_last_loss"]} if "warmup_last_loss" in restored else {}
    return {
        "steps": len(views),
        "actions": sum(view["tokens"] for view in views),
        "heldout_before": scores[0],
        "heldout_after": scores[-1],
        "scores": [[sum(view["tokens"] for view in views[: at["step"]]), at["score"]] for at in told],
        **cloning,
    }


def outcomes(episodes: Iterable[Trajectory]) -> list[float]:
    """The share of each step's episodes that succeeded; their mean return where the environment says no success."""
    by_step: dict[int, list[float]] = {}
    for episode in episodes:
        told = json.loads(episode.completion)
        found = told["return"] if told["success"] is None else told["success"]
        by_step.setdefault(episode.step, []).append(float(found))
    return [fmean(found) for _, found in sorted(by_step.items())]


def flat(runs: Mapping[str, Mapping[str, Found]], level: float) -> dict[str, float | None]:
    """One number a name, for the JSON line; none where a run did not come to the level."""
    return {
        f"{name}_{key}_seed_{seed}": value
        for name, seeds in runs.items()
        for seed, found in seeds.items()
        for key, value in {
            **found,
            "actions_to_level": next((at for at, score in found.get("scores", []) if score >= level), None),
        }.items()
        if key not in ("curve", "scores")
    }


if __name__ == "__main__":
    main()
