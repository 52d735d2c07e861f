"""The long-tailed workload of `elastic.py --here` with steps that run ahead, beside every synchronous placement."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _elastic_here import APART, MODES, ONE, OPTIONS, STILL_STEPS, Here, make_spec, run_steps
from _elastic_model import Measured
from _harness import Fleet, machine, say, table
from _tail_model import write_tail_model, write_tail_prompts

BOUNDS = (1, 4)
WAITS = ("wait for data", "wait for tail")


@dataclass(frozen=True)
class AsyncHere(Here):
    """As `Here`, with learning that takes about as long as generating."""

    every: int = 1
    groups: int = 24
    steps: int = 4


def figures_here(here: AsyncHere) -> dict[str, float]:
    """The figures of `asynchronous.py`."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model, prompts = Path(folder) / "model", Path(folder) / "prompts.jsonl"
        bands = here.groups if here.alike else 1
        write_tail_model(model, here.width, here.layers, bands)
        write_tail_prompts(prompts, here.groups, bands, here.every)
        with Fleet(*OPTIONS) as fleet:
            measured = _measure(fleet, here, model, prompts)
    say(f"at the end: {machine()}")
    return figures(measured)


def spec_of(here: AsyncHere, model: Path, prompts: Path, bound: int) -> dict[str, Any]:
    """A run whose slots start up to `bound` versions ahead, a core for each side."""
    # The first steps draw on what was decoded before they began, and the last ones have nothing to run ahead to.
    steps = here.steps + STILL_STEPS + 3 * bound
    mode: dict[str, Any] = {"placement": {**APART, "flow": "pipelined"}, "rollout": ONE, "helpers": 0}
    spec = make_spec(here, model, prompts, steps, **mode)
    spec["algorithm"]["max_staleness"] = bound
    spec["rollout"]["max_concurrency"] *= bound + 1
    return spec


def _measure(fleet: Fleet, here: AsyncHere, model: Path, prompts: Path) -> dict[str, list[Measured]]:
    specs = {
        mode: make_spec(here, model, prompts, here.steps + STILL_STEPS, **given)
        for mode, given in MODES.items()
    }
    specs |= {f"asynchronous {bound}": spec_of(here, model, prompts, bound) for bound in BOUNDS}
    measured: dict[str, list[Measured]] = {mode: [] for mode in specs}
    began = time.monotonic()
    for turn in range(here.turns):
        spent = time.monotonic() - began
        if turn and spent * (turn + 1) / turn > here.budget_s:
            say(f"{turn} of {here.turns} turns are made in {spent:.0f} s: the next would not end in time")
            break
        names = list(specs)
        for mode in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = STILL_STEPS + 2 * specs[mode]["algorithm"].get("max_staleness", 0)
            found = run_steps(fleet, specs[mode])[begin : begin + here.steps]
            say(f"{machine()}; {mode}: {', '.join(f'{step.wall_s:.2f}' for step in found)} s")
            measured[mode] += found
    return measured


def figures(measured: Mapping[str, Sequence[Measured]]) -> dict[str, float]:
    """From the measured steps of each mode."""
    walls = {mode: median(step.wall_s for step in steps) for mode, steps in measured.items()}
    synchronous = min(MODES, key=lambda mode: walls[mode])
    table(
        ("placement", "median, s", "generate, s", "learn, s", "waits, s"),
        [
            (mode, f"{walls[mode]:.2f}", *(f"{typical(steps, stage):.2f}" for stage in ("generate", "learn")),
             f"{sum(typical(steps, stage) for stage in WAITS):.2f}")
            for mode, steps in measured.items()
        ],
    )  # fmt: skip
    say(f"fastest synchronous: {synchronous}")
    found = {"sync_s_here": walls[synchronous], "learn_over_generate_apart": _balance(measured["pipelined"])}
    for bound in BOUNDS:
        steps, name = measured[f"asynchronous {bound}"], "" if bound == BOUNDS[-1] else f"_k{bound}"
        wall = walls[f"asynchronous {bound}"]
        # The generator's own work is a step's answers beside a learner, with their tail; the learner's is told.
        ideal = max(typical(steps, "learn"), typical(measured["pipelined"], "generate"))
        found[f"async_vs_sync_here{name}"] = walls[synchronous] / wall
        found[f"period_vs_ideal{name}"] = wall / ideal
        found[f"async_s_k{bound}"] = wall
        waits = sum(step.seconds(WAITS[1]) for step in steps)
        found[f"waited_share_k{bound}"] = waits / sum(step.wall_s for step in steps)
    return found


def typical(steps: Sequence[Measured], stage: str) -> float:
    """Median seconds of a stage."""
    return median(step.seconds(stage) for step in steps)


def _balance(steps: Sequence[Measured]) -> float:
    return typical(steps, "learn") / typical(steps, "generate")
