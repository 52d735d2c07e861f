"""What the benchmarks share: a fleet of real processes, a table, and the JSON line at the end. Measures nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

COMMAND_S = 120.0
COMMAND = [sys.executable, "-m", "headrace_cli"]


def say(text: str) -> None:
    """Tells the reader something; standard output is for the JSON line alone."""
    print(text, file=sys.stderr, flush=True)


def emit(benchmark: str, figures: Mapping[str, float | None]) -> None:
    """Prints the script's only line on standard output, its figures rounded to six digits."""
    rounded = {name: value if value is None else float(f"{value:.6g}") for name, value in figures.items()}
    print(json.dumps({"benchmark": benchmark, "figures": rounded}), flush=True)


def headrace(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a `headrace` command; RuntimeError with its words when it fails."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"headrace {' '.join(arguments)} ended with {done.returncode}: {words}")
    return done.stdout


def machine() -> str:
    """One line about who else uses the machine: figures from a busy one say little."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}"


class CoreUse:
    """Seconds that a process ran, and that it was ready to run while others had the core, from now on.

    From schedstat's first two fields, thread by thread: call `look` often enough to see threads before they end.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._threads: dict[str, tuple[int, int]] = {}
        self.look()
        self._before = self._totals()

    def look(self) -> None:
        """Takes the threads' counts of now."""
        for file in Path(f"/proc/{self._process}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = file.read_text().split()
            except (OSError, ValueError):  # the thread ended
                continue
            self._threads[file.parent.name] = (int(ran), int(waited))

    @property
    def seconds(self) -> tuple[float, float]:
        """(ran, waited) up to the last look."""
        (ran, waited), (ran_before, waited_before) = self._totals(), self._before
        return (ran - ran_before) / 1e9, (waited - waited_before) / 1e9

    def _totals(self) -> tuple[int, int]:
        counts = self._threads.values()
        return sum(ran for ran, _ in counts), sum(waited for _, waited in counts)


class CpuUse:
    """CPU seconds of processes from now on, and of those that they come to be; each look asks which these are.

    What a process does after the last look at it is not counted.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes = processes
        self._seen: dict[psutil.Process, float] = {}
        self.look()
        self._before = sum(self._seen.values())

    def look(self) -> None:
        """Takes the processes' times of now."""
        for process in self._processes():
            with suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                self._seen[process] = times.user + times.system

    def seconds(self) -> float:
        """Up to now."""
        self.look()
        return sum(self._seen.values()) - self._before


class Fleet:
    """`headrace up` in a data directory of its own, and `headrace down` at the end, whatever happened."""

    def __init__(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-benchmark-"))
        self.data_dir = self.directory / "data"
        self.up_s = 0.0
        self.ready: dict[str, Any] = {}
        self._options = options
        self._environment = environment

    def __enter__(self) -> Self:
        # `timeout` ends a script so, and by default nothing below would run: the fleet would stay.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        started = time.perf_counter()
        self._port = str(free_port())
        try:
            self.up()
        except BaseException:
            self._end()
            raise
        self.up_s = time.perf_counter() - started
        return self

    def up(self) -> None:
        """`headrace up`; once more where its launcher was killed."""
        where = ("--data-dir", str(self.data_dir), "--port", self._port)
        self.ready = json.loads(
            headrace("up", "--json", *where, *self._options, environment=self._environment)
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def url(self) -> str:
        """Address of the HTTP API."""
        return str(self.ready["url"])

    @property
    def token(self) -> str:
        """The fleet's secret."""
        return Path(self.ready["token_file"]).read_text(encoding="ascii").strip()

    @property
    def store_url(self) -> str:
        """Address of the fleet's store."""
        return str(self._state["redis_url"])

    @property
    def launcher(self) -> int:
        """Process id of the launcher."""
        return int(self.ready["launcher_pid"])

    def process(self, kind: str) -> int:
        """Id of the first process of a kind; 0 while it is not started again."""
        return next(int(item["pid"]) for item in self._state["processes"] if item["kind"] == kind)

    def processes(self) -> list[dict[str, Any]]:
        """The fleet's processes: name, kind, pid, restarts."""
        found: list[dict[str, Any]] = self._state["processes"]
        return found

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.data_dir / "fleet.json").read_text(encoding="utf-8"))
        return state

    def _end(self) -> None:
        try:
            headrace("down", "--json", "--data-dir", str(self.data_dir))
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under a header, for the reader."""
    cells = [list(header), *([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        say("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
