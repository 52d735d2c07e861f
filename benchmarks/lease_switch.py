"""How long devices take to change hands: `python benchmarks/lease_switch.py`.

A real fleet on two cores makes long-tailed steps of a small model in turns (`_elastic_here.py`), where devices change
hands in two ways, both of which are measured by the coordinator, from its order until the reply:

- *Inside a step* the lease of a rollout that decodes is revoked: it hands over what it has not finished and stops, its
  devices are granted to a helper, and the helper has taken the step's weights and begun the step. From revoke to
  granted and working: `switch_ms`, the median, `switch_ms_p90`, and `switches`, how many there were.
- *Between generating and learning*, twice a step: one side gives its memory and its lease back, the other side takes
  the lease and is awake; an engine has verified the new weights by then. `hand_over_ms`, the median of half a step's
  `switch` in a run without helpers, and `hand_over_ms_p90`.

With `--model` the same for a model of yours, such as SmolLM2-135M (`headrace_modelkit.presets.smollm2`): few prompts
with one word for an answer, and some with a long one. `switch_s`: the greater of the medians of both ways, in seconds.

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _elastic_here import MODES, OPTIONS, Here, make_spec
from _harness import Fleet, emit, machine, say
from _tail_model import write_tail_model, write_tail_prompts
from modes import finished

ELASTIC, STILL = "elastic turns", "collocated"
"""The modes whose steps are read: devices move inside a step, and only between its sides."""
GROUPS, REAL_GROUPS, REAL_SIZE = 24, 8, 2
"""Groups of a step of the small model; groups of a model that answers, and answers of each."""
LONGEST = 64
"""Most tokens of an answer of a model that answers."""
HAND_OVERS = 2
"""Times that devices change hands between generating and learning in a step."""
STILL_STEPS = 2
"""Steps that an elastic run measures before it moves anything."""
SHORT, LONG = "Say one word about {}.", "Tell a long story about {}."
THINGS = ("rain", "a fox", "bread", "the sea", "a clock", "snow", "an old map", "wheels")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=16, help="measured steps of a run")
    parser.add_argument("--model", type=Path, help="directory of a model to measure in place of a small one")
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, Fleet(*OPTIONS) as fleet:
        specs = (
            real(options.model, Path(folder), options.steps)
            if options.model
            else small(Path(folder), options.steps)
        )
        moves = [seconds for step in steps_of(fleet, specs[ELASTIC]) for seconds in moved(step)]
        turns = [step.stage_s["switch"] / HAND_OVERS for step in steps_of(fleet, specs[STILL])]
    say(f"{len(moves)} moves inside steps; {len(turns)} steps without; at the end: {machine()}")
    emit("lease_switch", summarise(moves, turns))


def small(folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Runs of a small model with a long tail of answers: those in which `elastic.py --here` sees devices move."""
    here = Here(turns=1, steps=steps, groups=GROUPS)
    write_tail_model(folder / "model", here.width, here.layers, here.groups)
    write_tail_prompts(folder / "prompts.jsonl", here.groups, here.groups, here.every)
    return _specs(here, folder / "model", folder / "prompts.jsonl", steps)


def real(model: Path, folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Runs of a model that answers: one prompt in four asks for a long answer."""
    here = Here(turns=1, steps=steps, groups=REAL_GROUPS, size=REAL_SIZE)
    rows = [
        {"question": (LONG if place % 4 == 0 else SHORT).format(THINGS[place % 7]), "answer": ""}
        for place in range(here.groups * (steps + STILL_STEPS))
    ]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    specs = _specs(here, model, prompts, steps)
    for spec in specs.values():
        spec["data"]["prompt"] = {"chat": True}
        spec["model"]["max_context"] = 256
        spec["sampling"]["max_new_tokens"] = LONGEST
        # Any reward that differs inside a group will do: equal rewards carry no gradient.
        spec["reward"] = {"scorers": [{"name": "length", "options": {"target": 0, "limit": LONGEST + 1}}]}
    return specs


def _specs(here: Here, model: Path, prompts: Path, steps: int) -> dict[str, dict[str, Any]]:
    return {
        mode: make_spec(here, model, prompts, steps + STILL_STEPS, **MODES[mode]) for mode in (ELASTIC, STILL)
    }


def steps_of(fleet: Fleet, spec: dict[str, Any]) -> list[Any]:
    """The measured steps of a run."""
    from headrace.client import Client

    with Client(fleet.url, fleet.token) as client:
        return list(client.metrics(finished(client, spec)))[STILL_STEPS:]


def moved(step: Any) -> list[float]:
    """Seconds of each move inside a step: hand-overs between the stages are of no single device."""
    return [stages["switch"] for stages in step.devices.values() if "switch" in stages]


def summarise(moves: Sequence[float], turns: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds of a change of hands, and the slower way in seconds; None where no device moved."""
    return {
        "switch_ms": 1000 * median(moves) if moves else None,
        "switch_ms_p90": 1000 * upper(moves) if moves else None,
        "switches": float(len(moves)),
        "hand_over_ms": 1000 * median(turns),
        "hand_over_ms_p90": 1000 * upper(turns),
        "switch_s": max(median(moves), median(turns)) if moves else None,
    }


def upper(seconds: Sequence[float]) -> float:
    """The nine-tenths quantile."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]


if __name__ == "__main__":
    main()
