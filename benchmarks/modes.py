"""Which placement wins, and whether `auto` knew: `python benchmarks/modes.py`.

Three workloads on a real fleet with two cores. First each makes a run with `placement.mode: auto`, whose adopted plan
says what a step takes in either mode; these plans are saved (`--plans`) before anything that they are compared with is
made. Then runs of fixed modes alternate, `--turns` of each mode and workload. The learning rate is too small to move a
weight, so that all steps of a workload are alike.

- `short`: a small model and answers of four tokens: nothing but coordination.
- `tail`: answers of 1 to 64 tokens, sixteen together: few decode for long, which a second core hardly helps.
- `learning`: a wide model, many answers of four tokens: mostly large matrix products, which a second core halves.

Prints one JSON line with `auto_vs_best` (seconds of a step in the mode that auto chose over those in the better mode,
the worst workload), `prediction_error` (mean of |predicted / measured - 1| over workloads and modes), `winners_right`
(share of workloads whose measured winner auto chose), `winners` (number of different winners) and the medians that
they come from. `--hybrid` measures that mode as well (`…_hybrid_s`); `auto` does not choose it, and no figure but its
own counts it. `--turns 3` takes about half as long.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _harness import Fleet, emit, machine, say, table
from streaming import write_model, write_prompts

MODES = ("collocated", "disaggregated")
HYBRID = "hybrid"
RUN_S = 900.0
LEFT_OUT = ("evaluate", "checkpoint")


@dataclass(frozen=True)
class Workload:
    """A model and a batch; `longest` is the limit of an answer's tokens."""

    width: int
    layers: int
    groups: int
    group_size: int
    longest: int
    together: int


WORKLOADS = {
    "short": Workload(width=64, layers=2, groups=16, group_size=8, longest=4, together=128),
    "tail": Workload(width=256, layers=4, groups=8, group_size=4, longest=64, together=16),
    "learning": Workload(width=384, layers=4, groups=16, group_size=8, longest=4, together=128),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7, help="runs of each mode and workload, alternating")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a run")
    parser.add_argument("--only", choices=sorted(WORKLOADS), action="append", help="workloads; default: all")
    parser.add_argument("--hybrid", action="store_true", help="measure hybrid placement as well")
    parser.add_argument("--plans", type=Path, help="write the plans to this file before the measured runs")
    options = parser.parse_args()
    say(machine())
    names = options.only or list(WORKLOADS)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder,
        Fleet("--devices", "cpu:0,cpu:1", "--simulator", "0") as fleet,
    ):
        specs = {name: make_spec(Path(folder) / name, WORKLOADS[name]) for name in names}
        plans = {name: planned(fleet, spec, options.steps) for name, spec in specs.items()}
        say(json.dumps(plans))
        if options.plans:
            options.plans.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
        modes = (*MODES, HYBRID) if options.hybrid else MODES
        found: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in modes} for name in names}
        for turn in range(options.turns):
            say(f"turn {turn + 1} of {options.turns}; {machine()}")
            for name, spec in specs.items():
                for mode in modes if turn % 2 == 0 else modes[::-1]:
                    found[name][mode].append(step_seconds(fleet, spec, mode, options.steps))
    say(f"at the end: {machine()}")
    emit("modes", summarise(plans, found))


def make_spec(folder: Path, work: Workload) -> dict[str, Any]:
    """The run of a workload; its mode and steps are set by whoever makes it."""
    folder.mkdir()
    write_model(folder / "model", work.width, work.layers)
    write_prompts(folder / "prompts.jsonl", 8 * work.groups)
    return {
        "seed": 7,
        "export": False,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "source": "jsonl",
            "options": {"path": str(folder / "prompts.jsonl")},
            "prompt": {"chat": False},
        },
        "sampling": {"max_new_tokens": work.longest},
        "algorithm": {"group_size": work.group_size, "prompts_per_step": work.groups},
        "optimizer": {"lr": 1e-12},
        "rollout": {"max_concurrency": work.together},
        # Any reward that differs inside a group will do: equal rewards carry no gradient.
        "reward": {"scorers": [{"name": "regex", "options": {"pattern": "[0-9]"}}]},
        "checkpoint": {"enabled": False},
    }


def planned(fleet: Fleet, spec: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What auto chose, and the seconds of a step that it predicted for each mode."""
    from headrace.client import Client

    made = {**spec, "steps": 2 * (steps + 1) + 2, "placement": {"mode": "auto", "measure_steps": steps}}
    with Client(fleet.url, fleet.token) as client:
        run = finished(client, made)
        adopted = [event.data for event in client.events(run) if event.type == "plan_adopted"]
    chosen = next(plan for plan in adopted if plan.get("predicted_s"))
    seconds = {chosen["mode"]: chosen["predicted_s"]["step"]}
    for words, predicted in chosen.get("alternatives", {}).items():
        mode = next(mode for mode in MODES if words.startswith(mode))
        seconds[mode] = (
            min(predicted, seconds.get(mode, predicted)) if mode != chosen["mode"] else seconds[mode]
        )
    return {"mode": chosen["mode"], "step_s": seconds, "reason": chosen["reason"]}


def step_seconds(fleet: Fleet, spec: Mapping[str, Any], mode: str, steps: int) -> float:
    """Median seconds of the steps of one run, without its first one, which pays for the start."""
    from headrace.client import Client

    with Client(fleet.url, fleet.token) as client:
        run = finished(client, {**spec, "steps": steps + 1, "placement": {"mode": mode}})
        seconds = [
            step.wall_s - sum(step.stage_s.get(stage, 0.0) for stage in LEFT_OUT)
            for step in client.metrics(run)
            if step.step > 1
        ]
    return median(seconds)


def finished(client: Any, spec: Mapping[str, Any]) -> str:
    """The id of a run that has succeeded; RuntimeError with its reason when it has not."""
    run = client.wait(client.submit(dict(spec)).id, RUN_S)
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.id} is {run.state}: {run.reason}")
    return str(run.id)


def summarise(
    plans: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, float | None]:
    """The figures; each workload goes to the reader."""
    medians = {name: {mode: median(turns) for mode, turns in modes.items()} for name, modes in found.items()}
    measured = {name: {mode: modes[mode] for mode in MODES} for name, modes in medians.items()}
    winners = {name: min(modes, key=lambda mode: modes[mode]) for name, modes in measured.items()}
    rows = [
        (name, mode, plans[name]["step_s"][mode], seconds, min(found[name][mode]), max(found[name][mode]),
         "auto" if plans[name]["mode"] == mode else "", "wins" if winners[name] == mode else "")
        for name, modes in measured.items()
        for mode, seconds in modes.items()
    ]  # fmt: skip
    table(("workload", "mode", "predicted", "measured", "least", "most", "chosen", ""), rows)
    figures: dict[str, float | None] = {
        "auto_vs_best": max(
            modes[plans[name]["mode"]] / modes[winners[name]] for name, modes in measured.items()
        ),
        "prediction_error": fmean(abs(predicted / seconds - 1) for _, _, predicted, seconds, *_ in rows),
        "winners_right": fmean(plans[name]["mode"] == winner for name, winner in winners.items()),
        "winners": float(len(set(winners.values()))),
    }
    each = {f"{name}_{mode}_s": seconds for name, modes in medians.items() for mode, seconds in modes.items()}
    return figures | each


if __name__ == "__main__":
    main()
