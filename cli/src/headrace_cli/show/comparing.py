"""Several runs side by side: keys of their specs that differ, and their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from headrace_cli.output import state_text, table
from headrace_cli.show.runs import has_given_answers, heldout

if TYPE_CHECKING:
    from headrace.client import Run, Step
    from rich.console import Group

UNSET = "–"
LAST_STEPS = 10
"""Figures of a run's end are means over so many steps: one step's reward is mostly noise."""


def comparison(runs: Sequence[tuple[Run, Sequence[Step]]]) -> dict[str, Any]:
    """`spec`: by key, its value in each run, of keys whose values differ; None where a run leaves it out.
    `figures`: by name, that of each run; None where it has none.
    """
    flat = [dict(_leaves(run.spec)) for run, _ in runs]
    keys = sorted({key for each in flat for key in each})
    differing = {key: [each.get(key) for each in flat] for key in keys}
    figures = [_figures(run, steps) for run, steps in runs]
    return {
        "runs": [run.id for run, _ in runs],
        "states": [run.state for run, _ in runs],
        "spec": {key: found for key, found in differing.items() if any(each != found[0] for each in found)},
        "figures": {
            name: [each.get(name) for each in figures]
            for name in dict.fromkeys(name for each in figures for name in each)
        },
    }


def _leaves(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(key, value)]
    return [leaf for name, each in value.items() for leaf in _leaves(each, f"{key}.{name}" if key else name)]


def _figures(run: Run, steps: Sequence[Step]) -> dict[str, float]:
    found: dict[str, float] = {"steps": run.step}
    if scores := [each.score for each in heldout(run)]:
        found |= {"held-out before": scores[0], "held-out last": scores[-1], "held-out best": max(scores)}
    if not steps:
        return found
    last = steps[-LAST_STEPS:]
    if all(map(has_given_answers, steps)):
        found["loss, last steps"] = sum(step.figures["loss"] for step in last) / len(last)
    elif rewards := [step.reward_mean for step in last if step.reward_mean is not None]:
        found["reward, last steps"] = sum(rewards) / len(rewards)
    if speeds := [step.tokens_per_s for step in steps if step.tokens_per_s]:
        found["tokens/s, median"] = median(speeds)
    found["seconds a step, median"] = median(step.wall_s for step in steps)
    found["seconds of steps"] = sum(step.wall_s for step in steps)
    return found


def comparison_tables(found: Mapping[str, Any], width: int) -> Group:
    """A column a run; on a terminal too narrow for that, a line a value."""
    from rich.console import Group

    runs: list[str] = found["runs"]
    figures = [("state", *found["states"])]
    figures += [(name, *map(_figure, each)) for name, each in found["figures"].items()]
    spec = [(key, *map(_value, each)) for key, each in found["spec"].items()]
    return Group(
        _side_by_side("figures", figures, runs, width),
        _side_by_side("what differs in their specs", spec, runs, width)
        if spec
        else "their specs are the same",
    )


def _side_by_side(title: str, rows: Sequence[Sequence[str]], runs: Sequence[str], width: int) -> Any:
    sizes = [max(len(str(row[at])) for row in [("", *runs), *rows]) for at in range(len(runs) + 1)]
    if sum(sizes) + 3 * len(sizes) <= width:
        shown = [(row[0], *(state_text(each) for each in row[1:])) for row in rows]
        return table(("", *runs), shown, title)
    lines = [(row[0] if at == 0 else "", run, row[at + 1]) for row in rows for at, run in enumerate(runs)]
    return table(("", "run", "value"), lines, title, narrow=True)


def _figure(value: float | None) -> str:
    return UNSET if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def _value(value: Any) -> str:
    """As JSON where it is no plain value; paths below the working directory without it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return UNSET if value is None else text.replace(f"{Path.cwd()}/", "")
