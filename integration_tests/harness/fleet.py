"""A real fleet of local processes: started, asked, hurt and stopped through the `headrace` command.

A fleet that leaves a process or shared memory behind fails the test that used it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from headrace.client import Client, Event, HeadraceError, Run

from harness.processes import ROOT, alive, clean_environment, free_port, mentioning, words_of
from harness.waiting import wait_for

LIVING: weakref.WeakSet[Fleet] = weakref.WeakSet()
DEVICES = "cpu:0,cpu:1"
RUN_S = 240.0
MODULES = {"coordinator": "headrace_coordinator", "launcher": "headrace_cli.launcher"}


class Fleet:
    """One data directory and the processes on it. As a context manager it is up inside the block."""

    def __init__(self, data_dir: Path, *arguments: str, **environment: str) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = environment
        self.sessions_grpc = ""
        """Where users' loops speak gRPC, if they do."""
        self._arguments = arguments
        self._seen: set[psutil.Process] = set()
        self._shared: set[Path] = set()
        self.token = "token-of-the-tests"
        self.client = Client(self.url, self.token, patience_s=60.0)
        LIVING.add(self)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.headrace("down")
        self.assert_nothing_left()
        LIVING.discard(self)

    # --- the command line

    def headrace(
        self, *arguments: str | Path, timeout_s: float = 180.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`headrace …` on this data directory."""
        return subprocess.run(
            self.command(*arguments),
            env=self.variables(arguments[0], environment),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def command(self, *arguments: str | Path) -> list[str]:
        """Command line of `headrace …` on this data directory."""
        return [sys.executable, "-m", "headrace_cli", *map(str, arguments), "--data-dir", str(self.data_dir)]

    def variables(self, command: str | Path, environment: Mapping[str, str]) -> dict[str, str]:
        """Environment of a command. Without the URL, a command finds whichever fleet is on the default port."""
        url = {} if command in ("up", "down", "demo") else {"HEADRACE_URL": self.url}
        return clean_environment(**{**url, **self.environment, **environment})

    def json(self, *arguments: str | Path) -> Any:
        """The JSON that `headrace … --json` prints; fails the test unless it succeeds."""
        done = self.headrace(*arguments, "--json")
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    @property
    def headers(self) -> dict[str, str]:
        """What a request that does not come from the client must bear."""
        return {"Authorization": f"Bearer {self.token}"}

    def up(self) -> None:
        """`headrace up`; fails the test when the fleet does not come up."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        (self.data_dir / "http-token").write_text(self.token)
        devices = () if "--devices" in self._arguments else ("--devices", DEVICES)
        done = self.headrace("up", "--port", str(self.port), *devices, *self._arguments)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.logs()}"
        self.look()

    def down(self) -> None:
        """`headrace down`, and nothing is left."""
        self.look()
        done = self.headrace("down")
        assert done.returncode == 0, done.stderr
        self.assert_nothing_left()

    # --- runs

    def submit(self, spec: Mapping[str, Any], **options: Any) -> Run:
        """Queues a run over HTTP."""
        return self.client.submit(dict(spec), **options)

    def succeed(self, run: Run | str, timeout_s: float = RUN_S) -> Run:
        """The run once it is SUCCEEDED; fails the test with the run's own words otherwise."""
        ended = self.client.wait(run if isinstance(run, str) else run.id, timeout_s)
        assert ended.state == "SUCCEEDED", f"{ended.id} {ended.state}: {ended.reason}"
        return ended

    def end_runs(self) -> None:
        """Cancels what has not ended: it would keep the instances from the next run."""
        for run in self.client.list():
            if not run.ended:
                self.end(run.id)

    def end(self, run: str) -> None:
        """Cancels a run, unless it ends by itself first: a cancel before may be on its way."""
        try:
            self.client.cancel(run)
        except HeadraceError:
            if not self.client.get(run).ended:
                raise

    def reach(self, run: Run, step: int, timeout_s: float = RUN_S) -> Run:
        """The run once it has committed `step` steps."""
        return wait_for(lambda: self._at(run, step), f"step {step} of {run.id}", timeout_s)

    def _at(self, run: Run, step: int) -> Run | None:
        now = self.client.get(run.id)
        assert now.state != "FAILED", f"{now.id} failed: {now.reason}"
        return now if now.step >= step else None

    def state(self, run: Run, *states: str, timeout_s: float = RUN_S) -> Run:
        """The run once it is in one of the states."""

        def look() -> Run | None:
            now = self.client.get(run.id)
            assert now.state in states or not now.ended, f"{now.id} {now.state}: {now.reason}"
            return now if now.state in states else None

        return wait_for(look, f"{run.id} to be {' or '.join(states)}", timeout_s)

    def events(self, run: Run) -> list[Event]:
        """All events of a run that has ended."""
        return list(self.client.events(run.id))

    # --- processes

    def look(self) -> list[psutil.Process]:
        """The fleet's living processes; remembered, so that none of them can slip away unseen."""
        found = list(mentioning(str(self.data_dir)))
        for process in [*found]:
            try:
                found += process.children(recursive=True)
            except psutil.Error:
                continue
        for process in found:
            words = words_of(process)
            self._shared |= {Path(words[i + 1]) for i, word in enumerate(words) if word == "--shm-dir"}
        self._seen |= set(found)
        return [process for process in set(found) if alive(process)]

    def process(self, instance: str) -> psutil.Process:
        """The process of an instance ("rollout-0"), of "coordinator", "store" or "launcher"."""
        return wait_for(lambda: self._find(instance), f"a process of {instance}")

    def _find(self, instance: str) -> psutil.Process | None:
        for process in self.look():
            words = words_of(process)
            if instance == "store":
                matches = bool(words) and "valkey-server" in words[0]
            elif instance in MODULES:
                matches = MODULES[instance] in words
            else:
                module = f"headrace_{instance.partition('-')[0]}"
                matches = module in words and instance in words and "-m" in words
            if matches:
                return process
        return None

    def runs(self, instance: str) -> bool:
        """Whether an instance has a process now."""
        return self._find(instance) is not None

    def pid_of(self, instance: str) -> int:
        """Process id of an instance."""
        return int(self.process(instance).pid)

    def kill(self, instance: str, signal_number: int = signal.SIGKILL) -> int:
        """Sends SIGKILL, or another signal, to an instance's process; returns its id."""
        pid = self.pid_of(instance)
        os.kill(pid, signal_number)
        return pid

    def replaced(self, instance: str, pid: int) -> None:
        """Waits until another process than `pid` stands in for an instance."""

        def look() -> bool:
            found = self._find(instance)
            return found is not None and found.pid != pid

        wait_for(look, f"a new process of {instance}")

    def ready(self, *names: str) -> None:
        """Waits until instances are registered and have a session."""

        def look() -> bool:
            found = {item.name for item in self.client.instances() if item.state == "READY"}
            return set(names) <= found

        wait_for(look, f"{', '.join(names)} to be ready")

    def assert_nothing_left(self) -> None:
        """No process of the fleet lives, and its shared memory is gone."""

        def gone() -> bool:
            return not [process for process in self._seen if alive(process)] and not list(
                mentioning(str(self.data_dir))
            )

        try:
            wait_for(gone, "the fleet's end", 30)
        except AssertionError as error:
            left = {process.pid: words_of(process) for process in [*self._seen] if alive(process)}
            left |= {process.pid: words_of(process) for process in mentioning(str(self.data_dir))}
            raise AssertionError(f"left behind: {left}") from error
        assert not [folder for folder in self._shared if folder.exists()], "shared memory is left behind"

    # --- what went wrong

    def log(self, name: str) -> str:
        """A process's log; empty when there is none."""
        path = self.data_dir / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def logs(self, lines: int = 25) -> str:
        """The end of every log."""
        parts: Sequence[Path] = sorted((self.data_dir / "logs").glob("*.log"))
        ends = [(path.name, path.read_text(errors="replace").splitlines()[-lines:]) for path in parts]
        return "\n".join(f"--- {name}\n" + "\n".join(end) for name, end in ends)


def moment(seed: int, low: float, high: float) -> float:
    """Seconds of a seeded random moment, printed so that a failure can be repeated."""
    seconds = random.Random(seed).uniform(low, high)
    print(f"random moment of seed {seed}: {seconds:.3f} s")
    return seconds
