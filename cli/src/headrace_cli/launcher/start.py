"""Starts a launcher in a session of its own and waits until the fleet is ready. Shows nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from headrace.client import Client, HeadraceError, Instance
from headrace_servicekit.folders import open_below, read_below
from headrace_servicekit.memory.capacity import Capacity
from headrace_servicekit.rpc.addresses import LOOPBACK

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.gpu_locks import GpuLocks
from headrace_cli.launcher.plan import FleetPlan
from headrace_cli.launcher.repair import discard, examine
from headrace_cli.launcher.state import DEATHS_THAT_FAIL, FleetState, living_state, read_state
from headrace_cli.launcher.stop import stop_fleet, undisturbed
from headrace_cli.launcher.store import require_store
from headrace_cli.launcher.tether import tether

START_TIMEOUT_S = 600.0
"""How long a fleet may take to start, while it progresses."""
POLL_S = 0.1
STANDSTILL_S = 60.0
"""A start fails once nothing has come up for so long and the missing processes have hardly used a core."""
WORK_S = 1.0
"""CPU seconds that count as work: more than a process that only waits uses in `STANDSTILL_S`."""
LOOK_S = 1.0


@dataclass(frozen=True)
class ReadyFleet:
    """A fleet whose coordinator answers and whose instances are all registered."""

    state: FleetState
    instances: list[Instance]
    seconds: float
    launcher: subprocess.Popen[bytes]
    notice: str = ""
    """What the coordinator has to say of its start: that its store had lost something."""


def start_fleet(
    plan: FleetPlan,
    progress: Callable[[str], None] = lambda text: None,
    timeout_s: float = START_TIMEOUT_S,
) -> ReadyFleet:
    """Starts a fleet; returns when it is ready. `progress` hears, again and again, what is still waited for.

    Raises CommandError: exit code 2 when the data directory or the port cannot be used or carries a fleet
    already, or the host cannot hold so many processes; 1 when a process does not come up. Then, and on Ctrl-C,
    what was started is stopped again.
    """
    data_dir = DataDir.at(plan.data_dir)
    refuse_second_fleet(data_dir)
    data_dir.prepare()
    if plan.head is None:
        require_free_port(plan.port, plan.listen)
        if plan.listen != LOOPBACK:
            require_free_port(plan.port + 1, plan.listen)
        require_store()
    require_room(plan.counts)
    refuse_taken_gpus(plan, data_dir)
    started_at = time.monotonic()
    launcher = _spawn(plan, data_dir)
    try:
        patience = Patience(timeout_s)
        state, instances, notice = _wait_until_ready(plan, data_dir, launcher, progress, patience)
    except CommandError as error:
        stop_fleet(data_dir, launcher_pid=launcher.pid)
        if damage := _damage(data_dir):
            raise CommandError(damage) from error
        raise
    except BaseException:  # Ctrl-C too: no process of a fleet that did not come up may stay
        with undisturbed():
            stop_fleet(data_dir, launcher_pid=launcher.pid)
        raise
    return ReadyFleet(state, instances, time.monotonic() - started_at, launcher, notice)


def _damage(data_dir: DataDir) -> str:
    """Where the store is damaged, as the reason of a start that failed; "" where it is not, or is none of ours."""
    if "HEADRACE_REDIS_URL" in os.environ:
        return ""
    try:
        found = examine(data_dir)
    except CommandError:
        return ""  # What the start itself said stays.
    finally:
        discard(data_dir)
    return "" if found.starts else found.sentence(data_dir)


def refuse_second_fleet(data_dir: DataDir) -> None:
    """Raises CommandError (exit code 2) when a fleet lives on the data directory."""
    if state := living_state(data_dir):
        problem = f"a fleet already runs on {data_dir.root} ({state.url}, launcher {state.launcher_pid})"
        raise user_error(
            "--data-dir", problem, f"use it, or stop it with: headrace down --data-dir {data_dir.root}"
        )


def refuse_taken_gpus(plan: FleetPlan, data_dir: DataDir) -> None:
    """Raises CommandError (exit code 2) when another fleet of this user has one of the GPUs."""
    locks = GpuLocks(plan.devices, data_dir.root)
    locks.acquire()  # The launcher takes them for as long as it lives.
    locks.release()


def require_free_port(port: int, address: str = LOOPBACK) -> None:
    """Raises CommandError (exit code 2) when the port is taken."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError) as error:
            problem = f"{port} is in use by another program, maybe another fleet"
            raise user_error("--port", problem, "choose another with --port") from error


def require_room(counts: Mapping[str, int], capacity: Capacity | None = None) -> None:
    """Raises CommandError (exit code 2) when this host cannot hold so many; one of each kind may always start."""
    capacity = capacity or Capacity()
    for kind, count in counts.items():
        others = [(other, 0) for other, number in counts.items() if other != kind for _ in range(number)]
        if count > 1 and (refusal := capacity.refusal(kind, count, others)):
            raise user_error(f"--{kind}", refusal, "start fewer")


def _spawn(plan: FleetPlan, data_dir: DataDir) -> subprocess.Popen[bytes]:
    data_dir.set_big_log_aside("launcher")
    handle = open_below(
        data_dir.root, data_dir.log_file("launcher"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    with os.fdopen(handle, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace_cli.launcher", plan.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=tether(signal.SIGTERM) if plan.tethered else None,
        )


def _wait_until_ready(
    plan: FleetPlan,
    data_dir: DataDir,
    launcher: subprocess.Popen[bytes],
    progress: Callable[[str], None],
    patience: Patience,
) -> tuple[FleetState, list[Instance], str]:
    missing, pids = "launcher", [launcher.pid]
    while not (too_late := patience.over(missing, pids)):
        if launcher.poll() is not None:
            raise _failure(data_dir, "launcher", f"the launcher ended with status {launcher.returncode}")
        state = read_state(data_dir)
        if state and state.launcher_pid == launcher.pid:
            _refuse_dying(data_dir, state)
            instances, missing, notice = _ready_instances(plan, state)
            if not missing:
                return state, instances, notice
            names = missing.split(", ")
            pids = [process.pid for process in state.processes if process.name in names and process.pid]
            pids += state.templates
            progress(missing)
        time.sleep(POLL_S)
    raise _failure(data_dir, missing.split(",")[0], too_late)


def _ready_instances(plan: FleetPlan, state: FleetState) -> tuple[list[Instance], str, str]:
    """The instances, the names of what is not ready yet, and what the coordinator has to say."""
    if state.phase != "running":
        return [], "store", ""
    if plan.head is not None:
        return _joined(plan, state)
    token = Path(state.token_file).read_text(encoding="ascii") if state.token_file else ""
    with Client(state.url, token, timeout_s=5, patience_s=0, ca_file=_authority(plan)) as client:
        if (health := client.health()) is None:
            return [], "coordinator", ""
        try:
            instances = [item for item in client.instances() if item.state == "READY"]
        except HeadraceError:
            return [], "coordinator", ""
    names = {item.name.removeprefix("instances/") for item in instances}
    return (
        instances,
        ", ".join(name for name in plan.instance_names if name not in names),
        health.reason,
    )


def _joined(plan: FleetPlan, state: FleetState) -> tuple[list[Instance], str, str]:
    """As `_ready_instances`, of this host's part: with the API's token as the coordinator sees it, else as the
    launcher does.
    """
    if state.away:
        if state.refusal == "HOST_TAKEN":
            raise user_error("--name", state.away, "give this host a name of its own")
        if state.refusal == "UNAUTHENTICATED":
            raise user_error("--token-file", state.away, "copy `token` of the head's data directory anew")
        return [], f"the coordinator at {state.grpc_address} ({state.away})", ""
    living = {process.name for process in state.processes if process.pid}
    missing = [name for name in plan.instance_names if name not in living]
    if token := os.environ.get("HEADRACE_TOKEN"):
        with (
            Client(state.url, token, timeout_s=5, patience_s=0, ca_file=_authority(plan)) as client,
            suppress(HeadraceError),
        ):
            instances = [item for item in client.instances() if item.state == "READY"]
            ready = {item.name.removeprefix("instances/") for item in instances}
            missing = [name for name in plan.instance_names if name not in ready]
            return [item for item in instances if item.host == plan.host], ", ".join(missing), ""
    return [], ", ".join(missing), ""


def _authority(plan: FleetPlan) -> Path | None:
    return DataDir.at(plan.data_dir).authority if plan.tls else None


def _refuse_dying(data_dir: DataDir, state: FleetState) -> None:
    for process in state.processes:
        if process.restarts >= DEATHS_THAT_FAIL:
            raise _failure(
                data_dir, process.name, f"{process.name} ended {process.restarts} times at its start"
            )


def _failure(data_dir: DataDir, name: str, sentence: str) -> CommandError:
    log = data_dir.log_file(name)
    words = "\n".join(last_lines(log, 12))
    return CommandError(
        f"{sentence}; its log {log} ends with:\n{words}" if words else f"{sentence}; see {data_dir.logs}"
    )


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log file."""
    try:
        with read_below(path.parents[1], path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            return list(deque(file.read().decode(errors="replace").splitlines(), maxlen=count))
    except OSError:
        return []


class Patience:
    """One start, which may take `timeout_s` in all."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[Iterable[int]], float] | None = None,
    ) -> None:
        self._clock, self._cpu_seconds = clock, cpu_seconds or cpu_seconds_of
        self._timeout_s = timeout_s
        self._began = self._moved = clock()
        self._looked = float("-inf")
        self._missing = ""
        self._used = 0.0

    def over(self, missing: str, pids: Iterable[int]) -> str:
        """Why the wait for `missing`, whose processes are `pids`, ends now; empty while it goes on."""
        now = self._clock()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look(now, missing, pids)
        if now - self._began >= self._timeout_s:
            return f"not ready after {self._timeout_s:g} s (--timeout): {missing}"
        if now - self._moved >= STANDSTILL_S:
            return f"not ready, and no progress for {STANDSTILL_S:g} s: {missing}"
        return ""

    def _look(self, now: float, missing: str, pids: Iterable[int]) -> None:
        used = self._cpu_seconds(pids)
        if missing != self._missing or used < self._used or used - self._used >= WORK_S:
            self._moved, self._missing, self._used = now, missing, used


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """CPU seconds that living processes have used so far."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        total += float(times.user + times.system)
    return total
