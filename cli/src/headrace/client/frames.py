"""What the client returns, as tables of pandas or polars and as curves; for notebooks. Neither is a dependency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.client.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.client.client import Client

TABLES = ("pandas", "polars")
KEYS = ("reward_mean", "figures.loss", "tokens_per_s", "wall_s")
WIDTH, HEIGHT = 4.0, 3.0


class Row(Protocol):
    """A resource of the coordinator."""

    @property
    def raw(self) -> dict[str, Any]: ...


def frame(rows: Iterable[Row], library: Literal["", "pandas", "polars"] = "") -> Any:
    """A table with a row for each resource, such as `client.metrics(run)`, and a column for each of its keys.

    Keys within keys are columns with dots, such as "stage_s.learn"; what a row lacks is missing. `library`: pandas or
    polars; by default the first of them that is installed. HeadraceError INVALID where none is.
    """
    flat = [dict(_leaves(row.raw)) for row in rows]
    columns = dict.fromkeys(key for row in flat for key in row)
    found = _library(library)
    return found.DataFrame({key: [row.get(key) for row in flat] for key in columns})


def plot(client: Client, runs: str | Sequence[str], keys: Sequence[str] = KEYS) -> Any:
    """A figure of matplotlib with a chart for each key that any of the runs has, over their steps; a curve a run.

    HeadraceError INVALID where matplotlib is missing, or no run has any of the keys.
    """
    named = [runs] if isinstance(runs, str) else list(runs)
    series = {run: [dict(_leaves(step.raw)) for step in client.metrics(run)] for run in named}
    shown = [key for key in keys if any(row.get(key) is not None for rows in series.values() for row in rows)]
    if not shown:
        known = sorted({key for rows in series.values() for row in rows for key in row})
        fix = f"name one of: {', '.join(known)}" if known else "wait for the first step"
        raise HeadraceError("INVALID", f"{', '.join(named)}: no step has {' or '.join(keys)}; {fix}")
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise HeadraceError("INVALID", "matplotlib is not installed; pip install matplotlib") from error
    figure, axes = pyplot.subplots(1, len(shown), figsize=(WIDTH * len(shown), HEIGHT), squeeze=False)
    for axis, key in zip(axes[0], shown, strict=True):
        for run, rows in series.items():
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            axis.plot(*zip(*points, strict=True) if points else ([], []), label=run)
        axis.set(xlabel="step", title=key)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    pyplot.close(figure)  # or a notebook shows it twice
    return figure


def live(client: Client, run: str, keys: Sequence[str] = KEYS) -> None:
    """Draws a run's curves anew after each step until it ends; in Jupyter, in place of those before."""
    display = import_module("IPython.display")
    shown = display.display(display.HTML(f"{run}: no step yet"), display_id=True)
    for event in client.events(run):
        if event.type == "step_committed":
            shown.update(plot(client, run, keys))


def _leaves(value: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, each in value.items():
        found += _leaves(each, f"{before}{key}.") if isinstance(each, Mapping) else [(f"{before}{key}", each)]
    return found


def _library(name: str) -> Any:
    for each in [name] if name else TABLES:
        try:
            return import_module(each)
        except ImportError:
            continue
    wanted = name or " or ".join(TABLES)
    raise HeadraceError("INVALID", f"{wanted} is not installed; pip install {name or TABLES[0]}")
