"""What the tiny model learns under each algorithm, over seeds: `python benchmarks/algorithms.py --seeds 0 1 2`.

Runs `examples/algorithms/NAME.yaml` (two passes of two minibatches) by `headrace debug`, all services in one process,
one run after the other, and reads rewards, clip fractions and held-out scores off its events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "algorithms"
LIMIT_S = 1800
LAST = 10
"""Steps at the end, and at the beginning, whose rewards are averaged."""
TOKEN_FIGURES = ("clip_fraction", "approx_kl", "entropy")


def run(name: str, seed: int, steps: int, model: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Figures of one run; raises subprocess.CalledProcessError when it failed."""
    command = [sys.executable, "-m", "headrace_cli", "debug", str(EXAMPLES / f"{name}.yaml"), "--json"]
    for override in (
        f"seed={seed}",
        f"steps={steps}",
        f"model.path={model}",
        "checkpoint.enabled=false",
        *overrides,
    ):
        command += ["--set", override]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return figures(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def figures(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """What a run's events say: rewards of the first and the last steps, clip fraction, held-out scores."""
    seen = list(events)
    steps = [event["view"]["figures"] for event in seen if event["type"] == "step_committed"]
    scores = [event["view"]["score"] for event in seen if event["type"] == "evaluated"]
    rewards = [step["reward_mean"] for step in steps]
    views = [event["view"] for event in seen if event["type"] == "step_committed"]
    return {
        "steps": float(len(steps)),
        "reward_first": statistics.fmean(rewards[:LAST]),
        "reward_last": statistics.fmean(rewards[-LAST:]),
        "heldout_before": scores[0],
        "heldout_after": scores[-1],
        "tokens_a_slot_first": _tokens(views[:LAST]),
        "tokens_a_slot_last": _tokens(views[-LAST:]),
        "filtered_slots": sum(view["filtered"] for view in views),
        "refilled_groups": sum(view["refilled"] for view in views),
        "optimizer_steps": sum(step["optimizer_steps"] for step in steps),
        **{name: statistics.fmean(own) for name in TOKEN_FIGURES if (own := _own(steps, name))},
    }


def _tokens(views: list[dict[str, Any]]) -> float:
    return float(sum(view["tokens"] for view in views) / max(sum(view["trained"] for view in views), 1))


def _own(steps: list[dict[str, float]], name: str) -> list[float]:
    """A figure of the steps that have it: a loss without a clip, or a step without a gradient, has none."""
    return [step[name] for step in steps if name in step]


def main() -> None:
    """Command line."""
    known = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=known, default=known)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's spec")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
        for name in arguments.algorithms:
            for seed in arguments.seeds:
                line = run(name, seed, arguments.steps, model, arguments.set)
                print(f"{name}, seed {seed}: {json.dumps(line)}", file=sys.stderr, flush=True)
                found |= {f"{name}_{key}_seed_{seed}": value for key, value in line.items()}
    print(json.dumps({"benchmark": "algorithms", "figures": found}))


if __name__ == "__main__":
    main()
