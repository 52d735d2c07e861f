"""A run that goes on: a picture that is drawn again on a terminal, lines elsewhere, and lines of its events."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace_cli.output import STATE_STYLES, console, error_console, state_text
from headrace_cli.show.fleet import short_name
from headrace_cli.show.runs import (
    confidence,
    evaluations,
    has_given_answers,
    heldout,
    measured,
    step_line,
    steps_table,
)
from headrace_cli.watching import Reporter, Snapshot

if TYPE_CHECKING:
    from headrace.client import Evaluation, Event, Step, Trajectory
    from rich.console import Console

STEP_ROWS = 12
BRIEF_CHARACTERS, TYPE_COLUMNS = 40, 17
SPARK_WIDTH = 60
BLOCKS = "▁▂▃▄▅▆▇█"
FIGURES = {
    "loss": "loss",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "answer_length_mean": "answer length",
    "clip_fraction": "clip fraction",
    "reward_accuracy": "accuracy",
    "reward_margin": "margin",
    "log_prob_mismatch_kl": "engine's KL",
}
"""Figures of the trainer that the live view shows, with their labels."""
BAR_WIDTH = 24


def make_reporter(*, on_error_stream: bool = False) -> Reporter:
    """A picture on a terminal, lines elsewhere."""
    if sys.stdout.isatty() and not on_error_stream:
        return LiveReporter(console())
    return PlainReporter(error_console() if on_error_stream else console())


class PlainReporter:
    """Prints what is new, once."""

    wants_sample = False

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = ""
        self._waiting: list[str] = []
        self._warned: list[str] = []
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
        waiting = [f"waits for {'; '.join(run.waiting_for)}"] if run.waiting_for else []
        waiting += run.doing
        if waiting != self._waiting and waiting and not run.ended:
            place = f"place {run.place} in the queue; " if run.place else ""
            self._print(place + "; ".join(waiting))
        self._waiting = waiting
        self._steps(snapshot)
        self._evaluations(snapshot)
        for text in run.warnings:
            if text not in self._warned:
                self._print(f"warning: {text}")
        self._warned = run.warnings

    def begin_at(self, snapshot: Snapshot) -> None:
        """Takes a picture for shown: what comes after it is new."""
        self._shown = snapshot.steps[-1].step if snapshot.steps else 0
        self._evaluated = {(item.kind, item.step) for item in _all_evaluations(snapshot)}

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
        for item in _all_evaluations(snapshot):
            if (item.kind, item.step) not in self._evaluated:
                self._evaluated.add((item.kind, item.step))
                parts = " ".join(f"{name}={value:.3f}" for name, value in item.parts.items())
                unanswered = f"; {item.unanswered} not answered: {item.failure}" if item.unanswered else ""
                self._print(
                    f"{item.kind} at step {item.step}: {item.score:.3f}{confidence(item)} over {item.answers} answers "
                    f"({parts}){unanswered}"
                )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _all_evaluations(snapshot: Snapshot) -> list[Evaluation]:
    baseline = snapshot.run.baseline_prefill
    return [*([baseline] if baseline else []), *evaluations(snapshot.run)]


def event_line(event: Event) -> str:
    """One event as a line of a log: in words, or by its keys, of lists and mappings the size. `--json` has all."""
    at = time.strftime("%H:%M:%S", time.localtime(event.time))
    keys = (f"{key}={_brief(value)}" for key, value in event.data.items())
    return (
        f"{at} {event.id:>6} {event.type:<{TYPE_COLUMNS}} {_words(event.type, event.data) or ' '.join(keys)}"
    )


def _words(kind: str, data: dict[str, Any]) -> str:
    """What an event says, of the kinds that a person looks for; empty for others."""
    match kind, data:
        case "run_state_changed", {"state": state, **rest}:
            return f"{state}: {rest['reason']}" if rest.get("reason") else str(state)
        case "noted" | "death_charged" | "scorer_failed", {"text": text}:
            return str(text)
        case "version_restored", {"checkpoint": str(name), "ordinal": step, **rest} if name:
            how = (
                "rewound to"
                if rest.get("recovery")
                else "begins at"
                if rest.get("source_run")
                else "goes on from"
            )
            return f"{how} step {step} ({name})"
        case "stage_ended", {"what": what, "seconds": seconds}:
            return f"{what}: {seconds:.1f} s"
        case "warned", {"warnings": dict() as warnings}:
            return "; ".join(f"warning: {text}" for text in warnings.values()) or "no warning holds any more"
        case "step_committed", {"view": {"step": step, "reward_mean": reward, **view}}:
            dropped = f", {view['dropped']} dropped" if view.get("dropped") else ""
            figure, value = "reward", reward
            told = data["view"]
            if reward is None and "generate" not in told.get("stage_s", {}):  # of answers that the data gives
                figure, value = "loss", told.get("figures", {}).get("loss")
            return f"step {step}: {figure} {_score(value)}, {view.get('trained', 0)} trained{dropped}"
        case "evaluated", {"view": {"kind": name, "step": step, "score": score, "answers": answers}}:
            missing = f", {data['view']['unanswered']} not answered" if data["view"].get("unanswered") else ""
            return f"{name} at step {step}: {_score(score)} over {answers} answers{missing}"
    return ""


def _score(value: float | None) -> str:
    return measured(value, ".3f")


def _brief(value: Any) -> str:
    if isinstance(value, list | dict):
        return str(value) if len(str(value)) <= BRIEF_CHARACTERS else f"({len(value)} entries)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LiveReporter:
    """Draws in place; notes appear above the picture."""

    wants_sample = True

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
        parts += figures(snapshot.steps, width)
    if snapshot.sample:
        parts.append(_sample_line(snapshot.sample, width))
    parts += [Text(f"warning: {text}", style="yellow") for text in snapshot.run.warnings]
    parts += _devices(snapshot)
    parts += [
        Text(text, style="yellow")
        for text in (*(f"waits for {item}" for item in snapshot.run.waiting_for), *snapshot.run.doing)
        if not snapshot.run.ended
    ]
    return Group(*parts)


def figures(steps: Sequence[Step], width: int) -> list[Text]:
    """The rewards of all steps, or the losses of given answers, as a sparkline; the newest step's learning figures."""
    newest = steps[-1]
    room = max(8, min(SPARK_WIDTH, width - 24))
    spread = newest.figures.get("reward_std")
    reward = f"reward {measured(newest.reward_mean, '.3f')}" + (
        f" ± {spread:.3f}" if spread is not None else ""
    )
    found = [(label, newest.figures.get(name)) for name, label in FIGURES.items()]
    given = has_given_answers(newest)  # the loss stands in the place of the reward
    learning = ", ".join(
        f"{label} {value:.4g}"
        for label, value in found
        if value is not None and not (given and label == "loss")
    )
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    if given:
        reward = f"loss {measured(newest.figures.get('loss'), '.4f')}"
        rewards = [step.figures["loss"] for step in steps if "loss" in step.figures]
    line = Text(f"{reward} {sparkline(rewards, room) if rewards else ''}".rstrip(), style="green")
    return [line, Text(learning)] if learning else [line]


def sparkline(values: Sequence[float], width: int) -> str:
    """One block a value, from the least to the greatest; means of neighbours where there are more than `width`."""
    count = min(width, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(bounds)]
    finite = [value for value in means if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if isfinite(value) else " " for value in means)


def _sample_line(sample: Trajectory, width: int) -> Text:
    """An answer in one line."""
    words = f"step {sample.step}, reward {sample.reward:.3f}: "
    text = " ".join(f"{sample.prompt} → {sample.completion}".split())
    room = max(20, width - len(words))
    return Text(words + (text if len(text) <= room else "…" + text[1 - room :]), style="dim", no_wrap=True)


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
