"""A run as a picture that renews itself: progress, last steps, what devices do, what is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace_cli.output import STATE_STYLES, state_text
from headrace_cli.show.fleet import short_name
from headrace_cli.show.runs import heldout, steps_table
from headrace_cli.watching import Snapshot

if TYPE_CHECKING:
    from rich.console import Console

STEP_ROWS = 12
BAR_WIDTH = 24


class LiveReporter:
    """Draws in place; notes appear above the picture."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=6, transient=False, vertical_overflow="crop")
        self._live.start()
        self._closed = False

    def note(self, text: str) -> None:
        """One line above the picture."""
        self._live.console.print(text, markup=False)

    def update(self, snapshot: Snapshot) -> None:
        """Draws the run."""
        self._live.update(picture(snapshot, self._live.console.width))

    def close(self) -> None:
        """Leaves the last picture."""
        if not self._closed:
            self._closed = True
            self._live.stop()


def picture(snapshot: Snapshot, width: int) -> RenderableType:
    """The whole picture of a run."""
    parts: list[RenderableType] = [_head(snapshot)]
    if snapshot.steps:
        parts.append(steps_table(snapshot.steps[-STEP_ROWS:], heldout(snapshot.run), width))
    parts += _devices(snapshot)
    parts += [
        Text(f"waits for {item}", style="yellow")
        for item in snapshot.run.waiting_for
        if not snapshot.run.ended
    ]
    return Group(*parts)


def _head(snapshot: Snapshot) -> Group:
    run = snapshot.run
    scores = heldout(run)
    bar = ProgressBar(total=max(run.steps, 1), completed=run.step, width=BAR_WIDTH)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(f"{run.spec.get('name', 'run')} {run.id}", style="bold"),
        state_text(run.state),
        bar,
        f"step {run.step}/{run.steps}",
    )
    below = [f"held-out {scores[0].score:.3f} → {scores[-1].score:.3f}"] if scores else []
    below += [remaining] if (remaining := _remaining(snapshot)) else []
    parts: list[RenderableType] = [grid, Text(", ".join(below), style="green")]
    if run.state != "RUNNING":
        parts.append(Text(run.reason, style=STATE_STYLES.get(run.state, "")))
    if run.place:
        parts.append(Text(f"place {run.place} in the queue", style="yellow"))
    return Group(*parts)


def _remaining(snapshot: Snapshot) -> str:
    recent = snapshot.steps[-8:]
    left = snapshot.run.steps - snapshot.run.step
    if snapshot.run.state != "RUNNING" or not recent or not left:
        return ""
    seconds = left * sum(step.wall_s for step in recent) / len(recent)
    return (
        f"about {seconds // 60:.0f} min {seconds % 60:.0f} s left"
        if seconds >= 60
        else f"about {seconds:.0f} s left"
    )


def _devices(snapshot: Snapshot) -> list[RenderableType]:
    if not snapshot.leases or not snapshot.leases.devices:
        return []
    grid = Table.grid(padding=(0, 2))
    working = {device: lease for lease in snapshot.leases.leases for device in lease.devices}
    last = snapshot.run.last_step
    for device in snapshot.leases.devices:
        lease = working.get(device.name)
        does = f"{short_name(lease.instance)}: {lease.stage}" if lease else device.state.lower()
        if device.reason and not lease:
            does += f" ({device.reason})"
        share = (last.devices.get(device.name) or last.devices.get(short_name(device.name))) if last else None
        seconds = ", ".join(
            f"{stage} {value:.2f} s" for stage, value in (share or {}).items() if value >= 0.005
        )
        style = "cyan" if lease else "dim"
        before = Text(f"last step: {seconds}" if seconds else "", style="dim")
        grid.add_row(Text(short_name(device.name), style="bold"), Text(does, style=style), before)
    return [grid]
