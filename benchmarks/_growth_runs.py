"""Many small runs one after the other on a real fleet, and how large each service is then. Prints nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from _harness import Fleet, say
from headrace.client import Client, load_spec

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny.yaml"
FIRST, SAY_EVERY = 10, 10
RUN_S = 120.0
ITEMS = 4_000
"""Of the data set of every fifth run, which is one of its own."""
SMALL = {
    "steps": 2,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 4,
    "trainer.warmup.steps": 1,
    "evaluation.every": 0,
    "data.heldout": 4,
}


def growth_of(runs: int, within_s: float) -> dict[str, float]:
    """`SERVICE_growth`: resident bytes after all runs over those after ten; the worst one's; and how many `runs`.

    No run is begun `within_s` seconds after the first, so that a slow machine gives its figures too.
    """
    begun = time.monotonic()
    sizes: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-growth-") as folder:
        model = Path(folder) / "tiny"
        subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
        with Fleet() as fleet, Client(fleet.url, fleet.token, patience_s=RUN_S) as client:
            last = ""
            for number in range(runs):
                if number > FIRST and time.monotonic() - begun > within_s:
                    break
                spec = spec_of(number, model, Path(folder), last)
                run = client.wait(client.submit(spec).id, RUN_S)
                if run.state != "SUCCEEDED":
                    raise RuntimeError(f"run {number} is {run.state}: {run.reason}")
                last = run.id if "environment" not in spec else last
                for kind, size in _sizes(fleet).items():
                    sizes.setdefault(kind, []).append(size)
                if (number + 1) % SAY_EVERY == 0:
                    words = ", ".join(f"{kind} {each[-1] / 1e6:.0f}" for kind, each in sizes.items())
                    say(f"{number + 1} runs, MB: {words}")
    made = len(next(iter(sizes.values())))
    if made < runs:
        say(f"{made} of {runs} runs within {within_s:g} s")
    return figures(sizes) | {"runs": float(made)}


def figures(sizes: dict[str, list[float]]) -> dict[str, float]:
    """From each service's sizes after each run: the median of the last ones over that around the tenth run."""
    found = {
        f"{kind}_growth": median(each[-3:]) / median(each[FIRST - 2 : FIRST + 1])
        for kind, each in sizes.items()
    }
    return found | {"worst_growth": max(found.values())}


def spec_of(number: int, model: Path, folder: Path, last: str) -> dict[str, Any]:
    """A run of text, every third time a fork of the last one or of robots, every fifth on a data set of its own."""
    if number % 6 == 5:
        return {
            "name": "growth",
            "workflow": "embodied",
            "steps": 2,
            "model": {"policy": {"kind": "mlp", "hidden": [8], "log_std": 0.0}},
            "environment": {"tasks": ["Pendulum-v1"], "count": 2, "max_episode_steps": 8},
            "data": {"options": {"starts": 16}},
            "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 4},
            "export": False,
        }
    overrides: dict[str, Any] = {**SMALL, "model.path": str(model), "seed": number}
    if number % 5 == 4:
        file = folder / f"items-{number}.jsonl"
        file.write_text("".join(f'{{"question": "{n}=", "answer": "{n + number}"}}\n' for n in range(ITEMS)))
        overrides |= {"data.source": "jsonl", "data.options": {"path": str(file)}}
    elif number % 6 == 2 and last:
        overrides |= {"from_checkpoint": {"run": last}, "steps": 4}
    return load_spec(TINY, overrides)


def _sizes(fleet: Fleet) -> dict[str, float]:
    return {each["kind"]: psutil.Process(each["pid"]).memory_info().rss for each in fleet.processes()}
