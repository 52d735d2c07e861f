"""What Headrace costs before it does anything: `python benchmarks/idle.py`.

Prints one JSON line: `idle_rss_gb` (resident memory of all processes of a fleet without a model, added up),
`idle_pss_gb` (the same with shared pages counted once), `up_s` (`headrace up`, from the shell's view, until every
service is registered) and `cli_help_s` (`headrace --help`); times are medians. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import psutil
from _harness import Fleet, emit, machine, say, table

SETTLE_S = 5.0  # longer than a heartbeat: what the first ones load is counted
GOALS = {"idle_rss_gb": 1.5, "up_s": 10.0, "cli_help_s": 0.5}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ups", type=int, default=3, help="fleets to start")
    parser.add_argument("--helps", type=int, default=9, help="times to ask for help")
    options = parser.parse_args()
    say(machine())
    help_s = [seconds(_help) for _ in range(options.helps)]
    say("headrace --help: " + ", ".join(f"{value:.2f}" for value in help_s) + " s")
    ups: list[float] = []
    memory: list[tuple[float, float]] = []
    for _ in range(options.ups):
        with Fleet() as fleet:
            ups.append(fleet.up_s)
            time.sleep(SETTLE_S)
            memory.append(resident(fleet.ready["launcher_pid"]))
        say(f"headrace up: {ups[-1]:.2f} s; {memory[-1][0]:.3f} GB RSS, {memory[-1][1]:.3f} GB PSS")
    say(f"at the end: {machine()}")
    figures = {
        "idle_rss_gb": max(rss for rss, _ in memory),
        "up_s": median(ups),
        "cli_help_s": median(help_s),
        "idle_pss_gb": max(pss for _, pss in memory),
    }
    missed = [name for name, goal in GOALS.items() if figures[name] >= goal]
    say(f"missed: {', '.join(missed)}" if missed else "all goals are met")
    emit("idle", figures)


def resident(launcher: int) -> tuple[float, float]:
    """(RSS, PSS) in GB of a process and all its descendants, each shown to the reader."""
    parent = psutil.Process(launcher)
    rows: list[tuple[str, float, float]] = []
    for process in [parent, *parent.children(recursive=True)]:
        try:
            found = process.memory_full_info()
            name = process_name(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        rows.append((name, found.rss / 1e9, found.pss / 1e9))
    table(("process", "RSS GB", "PSS GB"), rows)
    return sum(row[1] for row in rows), sum(row[2] for row in rows)


def process_name(command: Sequence[str]) -> str:
    """What a command line runs: the module after -m, else the program."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return Path(command[0]).name if command else "?"


def seconds(action: Callable[[], object]) -> float:
    """Wall time of an action."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _help() -> None:
    program = Path(sys.executable).with_name("headrace")
    subprocess.run([program, "--help"], stdout=subprocess.DEVNULL, timeout=60, check=True)


if __name__ == "__main__":
    main()
