"""Runs the parts of the checks or of the tests, each with a deadline, and adds them up.

`python -m ci.parts lint|test|nightly… [PART…]`. Where neither `nightly` nor the part is named, a part whose inputs
are as they were when it passed is left out. Parts that share the machine run side by side, two always and up to four
where the machine has cores and memory to spare, each with one compute thread and its output in one piece at its end;
the others run alone. A part that fails does not stop the later ones. Under CI=true a part that could not run is a
failure; elsewhere the end says what was not covered. Knows no test's content.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ci.changes import reason_to_leave_out, record_pass
from ci.plan import PLANS, Part
from ci.reports import Report, read_report
from ci.running import LATE, ROOT, Running

REPORTS = ROOT / ".cache" / "ci"
LANES = 2
MOST = 4
"""Parts at a time: so many always, and so many where there is room. Few, as their bursts fall together now and then."""
SPARE_CORES = 0.3
SPARE_BYTES = 4 << 30
WINDOW_S = 10.0
"""So much must be idle, for so long since the last part began: what starts imports first, and waits later."""
POLL_S = 0.1
NO_TESTS = 5  # pytest's exit status


@dataclass
class Tally:
    """What all parts came to."""

    passed: int = 0
    failed: int = 0
    lines: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)


class Spare:
    """What of the machine nobody has used since the last part began, whoever else is at work on it."""

    def __init__(self) -> None:
        self._idle = deque[tuple[float, float]]()

    def restart(self) -> None:
        """A part has begun."""
        self._idle.clear()

    def suffices(self) -> bool:
        """Whether one more part has room. Looks at the machine: ask often."""
        now, idle_s = time.monotonic(), _idle_s()
        self._idle.append((now, idle_s))
        while len(self._idle) > 1 and now - self._idle[1][0] >= WINDOW_S:
            self._idle.popleft()
        began, idle_before = self._idle[0]
        if now - began < WINDOW_S:
            return False
        cores = (idle_s - idle_before) / (now - began)
        return cores >= SPARE_CORES and psutil.virtual_memory().available >= SPARE_BYTES


def _idle_s() -> float:
    """Core seconds that nobody used, since the machine began. Waiting for a disk is no use of a core."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


def run_parts(parts: Sequence[Part], tally: Tally) -> None:
    """Runs parts and adds their outcomes; of those for which there is room, the first in `parts` starts."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    waiting, running, spare = [*parts], dict[Part, Running](), Spare()
    try:
        while waiting or running:
            more = spare.suffices()
            while part := next((each for each in waiting if _may_begin(each, waiting, running, more)), None):
                waiting.remove(part)
                _begin(part, running, tally)
                spare.restart()
                more = False
            for part, process in [*running.items()]:
                before = _cpu_s()
                status = process.poll()
                if status is not None:
                    del running[part]
                    _finish(part, process, status, _cpu_s() - before, tally)
            time.sleep(POLL_S)
    finally:  # interrupted: what runs is ended, and what it said is shown
        for part, process in running.items():
            process.end(signal.SIGINT)
            print(f"\n=== {part.name}: interrupted\n{process.output()}", flush=True)


def _cpu_s() -> float:
    """Of all processes that have ended, with theirs: who has just ended has the difference.

    What a process leaves behind, as `headrace up` does, is not in it: a part with fleets uses some three times as much.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _needed(parts: Sequence[Part], tally: Tally) -> list[Part]:
    """The parts without those whose inputs did not change, which are told of."""
    found = []
    for part in parts:
        reason = reason_to_leave_out(_subject(part), part.inputs) if part.inputs else ""
        if reason:
            tally.uncovered.append(f"{part.name}: left out, as {reason}; `make nightly` runs it")
        else:
            found.append(part)
    return found


def _subject(part: Part) -> str:
    """The part whose pass counts: an environment is needed where its tests are."""
    return part.name.removesuffix("-environment")


def _may_begin(part: Part, waiting: Sequence[Part], running: Collection[Part], more: bool) -> bool:
    """Whether there is room beside those that run, `more` of it than always, and what it comes after has ended."""
    if part.after in {each.name for each in (*waiting, *running)}:
        return False
    room = MOST if more else LANES
    return not running or (all(each.shares for each in (part, *running)) and len(running) < room)


def _begin(part: Part, running: dict[Part, Running], tally: Tally) -> None:
    if part.needs and not any((ROOT / part.needs).rglob("test_*.py")):
        return _uncovered(part, tally, f"no tests in {part.needs}")
    log = REPORTS / f"{part.name}.log" if part.shares else None
    for old in (_report_file(part), *([log] if log else [])):
        old.unlink(missing_ok=True)
    print(f"\n=== {part.name}" + (" begins; its output follows when it ends" if log else ""), flush=True)
    running[part] = Running(part.with_report(_report_file(part)), part.timeout_s, log)
    return None


def _finish(part: Part, process: Running, status: int, cpu_s: float, tally: Tally) -> None:
    """Adds a part's outcome; a part that ends without a report counts as one test."""
    seconds = time.monotonic() - process.began
    took = f"{seconds:.0f} s, {cpu_s / seconds:.2f} cores"
    if part.shares:
        print(f"\n=== {part.name}: {took}, status {status}\n{process.output()}", end="", flush=True)
    if part.needs and status == NO_TESTS:
        return _uncovered(part, tally, "it holds no tests to run")
    report = read_report(_report_file(part))
    failed = report.failed or int(status != 0)
    tally.passed += report.passed if part.needs else int(status == 0)
    tally.failed += failed
    tally.uncovered += [f"{part.name}: {text}" for text in report.skipped]
    tally.lines.append(f"{part.name:<22} {took:>18}  {_outcome(part, status, report)}")
    if part.inputs and not failed and _subject(part) == part.name:
        record_pass(part.name, part.inputs)
    return None


def _report_file(part: Part) -> Path:
    return REPORTS / f"{part.name}.xml"


def _outcome(part: Part, status: int, report: Report) -> str:
    if status == LATE:
        return f"FAILED: no end after {part.timeout_s} s"
    if not part.needs:
        return "passed" if status == 0 else f"FAILED with status {status}"
    skipped = f", {len(report.skipped)} skipped" if report.skipped else ""
    verdict = "" if status == 0 else f"FAILED with status {status}: "
    return f"{verdict}{report.passed} passed, {report.failed} failed{skipped}"


def _uncovered(part: Part, tally: Tally, why: str) -> None:
    in_ci = os.environ.get("CI") == "true"
    tally.failed += in_ci
    tally.uncovered.append(f"{part.name}: {why}")
    tally.lines.append(f"{part.name:<22} {'':>18}  {'FAILED' if in_ci else 'not run'}: {why}")


def main(arguments: list[str]) -> int:
    """Exit status 1 when anything failed, 2 when the arguments make no sense."""
    names = [name for name in arguments if name in PLANS]
    plan = {part.name: part for name in names for part in PLANS[name]}
    wanted = [name for name in arguments if name not in PLANS]
    if not plan or set(wanted) - plan.keys():
        parts = "; ".join(f"{name}: {' '.join(part.name for part in PLANS[name])}" for name in PLANS)
        print(f"usage: python -m ci.parts {'|'.join(PLANS)}… [PART…]\nparts of {parts}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or children would stay
    tally, started = Tally(), time.monotonic()
    chosen, everything = [plan[name] for name in wanted or plan], bool(wanted) or "nightly" in names
    run_parts(chosen if everything else _needed(chosen, tally), tally)
    print_tally(" ".join(names), tally, time.monotonic() - started)
    return int(tally.failed > 0)


def print_tally(name: str, tally: Tally, seconds: float) -> None:
    """Prints what the parts came to, and what was not covered."""
    print(f"\n=== {name}: {seconds:.0f} s")
    for line in tally.lines:
        print(line)
    if tally.uncovered:
        print("\nnot covered:")
        for text in tally.uncovered:
            print(f"  {text}")
    print(f"\n{tally.passed} passed, {tally.failed} failed", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
