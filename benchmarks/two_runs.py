"""Two runs that share the devices of one fleet, against each of them alone: `python benchmarks/two_runs.py`.

A real fleet on two cores with two rollouts and two trainers. Both runs have the same sizes and different seeds; each
turn makes, in an order that alternates, both alone one after the other, and both at the same time with
`placement.share`. The algorithm makes two optimizer steps of a batch, so that no run can learn while it generates.

- `apart`: disaggregated, generation on `cpu:0`, learning on `cpu:1`; together each side works for one run at a time.
  The runs are also made alone collocated, on both cores.
- `rewards`: collocated on both cores, with a scorer that sleeps, which no device has a part in.

Prints one JSON line with `two_runs_vs_sum`: seconds until both have ended, from their submission, over the sum of both
alone, in `apart`, the median over the turns; `two_runs_vs_best_sum`: the same over the smaller of the sums alone,
disaggregated and collocated; `two_runs_vs_sum_rewards`; `longest_streak`: most steps in a row that one run made while
the other had some left, the worst of all turns; and the medians that the ratios come from.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from _harness import Fleet, emit, machine, say
from headrace.client import Client, Run
from streaming import write_model, write_prompts

CORES = ("cpu:0", "cpu:1")
GROUPS, GROUP_SIZE, LONGEST = 16, 4, 96
RUN_S = 300.0
SLEEPS = '''
"""Rewards that take time and no computing."""
import time


def score(prompt, completion, reference, metadata):
    time.sleep({seconds})
    return -0.01 * len(completion)
'''
Measure = dict[str, float]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="times to measure each alone and both")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run")
    parser.add_argument("--width", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--together", type=int, default=16, help="answers decoded together")
    parser.add_argument(
        "--score-s", type=float, default=0.06, help="seconds that a reward takes in `rewards`"
    )
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        folder = Path(name)
        write_model(folder / "model", options.width, options.layers)
        write_prompts(folder / "prompts.jsonl", GROUPS * options.steps)
        (folder / "slow.py").write_text(SLEEPS.format(seconds=options.score_s), encoding="utf-8")
        spec = make_spec(folder, options.steps, options.together)
        slow = {**spec, "reward": {"scorers": [{"name": f"{folder / 'slow.py'}:score"}]}}
        with (
            Fleet(
                "--devices", ",".join(CORES), "--simulator", "0", "--rollout", "2", "--trainer", "2"
            ) as fleet,
            Client(fleet.url, fleet.token) as client,
        ):
            both(client, {**spec, "steps": 1}, APART, "warm-up")  # All four have loaded torch, and the model.
            turns = [turn(client, spec, slow, flipped=index % 2 == 1) for index in range(options.turns)]
    say(f"at the end: {machine()}")
    emit("two_runs", summarise(turns))


APART = {"mode": "disaggregated", "rollout": [CORES[0]], "trainer": [CORES[1]]}
TOGETHER = {"mode": "collocated", "rollout": list(CORES), "trainer": list(CORES)}


def make_spec(folder: Path, steps: int, together: int) -> dict[str, Any]:
    """A run without its seed and placement."""
    return {
        "steps": steps,
        "export": False,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "source": "jsonl",
            "options": {"path": str(folder / "prompts.jsonl")},
            "prompt": {"chat": False},
        },
        "sampling": {"max_new_tokens": LONGEST},
        "algorithm": {
            "group_size": GROUP_SIZE,
            "prompts_per_step": GROUPS,
            "options": {"minibatches": 2},
        },
        "optimizer": {"lr": 1e-12},
        "trainer": {"micro_batch_tokens": 1024},
        "rollout": {"max_concurrency": together},
        # Any reward that differs inside a group will do: equal rewards carry no gradient.
        "reward": {"scorers": [{"name": "length", "options": {"target": 0, "limit": LONGEST + 1}}]},
        "checkpoint": {"enabled": False},
    }


def turn(client: Client, spec: Mapping[str, Any], slow: Mapping[str, Any], *, flipped: bool) -> Measure:
    """Everything once."""
    found: Measure = {}
    parts: list[Callable[[], Measure]] = [
        lambda: {"apart_sum_s": alone(client, spec, APART)},
        lambda: both(client, spec, APART, "apart"),
        lambda: {"collocated_sum_s": alone(client, spec, TOGETHER)},
        lambda: {"rewards_sum_s": alone(client, slow, TOGETHER)},
        lambda: both(client, slow, TOGETHER, "rewards"),
    ]
    for part in reversed(parts) if flipped else parts:
        found |= part()
    say(f"{machine()}: " + ", ".join(f"{name} {value:.1f}" for name, value in sorted(found.items())))
    return found


def alone(client: Client, spec: Mapping[str, Any], placement: Mapping[str, Any]) -> float:
    """Sum of the seconds of both runs, one after the other."""
    total = 0.0
    for seed in range(2):
        total += seconds([ended(client, submit(client, spec, placement, seed))])
    return total


def both(client: Client, spec: Mapping[str, Any], placement: Mapping[str, Any], name: str) -> Measure:
    """Seconds until two runs that share have ended, and the longest streak of one of them."""
    shared = {**placement, "share": True}
    runs = [submit(client, spec, shared, seed) for seed in range(2)]
    runs = [ended(client, run) for run in runs]
    return {f"{name}_both_s": seconds(runs), f"{name}_streak": float(longest_streak(client, runs))}


def submit(client: Client, spec: Mapping[str, Any], placement: Mapping[str, Any], seed: int) -> Run:
    name = f"{placement['mode']}{'-shared' if placement.get('share') else ''}-{seed}"
    return client.submit({**spec, "name": name, "seed": seed, "placement": dict(placement)})


def ended(client: Client, run: Run) -> Run:
    """A run that has succeeded; RuntimeError with its reason when it has not."""
    run = client.wait(run.id, RUN_S)
    if run.state != "SUCCEEDED" or run.recoveries:
        raise RuntimeError(f"{run.id} is {run.state} after {run.recoveries} recoveries: {run.reason}")
    return run


def seconds(runs: list[Run]) -> float:
    """From the first submission to the last end."""
    took = max(run.finished_at or 0.0 for run in runs) - min(run.created_at for run in runs)
    say(f"{', '.join(run.id for run in runs)}: {took:.1f} s")
    return took


def longest_streak(client: Client, runs: list[Run]) -> int:
    """Most steps in a row of one run while the other had some left."""
    steps = sorted(
        (event.time, run.id)
        for run in runs
        for event in client.events(run.id)
        if event.type == "step_committed"
    )
    names = [name for _, name in steps]
    until = min(max(i for i, name in enumerate(names) if name == run.id) for run in runs)
    return max(len(list(streak)) for _, streak in groupby(names[: until + 1]))


def summarise(turns: list[Measure]) -> Measure:
    """Medians over the turns; ratios are of one turn each."""
    ratios = {
        "two_runs_vs_sum": [t["apart_both_s"] / t["apart_sum_s"] for t in turns],
        "two_runs_vs_best_sum": [
            t["apart_both_s"] / min(t["apart_sum_s"], t["collocated_sum_s"]) for t in turns
        ],
        "two_runs_vs_sum_rewards": [t["rewards_both_s"] / t["rewards_sum_s"] for t in turns],
    }
    figures = {name: median(values) for name, values in ratios.items()}
    figures["longest_streak"] = max(t[name] for t in turns for name in ("apart_streak", "rewards_streak"))
    return figures | {name: median(t[name] for t in turns) for name in turns[0] if name.endswith("_s")}


if __name__ == "__main__":
    main()
