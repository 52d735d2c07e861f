"""The list of runs: a table on a wide terminal, two lines a run on a narrow one."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from headrace_cli.output import state_text, table
from headrace_cli.show.runs import age, heldout_change, sentence

if TYPE_CHECKING:
    from headrace.client import Run
    from rich.console import RenderableType

WIDE = 100
"""Columns from which on the reason has room beside the figures."""
NARROW_COLUMNS = ("run", "state", "place", "step", "age")


def runs_list(runs: Sequence[Run], width: int) -> RenderableType:
    """Each run with its state, place in the queue, progress, and why or what it waits for; `width` in columns."""
    return _table(runs) if width >= WIDE else _lines(runs, width)


def _table(runs: Sequence[Run]) -> RenderableType:
    ranked = any(run.priority for run in runs)
    rows = [
        (
            run.id,
            state_text(run.state),
            run.place or "",
            *([run.priority] if ranked else []),
            f"{run.step}/{run.steps}",
            heldout_change(run),
            age(run.created_at),
            sentence(run),
        )
        for run in runs
    ]
    priority = [">priority"] if ranked else []
    return table(("run", "state", ">place", *priority, ">step", "held-out", ">age", "why"), rows)


def _lines(runs: Sequence[Run], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = [_cells(run) for run in runs]
    widths = [max(len(row[i]) for row in (NARROW_COLUMNS, *rows)) for i in range(len(NARROW_COLUMNS))]
    parts = [Text("  ".join(_padded(NARROW_COLUMNS, widths)), style="bold")]
    for run, cells in zip(runs, rows, strict=True):
        name, state, *rest = _padded(cells, widths)
        parts.append(Text("  ").join([Text(name), state_text(state, run.state), Text("  ".join(rest))]))
        why = sentence(run) + (f" (priority {run.priority})" if run.priority else "")
        # Wrapped here: a console that writes to a file wraps nothing.
        parts += [Text(f"  {line}", style="dim") for line in wrap(why, width - 2, break_on_hyphens=False)]
    return Group(*parts)


def _cells(run: Run) -> tuple[str, ...]:
    place = str(run.place) if run.place else ""
    return run.id, run.state, place, f"{run.step}/{run.steps}", age(run.created_at)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
