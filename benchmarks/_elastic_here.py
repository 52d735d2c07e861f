"""A long-tailed run on this machine's two cores: every static mode, and the same work with devices that move.

Answers have the published lengths in tokens (`_tail_model.py`), and all runs make the same ones (seeds, prompts and
model are the same, the learning rate is too small to move a weight).
A short run with fewer answers tells the two parts of the decoding pace apart, for the simulated cluster
(`_elastic_model.py`), which is compared with what was measured.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import _rewards
from _elastic_model import Measured, Model
from _harness import Fleet, machine, say, table
from _tail_model import LONGEST, QUANTILES, write_tail_model, write_tail_prompts
from modes import finished

SMALL_GROUPS, SMALL_STEPS = 6, 4
MICRO_BATCH = 512
"""Tokens that the trainer learns at once: a group or two, so that the last ones can be divided."""
STILL_STEPS = 5
"""The first, in which torch warms up, those that an elastic run measures before it moves anything, and its first two
with moves: the first time has what is done once."""
ONE, TWO = {"instances": 1}, {"instances": 2}
APART = {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"]}
MODES: dict[str, dict[str, Any]] = {
    "collocated": {"placement": {"mode": "collocated"}, "rollout": TWO, "helpers": 0},
    "pipelined": {"placement": {**APART, "flow": "pipelined"}, "rollout": ONE, "helpers": 0},
    "hybrid": {"placement": {"mode": "hybrid"}, "rollout": ONE, "helpers": 0},
    "elastic turns": {"placement": {"mode": "collocated"}, "rollout": TWO, "helpers": 1},
    "elastic apart": {
        "placement": {**APART, "flow": "pipelined"},
        "rollout": {**ONE, "helpers": 1},
        "helpers": 1,
    },
}
STATIC = ("collocated", "pipelined", "hybrid")
ELASTIC = ("elastic turns", "elastic apart")
SIMULATED = ("collocated", "pipelined", *ELASTIC)
OPTIONS = ("--devices", "cpu:0,cpu:1", "--simulator", "0", "--rollout", "2", "--trainer", "2")


@dataclass(frozen=True)
class Here:
    """What is run: `groups` of `size` answers a step, `alike` and `every` as in `elastic.HERE`; the model's size."""

    turns: int = 1
    steps: int = 3
    width: int = 384
    layers: int = 12
    groups: int = 40
    size: int = 4
    alike: int = 1
    every: int = 3
    budget_s: float = 900.0
    """No turn begins that would end later, by the seconds of the turns before it; one is always made."""


Turns = dict[str, list[list[Measured]]]
"""Measured steps by mode: a list of steps for each turn."""


def figures_here(here: Here) -> dict[str, float]:
    """`elastic_speedup_here` with its medians, `simulated_vs_measured_error` and what it comes from, and the rest."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model, prompts = Path(folder) / "model", Path(folder) / "prompts.jsonl"
        bands = here.groups if here.alike else 1
        write_tail_model(model, here.width, here.layers, bands)
        write_tail_prompts(prompts, here.groups, bands, here.every)
        with Fleet(*OPTIONS) as fleet:
            small = _run(fleet, make_spec(here, model, prompts, SMALL_STEPS, **MODES["collocated"],
                                      groups=SMALL_GROUPS))[0][1:]  # fmt: skip
            measured, helped = _measure(fleet, here, model, prompts)
    say(f"at the end: {machine()}")
    return _figures(here, small, measured, helped)


def _figures(
    here: Here, small: list[Measured], measured: Turns, helped: Mapping[str, int]
) -> dict[str, float]:
    steps = {mode: [step for turn in turns for step in turn] for mode, turns in measured.items()}
    walls = {mode: [step.wall_s for step in found] for mode, found in steps.items()}
    static, elastic = (min(modes, key=lambda mode: median(walls[mode])) for modes in (STATIC, ELASTIC))
    model = Model(steps["collocated"], small, steps["pipelined"], here.size)
    simulated = {mode: model.step_s(mode, steps[mode]) for mode in SIMULATED}
    errors = {mode: abs(simulated[mode] / fmean(walls[mode]) - 1) for mode in SIMULATED}
    told = (
        (f"{simulated[mode]:.2f}", f"{errors[mode]:.1%}") if mode in errors else ("", "") for mode in walls
    )
    table(
        ("mode", "median, s", "fastest, s", "slowest, s", "mean, s", "simulated, s", "error"),
        [
            (mode, f"{median(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}", f"{fmean(each):.2f}", *said)
            for (mode, each), said in zip(walls.items(), told, strict=True)
        ],
    )
    tokens = sorted(count for step in steps[static] for count in step.tokens)
    shape = ", ".join(
        f"{share:.0%} {tokens[min(len(tokens) - 1, int(share * len(tokens)))]}" for share in QUANTILES
    )
    say(f"tokens of an answer: {shape}; fastest: {static}, and with devices that move {elastic}")
    fixed = min((mode for mode in SIMULATED if mode in STATIC), key=lambda mode: median(walls[mode]))
    return {
        "elastic_speedup_here": median(walls[static]) / median(walls[elastic]),
        "static_s_here": median(walls[static]),
        "elastic_s_here": median(walls[elastic]),
        "elastic_turns_s_here": median(walls["elastic turns"]),
        "elastic_apart_s_here": median(walls["elastic apart"]),
        "helped_share_here": helped[elastic] / (here.groups * len(steps[elastic])),
        "simulated_vs_measured_error": max(errors[fixed], errors[elastic]),
        "simulated_speedup_here": simulated[fixed] / simulated[elastic],
        "elastic_bound_here": simulated[fixed] / model.bound_s(steps[fixed]),
        "learn_over_generate_here": median(
            step.seconds("learn") / step.seconds("generate") for step in steps["collocated"]
        ),
        "switch_s_here": median(step.seconds("switch") for step in steps[elastic]),
        "steps_here": float(len(steps[elastic])),
    }


def _measure(fleet: Fleet, here: Here, model: Path, prompts: Path) -> tuple[Turns, dict[str, int]]:
    """The measured steps of each mode, which take turns in another order each time; groups that helpers learned."""
    measured: Turns = {mode: [] for mode in MODES}
    helped, began = dict.fromkeys(MODES, 0), time.monotonic()
    for turn in range(here.turns):
        spent = time.monotonic() - began
        if turn and spent * (turn + 1) / turn > here.budget_s:
            say(f"{turn} of {here.turns} turns are made in {spent:.0f} s: the next would not end in time")
            break
        names = list(MODES)
        for mode in names[turn % len(names) :] + names[: turn % len(names)]:
            steps, groups = _run(
                fleet, make_spec(here, model, prompts, here.steps + STILL_STEPS, **MODES[mode])
            )
            found = steps[STILL_STEPS:]
            seconds = ", ".join(f"{step.wall_s:.2f}" for step in found)
            say(f"{machine()}; {mode}: {seconds} s" + (f"; {groups} groups helped" if groups else ""))
            measured[mode].append(found)
            helped[mode] += groups
    return measured, helped


def make_spec(
    here: Here,
    model: Path,
    prompts: Path,
    steps: int,
    *,
    placement: dict[str, Any],
    rollout: dict[str, Any],
    helpers: int,
    groups: int = 0,
) -> dict[str, Any]:
    """A run of a mode, with so many `groups` a step if they are not as many as usual."""
    groups = groups or here.groups
    return {
        "steps": steps,
        "seed": 7,
        "export": False,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "jsonl", "options": {"path": str(prompts)}, "prompt": {"chat": False}},
        "sampling": {"max_new_tokens": LONGEST},
        "algorithm": {"group_size": here.size, "prompts_per_step": groups},
        "optimizer": {"lr": 1e-12},
        "trainer": {"micro_batch_tokens": MICRO_BATCH, "helpers": helpers},
        "rollout": {"max_concurrency": groups * here.size, **rollout},
        "reward": {"scorers": [{"name": f"{_rewards.__file__}:by_length"}]},
        "placement": placement,
        "checkpoint": {"enabled": False},
        "tracking": {"trajectories_per_step": groups * here.size},  # the lengths of all answers are read back
    }


def _run(fleet: Fleet, spec: dict[str, Any]) -> tuple[list[Measured], int]:
    """The steps of a finished run, and the groups that helpers contributed to those that count."""
    from headrace.client import Client

    with Client(fleet.url, fleet.token) as client:
        run = finished(client, spec)
        groups: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for each in client.trajectories(run):
            groups[each.step][each.prompt_ordinal].append(each)
        steps = [
            Measured(step.wall_s, dict(step.stage_s), *answers(groups[step.step].values()))
            for step in client.metrics(run)
        ]
        whole = spec["algorithm"]["group_size"] * spec["algorithm"]["prompts_per_step"]
        assert {len(step.tokens) for step in steps} == {whole}, (
            "answers are missing in what the run has stored"
        )
        certificates = [item for item in client.certificates(run) if item.live]
    return steps, _helped(certificates)


def run_steps(fleet: Fleet, spec: dict[str, Any]) -> list[Measured]:
    """The steps of a finished run."""
    return _run(fleet, spec)[0]


def answers(groups: Iterable[Sequence[Any]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens of a step's answers, group after group, and whether each is learned from."""
    flat = [(each.tokens, len({e.reward for e in group}) > 1) for group in groups for each in group]
    return tuple(tokens for tokens, _ in flat), tuple(learned for _, learned in flat)


def _helped(certificates: Sequence[Any]) -> int:
    return sum(len(groups) for item in certificates[STILL_STEPS:] for groups in item.helped.values())
