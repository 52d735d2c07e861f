"""Runs the parts of the checks or of the tests one after the other, each with a deadline, and adds them up.

`python -m ci.parts lint|test|nightly… [PART…]`. A part that fails does not stop the later ones. Under CI=true a
part that could not run is a failure; elsewhere the end says what was not covered. Knows no test's content.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ci.plan import PLANS, Part
from ci.reports import Report, read_report

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / ".cache" / "ci"
LAST_WORDS_S = 15.0
NO_TESTS = 5  # pytest's exit status


@dataclass
class Tally:
    """What all parts came to."""

    passed: int = 0
    failed: int = 0
    lines: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)


def run_part(part: Part, tally: Tally) -> None:
    """Runs one part and adds its outcome; a part that ends without a report counts as one test."""
    print(f"\n=== {part.name}", flush=True)
    if part.needs and not any((ROOT / part.needs).rglob("test_*.py")):
        return _uncovered(part, tally, f"no tests in {part.needs}")
    report_file = REPORTS / f"{part.name}.xml"
    report_file.unlink(missing_ok=True)
    started = time.monotonic()
    status = execute(part.with_report(report_file), part.timeout_s)
    seconds = time.monotonic() - started
    if status == NO_TESTS:
        return _uncovered(part, tally, "it holds no tests to run")
    report = read_report(report_file)
    failed = report.failed or int(status != 0)
    tally.passed += report.passed if part.needs else int(status == 0)
    tally.failed += failed
    tally.uncovered += [f"{part.name}: {text}" for text in report.skipped]
    tally.lines.append(f"{part.name:<22} {seconds:7.1f} s  {_outcome(part, status, report)}")
    return None


def execute(command: list[str], timeout_s: float) -> int:
    """Exit status of a command run in the repository's root without input; 124 when it ran out of time."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"\nno end after {timeout_s:.0f} s; where it hangs:", flush=True)
        _end(child, signal.SIGABRT)  # pytest's faulthandler prints every thread's stack
        return 124
    except KeyboardInterrupt:
        _end(child, signal.SIGINT)
        raise


def _end(child: subprocess.Popen[bytes], first: signal.Signals) -> None:
    child.send_signal(first)
    try:
        child.wait(LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _outcome(part: Part, status: int, report: Report) -> str:
    if status == 124:
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
    tally.lines.append(f"{part.name:<22} {'':>7}    {'FAILED' if in_ci else 'not run'}: {why}")


def main(arguments: list[str]) -> int:
    """Exit status 1 when anything failed, 2 when the arguments make no sense."""
    names = [name for name in arguments if name in PLANS]
    plan = {part.name: part for name in names for part in PLANS[name]}
    wanted = [name for name in arguments if name not in PLANS]
    if not plan or set(wanted) - plan.keys():
        parts = "; ".join(f"{name}: {' '.join(part.name for part in PLANS[name])}" for name in PLANS)
        print(f"usage: python -m ci.parts {'|'.join(PLANS)}… [PART…]\nparts of {parts}", file=sys.stderr)
        return 2
    REPORTS.mkdir(parents=True, exist_ok=True)
    tally, started = Tally(), time.monotonic()
    for name in wanted or plan:
        run_part(plan[name], tally)
    _print_tally(" ".join(names), tally, time.monotonic() - started)
    return int(tally.failed > 0)


def _print_tally(name: str, tally: Tally, seconds: float) -> None:
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
