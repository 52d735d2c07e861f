"""The process of one part: started without input, watched until its deadline, ended with all that it started.

Knows neither what the part checks nor what its exit status means.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST_WORDS_S = 15.0
LATE = 124  # the status of a command that ran out of time, as timeout(1) has it


class Running:
    """A command in a session of its own in the repository's root. Its output goes to `log`, or to ours."""

    def __init__(self, command: list[str], timeout_s: float, log: Path | None = None) -> None:
        self.began = time.monotonic()
        self._deadline = self.began + timeout_s
        self._timeout_s = timeout_s
        self._log = log
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") if log else nullcontext() as output:
            self._child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit status, 124 when the deadline ended it; None while it runs."""
        status = self._child.poll()
        if status is None and time.monotonic() > self._deadline:
            self._say(f"no end after {self._timeout_s:.0f} s; where it hangs:")
            self.end(signal.SIGABRT)  # pytest's faulthandler prints every thread's stack
            return LATE
        return status

    def end(self, first: signal.Signals) -> None:
        """A signal, some time for last words, and SIGKILL to its session."""
        self._child.send_signal(first)
        try:
            self._child.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._child.wait()

    def output(self) -> str:
        """What it wrote to its log so far; empty when it writes to our output."""
        return self._log.read_text(errors="replace") if self._log else ""

    def _say(self, sentence: str) -> None:
        if self._log is None:
            print(f"\n{sentence}", flush=True)
            return
        with self._log.open("a") as log:
            log.write(f"\n{sentence}\n")
