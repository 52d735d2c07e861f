"""A run as lines of a log: for pipes, files and CI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_cli.show.runs import confidence, heldout, step_line
from headrace_cli.watching import Snapshot

if TYPE_CHECKING:
    from rich.console import Console


class PlainReporter:
    """Prints what is new, once."""

    wants_sample = False

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = ""
        self._waiting: list[str] = []
        self._shown = 0
        self._evaluated: set[tuple[str, int]] = set()

    def note(self, text: str) -> None:
        """One line."""
        self._print(text)

    def update(self, snapshot: Snapshot) -> None:
        """Prints new states, steps and evaluations."""
        run = snapshot.run
        if run.state != self._state:
            self._state = run.state
            self._print(f"run {run.id} is {run.state}" + (f": {run.reason}" if run.reason else ""))
        if run.waiting_for != self._waiting and run.waiting_for and not run.ended:
            place = f"place {run.place} in the queue; " if run.place else ""
            self._print(f"{place}waits for " + "; ".join(run.waiting_for))
        self._waiting = run.waiting_for
        self._steps(snapshot)
        self._evaluations(snapshot)

    def close(self) -> None:
        """Nothing to put back."""

    def _steps(self, snapshot: Snapshot) -> None:
        scores = {item.step: item.score for item in heldout(snapshot.run)}
        if snapshot.steps and snapshot.steps[-1].step < self._shown:
            self._print(f"rewound to step {snapshot.steps[-1].step}")
            self._shown = snapshot.steps[-1].step
        for step in snapshot.steps:
            if step.step <= self._shown:
                continue
            self._shown = step.step
            self._print(step_line(step, snapshot.run.steps, scores))

    def _evaluations(self, snapshot: Snapshot) -> None:
        baseline = snapshot.run.baseline_prefill
        for item in [*([baseline] if baseline else []), *heldout(snapshot.run)]:
            if (item.kind, item.step) not in self._evaluated:
                self._evaluated.add((item.kind, item.step))
                parts = " ".join(f"{name}={value:.3f}" for name, value in item.parts.items())
                self._print(
                    f"{item.kind} at step {item.step}: {item.score:.3f}{confidence(item)} over {item.answers} answers "
                    f"({parts})"
                )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
