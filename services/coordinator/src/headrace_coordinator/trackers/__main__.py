"""`python -m headrace_coordinator.trackers NAME RUN_DIRECTORY`: sends the lines of metrics.jsonl to one tracker.

Follows the file until its standard input ends, on which the run's final state may come first. Keeps in a file how far
it has read: a later process of the same run goes on from there.
"""

from __future__ import annotations

import json
import math
import select
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from headrace_schema.references import keep_closed, redacted
from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.views import StepView
from headrace_schema.spec import RunSpec

from headrace_coordinator.projections.lines import read_lines, write_whole
from headrace_coordinator.projections.tensorboard import evaluation_scalars, step_scalars
from headrace_coordinator.trackers.tracker import TRACKERS, TrackedRun, Tracker

POLL_S = 1.0
SPEC_S = 30.0


class Follower:
    """Sends the lines of a run's metrics.jsonl that were not sent yet."""

    def __init__(self, directory: Path, name: str) -> None:
        self._metrics = directory / "metrics.jsonl"
        self._place = directory / "trackers" / f"{name}.json"
        self._offset = self._sent_before()
        self._place.parent.mkdir(exist_ok=True)

    def _sent_before(self) -> int:
        try:
            return int(json.loads(self._place.read_text())["offset"])
        except FileNotFoundError:
            return 0

    def send(self, tracker: Tracker) -> None:
        """Sends new lines, then notes that they were sent: after a crash a line may be sent twice, none is missed."""
        before = self._offset
        for offset, line in read_lines(self._metrics, before):
            if metrics := read_metrics(line):
                tracker.log(*metrics)
            self._offset = offset
        if self._offset != before:
            write_whole(self._place, json.dumps({"offset": self._offset}).encode())


def read_metrics(line: bytes) -> tuple[int, dict[str, float]] | None:
    """(step, finite metrics by TensorBoard's tags) of a line; None for a line that a crash has torn."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    if record["type"] == "step":
        step = StepView.from_json(record)
        return step.step, _finite(step_scalars(step))
    evaluation = EvaluationView.from_json(record)
    return evaluation.step, _finite(evaluation_scalars(evaluation))


def _finite(scalars: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def open_tracker(name: str, directory: Path) -> Tracker:
    """The tracker as the spec in run.json configures it; waits for that file, which may not be written yet."""
    deadline = time.monotonic() + SPEC_S
    while not (directory / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)
    spec = json.loads((directory / "run.json").read_text())
    sections = RunSpec.model_validate(spec).tracking.trackers
    options = next(section.options for section in sections if section.name == name)
    return TRACKERS.choose(name, options).build(TrackedRun(directory.name, spec, directory))


def final_state(stream: TextIO) -> Iterator[str | None]:
    """Yields None every POLL_S seconds until the stream ends, then its text."""
    while not select.select([stream], [], [], POLL_S)[0]:
        yield None
    yield stream.read().strip()


def main(arguments: list[str]) -> int:
    """Follows the run to its end. An error of the tracker ends the process; the coordinator reports it."""
    name, directory = arguments[0], Path(arguments[1])
    keep_closed([directory.parent.parent])
    try:
        _follow(name, directory)
    except Exception:  # noqa: BLE001 - its log lies in the run's directory, without secrets
        sys.stderr.write(redacted(traceback.format_exc()))
        return 1
    return 0


def _follow(name: str, directory: Path) -> None:
    tracker, follower = open_tracker(name, directory), Follower(directory, name)
    for state in final_state(sys.stdin):
        follower.send(tracker)
        if state is not None:
            tracker.finish(state)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
