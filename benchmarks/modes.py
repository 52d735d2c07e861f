"""Which placement wins, and whether `auto` knew: `python benchmarks/modes.py`.

Three workloads on a real fleet with two cores. First each makes a run with `placement.mode: auto`, whose adopted plan
says what a step takes with every placement that a run can have; these plans are saved (`--plans`) before anything
that they are compared with is made. Then runs of fixed placements alternate, `--turns` of each and each workload. The
learning rate is too small to move a weight, so that all steps of a workload are alike.

- `decode`: a small model that a second thread does not help, and answers that end anywhere: groups settle one by one,
  and a change of hands at the end costs more than it saves.
- `infer`: a wide policy with a critic and a deep reference, whose infer pass the trainer makes beside the answers; then
  it learns, mostly in large matrix products.
- `prompts`: a wide model, long prompts and answers of two tokens that all end at once: large matrix products alone, in
  generating and in learning, and nothing for one side to do while the other works.

A fixed piece of work is timed before and after each run (`_probe.py`), since a machine with other guests on its host
changes its speed by a half within minutes. All figures are printed twice: as measured, and (`..._scaled`) with the
seconds of each run multiplied by the speed that the machine then had, over its usual one. `probe_spread`: greatest over
least of five probes in a row, less 1; `speed_spread`: the same over all of the benchmark.

Prints one JSON line with `auto_vs_best` (seconds of a step in the placement that auto chose over those in the best one,
the worst workload), `prediction_error` (mean of |predicted / measured - 1| over workloads and placements, and
`prediction_error_untried` over those alone that auto did not try itself), `winners_right` (share of workloads in which
auto chose the mode of the measured winner: collocated, disaggregated or hybrid), `winners` (number of different modes
that win) and the medians that they come from. Takes about twelve minutes with `--turns 3` on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import _rewards
from _harness import Fleet, emit, machine, say, table
from _probe import Probe, spread
from streaming import write_model, write_prompts

STYLES: dict[str, dict[str, str]] = {
    "collocated offloaded": {"mode": "collocated", "memory": "offloaded"},
    "collocated resident": {"mode": "collocated", "memory": "resident"},
    "disaggregated sequential": {"mode": "disaggregated", "flow": "sequential"},
    "disaggregated pipelined": {"mode": "disaggregated", "flow": "pipelined"},
    "hybrid": {"mode": "hybrid"},
}
"""By the words with which a plan names them."""
RUN_S = 900.0
WARM_UP = 4
"""First steps of a run: they pay for the start, and for memory that the process then keeps."""
MOST_STEPS = 200
"""Of a run that chooses its placement; it is cancelled once it has."""
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
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    reference: tuple[int, int] | None = None
    """Width and layers of a reference model."""
    prompt: int = 20
    """Tokens of a prompt."""


PPO = {"name": "ppo", "options": {"epochs": 1, "minibatches": 1, "critic": "model", "kl_loss_coef": 1e-3}}
WORKLOADS = {
    "decode": Workload(width=64, layers=6, groups=16, group_size=4, longest=32, together=16),
    "infer": Workload(
        width=512, layers=3, groups=8, group_size=4, longest=32, together=8, algorithm=PPO, reference=(512, 8)
    ),
    "prompts": Workload(width=512, layers=3, groups=24, group_size=2, longest=2, together=48, prompt=80),
}


@dataclass(frozen=True)
class Found:
    """Seconds of a step, and the machine's speed then, over its usual one once all is measured."""

    seconds: float
    speed: float


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="runs of each placement and workload, alternating"
    )
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a run")
    parser.add_argument(
        "--plan-steps", type=int, default=6, help="steps that auto measures with each placement"
    )
    parser.add_argument("--only", choices=sorted(WORKLOADS), action="append", help="workloads; default: all")
    parser.add_argument("--plans", type=Path, help="write the plans to this file before the measured runs")
    options = parser.parse_args()
    say(machine())
    names = options.only or list(WORKLOADS)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder,
        Fleet("--devices", "cpu:0,cpu:1", "--simulator", "0") as fleet,
        Probe() as probe,
    ):
        specs = {name: make_spec(Path(folder) / name, WORKLOADS[name]) for name in names}
        plans = {name: planned(fleet, spec, options.plan_steps, probe) for name, spec in specs.items()}
        say(json.dumps(plans, indent=1))
        if options.plans:
            options.plans.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
        found: dict[str, dict[str, list[Found]]] = {name: {style: [] for style in STYLES} for name in names}
        for turn in range(options.turns):
            say(f"turn {turn + 1} of {options.turns}; {machine()}")
            for name, spec in specs.items():
                for style in list(STYLES) if turn % 2 == 0 else list(STYLES)[::-1]:
                    found[name][style].append(measured(fleet, spec, style, options.steps, probe))
    say(f"at the end: {machine()}")
    emit("modes", summarise(plans, found, probe))


def make_spec(folder: Path, work: Workload) -> dict[str, Any]:
    """The run of a workload; its mode and steps are set by whoever makes it."""
    folder.mkdir()
    write_model(folder / "model", work.width, work.layers)
    write_prompts(folder / "prompts.jsonl", 8 * work.groups, work.prompt)
    trainer: dict[str, Any] = {}
    if work.reference:
        write_model(folder / "reference", *work.reference)
        trainer["reference"] = {"path": str(folder / "reference"), "dtype": "float32"}
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
        "algorithm": {"group_size": work.group_size, "prompts_per_step": work.groups, **work.algorithm},
        "optimizer": {"lr": 1e-12},
        "trainer": trainer,
        "rollout": {"max_concurrency": work.together},
        # Equal rewards carry no gradient: a step's learning would depend on how many groups have them.
        "reward": {"scorers": [{"name": f"{_rewards.__file__}:uneven"}]},
        "checkpoint": {"enabled": False},
    }


def planned(fleet: Fleet, spec: Mapping[str, Any], steps: int, probe: Probe) -> dict[str, Any]:
    """What auto chose, the seconds of a step that it predicted for each placement, and which of them it tried."""
    from headrace.client import Client

    made = {**spec, "steps": MOST_STEPS, "placement": {"mode": "auto", "measure_steps": steps}}
    before, adopted = probe.look(), []
    with Client(fleet.url, fleet.token) as client:
        run = client.submit(made).id
        for event in client.events(run):
            if event.type == "plan_adopted":
                adopted.append(event.data)
                if event.data.get("predicted_s"):
                    break
        client.cancel(run)
        client.wait(run, RUN_S)
    if not adopted or not adopted[-1].get("predicted_s"):
        raise RuntimeError(f"{run} has ended in {MOST_STEPS} steps before it chose a placement")
    *tries, chosen = adopted
    seconds = {style_named(words): found for words, found in chosen.get("alternatives", {}).items()}
    style = style_of(chosen)
    seconds[style] = chosen["predicted_s"]["step"]
    return {
        "style": style,
        "step_s": seconds,
        "tried": sorted({"collocated offloaded", *map(style_of, tries)}),
        "steps": chosen["from_step"],
        "reason": chosen["reason"],
        "speed": fmean((before.figure, probe.look().figure)),
    }


def style_of(plan: Mapping[str, Any]) -> str:
    """The placement of an adopted plan."""
    kind = plan.get("flow", "") + plan.get("memory", "")
    return plan["mode"] if plan["mode"] == "hybrid" else f"{plan['mode']} {kind}"


def style_named(words: str) -> str:
    """The placement that a plan's words name."""
    return next(style for style in STYLES if words.startswith(style))


def measured(fleet: Fleet, spec: Mapping[str, Any], style: str, steps: int, probe: Probe) -> Found:
    """Median seconds of the steps of one run after its WARM_UP."""
    from headrace.client import Client

    before = probe.look()
    with Client(fleet.url, fleet.token) as client:
        run = finished(client, {**spec, "steps": steps + WARM_UP, "placement": STYLES[style]})
        made = [step for step in client.metrics(run) if step.step > WARM_UP]
    speed = fmean((before.figure, probe.look().figure))
    seconds = [step.wall_s - sum(step.stage_s.get(stage, 0.0) for stage in LEFT_OUT) for step in made]
    last = {name: round(found, 3) for name, found in made[-1].stage_s.items()}
    say(f"  {style}: {median(seconds):.3f} s a step at speed {speed:.0f}; the last one {last}")
    return Found(median(seconds), speed)


def finished(client: Any, spec: Mapping[str, Any]) -> str:
    """The id of a run that has succeeded; RuntimeError with its reason when it has not."""
    run = client.wait(client.submit(dict(spec)).id, RUN_S)
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.id} is {run.state}: {run.reason}")
    return str(run.id)


def summarise(
    plans: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, list[Found]]], probe: Probe
) -> dict[str, float | None]:
    """The figures, as measured and at one speed of the machine; each workload goes to the reader."""
    raw = compare(plans, seconds_of(found))
    usual = probe.usual
    plans = {name: {**plan, "step_s": scaled(plan, usual)} for name, plan in plans.items()}
    say(f"seconds at the machine's usual speed, {usual:.0f}:")
    even = compare(plans, seconds_of(found, usual))
    speeds = {
        "probe_spread": probe.spread,
        "speed_spread": spread([speed.figure for speed in probe.seen]),
        "two_cores_vs_one": median(speed.two / speed.one for speed in probe.seen),
    }
    return raw | {f"{name}_scaled": figure for name, figure in even.items()} | speeds


def seconds_of(
    found: Mapping[str, Mapping[str, list[Found]]], usual: float = 0.0
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each run; with the machine's `usual` speed, what they would have been at it."""
    return {
        name: {
            style: [run.seconds * (run.speed / usual if usual else 1.0) for run in runs]
            for style, runs in styles.items()
        }
        for name, styles in found.items()
    }


def scaled(plan: Mapping[str, Any], usual: float) -> dict[str, float]:
    """Predicted seconds at the machine's usual speed."""
    return {style: seconds * plan["speed"] / usual for style, seconds in plan["step_s"].items()}


def compare(
    plans: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, float | None]:
    """The figures of some predicted and measured seconds."""
    medians = {
        name: {style: median(turns) for style, turns in styles.items()} for name, styles in found.items()
    }
    winners = {name: min(styles, key=lambda style: styles[style]) for name, styles in medians.items()}
    rows = [
        (name, style, plans[name]["step_s"][style], seconds, min(found[name][style]), max(found[name][style]),
         "tried" if style in plans[name]["tried"] else "", "chosen" if plans[name]["style"] == style else "",
         "wins" if winners[name] == style else "")
        for name, styles in medians.items()
        for style, seconds in styles.items()
    ]  # fmt: skip
    table(("workload", "placement", "predicted", "measured", "least", "most", "", "", ""), rows)
    untried = [(predicted, seconds) for _, _, predicted, seconds, _, _, tried, *_ in rows if not tried]
    figures: dict[str, float | None] = {
        "auto_vs_best": max(
            styles[plans[name]["style"]] / styles[winners[name]] for name, styles in medians.items()
        ),
        "prediction_error": fmean(abs(predicted / seconds - 1) for _, _, predicted, seconds, *_ in rows),
        "prediction_error_untried": fmean(abs(predicted / seconds - 1) for predicted, seconds in untried)
        if untried
        else None,
        "winners_right": fmean(
            mode_of(plans[name]["style"]) == mode_of(winner) for name, winner in winners.items()
        ),
        "winners": float(len({mode_of(winner) for winner in winners.values()})),
    }
    each = {
        f"{name}_{style.replace(' ', '_')}_s": seconds
        for name, styles in medians.items()
        for style, seconds in styles.items()
    }
    return figures | each


def mode_of(style: str) -> str:
    """The mode of a placement."""
    return style.partition(" ")[0]


if __name__ == "__main__":
    main()
