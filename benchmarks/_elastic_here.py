"""A long-tailed run on this machine's two cores: every static mode, and the same work with devices that move.

Answers end by themselves: an untrained model draws its end token about once in as many tokens as its vocabulary has.
All runs make the same answers (seeds, prompts and model are the same, the learning rate is too small to move a weight).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _harness import Fleet, machine, say, table
from streaming import write_model, write_prompts

GROUPS, GROUP_SIZE, LONGEST = 24, 4, 260
STILL_STEPS = 3
"""The first, in which torch warms up, and those that an elastic run measures before it moves anything."""
RUN_S, LOOK_S = 1200.0, 0.5
ONE, TWO = {"instances": 1}, {"instances": 2}
APART = {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"]}
MODES: dict[str, dict[str, Any]] = {
    "collocated": {"placement": {"mode": "collocated"}, "rollout": TWO, "helpers": 0},
    "pipelined": {"placement": {**APART, "flow": "pipelined"}, "rollout": ONE, "helpers": 0},
    "elastic": {"placement": {"mode": "collocated"}, "rollout": TWO, "helpers": 1},
}
STATIC = ("collocated", "pipelined")
Steps = list[dict[str, Any]]


def figures_here(turns: int, steps: int, width: int, layers: int) -> dict[str, float]:
    """`elastic_speedup_here` with its medians, `switch_s` and the share of groups that helpers learned."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model, prompts = Path(folder) / "model", Path(folder) / "prompts.jsonl"
        write_model(model, width, layers)
        write_prompts(prompts, GROUPS * (steps + STILL_STEPS))
        measured = _measure(model, prompts, turns, steps + STILL_STEPS)
    walls = {mode: [step["wall_s"] for step in found] for mode, found in measured.items()}
    table(("mode", "median, s", "fastest, s", "slowest, s"), [
        (mode, f"{median(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}") for mode, each in walls.items()
    ])  # fmt: skip
    static = min(STATIC, key=lambda mode: median(walls[mode]))
    say(f"fastest static mode: {static}")
    helped = sum(len(groups) for step in measured["elastic"] for groups in step["helped"].values())
    return {
        "elastic_speedup_here": median(walls[static]) / median(walls["elastic"]),
        "static_s_here": median(walls[static]),
        "elastic_s_here": median(walls["elastic"]),
        "helped_share_here": helped / (GROUPS * len(measured["elastic"])),
        "switch_s": median(step["stage_s"].get("switch", 0.0) for step in measured["elastic"]),
    }


def _measure(model: Path, prompts: Path, turns: int, steps: int) -> dict[str, Steps]:
    """The measured steps of each mode; the modes take turns, in another order each time."""
    measured: dict[str, Steps] = {mode: [] for mode in MODES}
    options = ("--devices", "cpu:0,cpu:1", "--simulator", "0", "--rollout", "2", "--trainer", "2")
    with Fleet(*options) as fleet:
        for turn in range(turns):
            names = list(MODES)
            for mode in names[turn % len(names) :] + names[: turn % len(names)]:
                found = _run(fleet, _spec(model, prompts, steps, **MODES[mode]))[STILL_STEPS:]
                seconds = ", ".join(f"{step['wall_s']:.2f}" for step in found)
                say(f"{machine()}; {mode}: {seconds} s")
                measured[mode] += found
    return measured


def _spec(
    model: Path,
    prompts: Path,
    steps: int,
    *,
    placement: dict[str, Any],
    rollout: dict[str, Any],
    helpers: int,
) -> dict[str, Any]:
    return {
        "steps": steps,
        "seed": 7,
        "export": False,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "jsonl", "options": {"path": str(prompts)}, "prompt": {"chat": False}},
        "sampling": {"max_new_tokens": LONGEST},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": GROUPS},
        "optimizer": {"lr": 1e-12},
        "trainer": {"micro_batch_tokens": 1024, "helpers": helpers},
        "rollout": {"max_concurrency": GROUPS * GROUP_SIZE, **rollout},
        # Any reward that differs inside a group will do: equal rewards carry no gradient.
        "reward": {"scorers": [{"name": "length", "options": {"target": 0, "limit": LONGEST + 1}}]},
        "placement": placement,
        "checkpoint": {"enabled": False},
    }


def _run(fleet: Fleet, spec: dict[str, Any]) -> Steps:
    """The steps of a finished run as its metrics show them, each with what helpers contributed."""
    from headrace.client import Client

    give_up_at = time.monotonic() + RUN_S
    with Client(fleet.url, fleet.token) as client:
        done = client.submit(spec)
        while not done.ended and time.monotonic() < give_up_at:
            time.sleep(LOOK_S)
            done = client.get(done.id)
        if done.state != "SUCCEEDED":
            raise RuntimeError(f"{done.name} is {done.state}: {done.reason}")
        helped = {item.step: item.helped for item in client.certificates(done.id) if item.live}
        committed = [event for event in client.events(done.id) if event.type == "step_committed"]
    views = [event.data["view"] for event in committed]
    return [{**view, "helped": helped.get(view["step"], {})} for view in views]
