"""What an actor does on its node: runs `headrace up` or `headrace join` there, tethered to itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from typing import Any

from headrace.client import Client, HeadraceError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import is_locked, living_state
from headrace_cli.launcher.stop import GRACE_S, stop_fleet
from headrace_cli.launcher.tether import tether
from headrace_servicekit.rpc.addresses import listening

LOOK_S = 1.0
LOG_LINES = 12
NICE = (
    "warning: the services here have the niceness of Ray's workers, and give way to all other processes of the node; "
    "start Ray there with RAY_worker_niceness=0\n"
)
DRAINED = "drained: Ray says that its node goes away"


class Node:
    """One node's part of a fleet: its launcher and what that started.

    The part ends in order when this process is gone, however it went: the kernel then sends SIGTERM to the command
    that this process started, and after it to the launcher.
    """

    def __init__(self) -> None:
        # The kernel's signal comes as the thread ends that started the process: this one lasts as long as the actor.
        self._starter = ThreadPoolExecutor(1)
        self._part: subprocess.Popen[bytes] | None = None
        self._data_dir: DataDir | None = None

    def about(self, port: int) -> dict[str, Any]:
        """What the node is and what Ray gave this actor of it, with two free ports in a row from `port` on."""
        import ray
        from headrace_servicekit.lease.devices import boot_id, detect_devices

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "port": free_pair(port, ray.util.get_node_ip_address()),
            "boot_id": boot_id(),
            "cores": sorted(os.sched_getaffinity(0)),
            "machine_cores": os.cpu_count() or 1,
            "gpus_given": len(context.get_accelerator_ids().get("GPU", [])),
            "gpus_seen": sum("/gpu:" in name for name in detect_devices()),
        }

    def start(
        self, words: Sequence[str], data_dir: str, files: Mapping[str, str], awaited: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Runs `headrace WORDS` on a data directory until its processes are ready; what it printed, as JSON.

        `files` are put into the data directory first, readable by this user alone. What an actor before this one left
        there is let end first. `awaited` names instances that the head must list as ready; empty for the head itself.
        What went wrong is returned as `error`, a sentence.
        """
        place = DataDir.at(data_dir)
        until = time.monotonic() + GRACE_S
        while is_locked(place) and time.monotonic() < until:
            time.sleep(LOOK_S / 4)
        place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            put(place.root / name, content)
        place.logs.mkdir(exist_ok=True)
        self._data_dir = place
        command = [sys.executable, "-P", "-m", "headrace_cli", *words, "--data-dir", str(place.root)]
        self._part = self._starter.submit(self._spawn, command, place).result()
        found = self._answer()
        if "error" not in found and (missing := self._missing(place, awaited)):
            found = {"error": f"{socket.gethostname()}: not ready: {missing}; see {place.logs} there"}
        return found | self._secrets(place) | {"warnings": self._warnings(place)}

    def _missing(self, place: DataDir, awaited: Mapping[str, Any]) -> str:
        """Waits for instances of this node to register; names of those that did not in time."""
        missing = list(awaited.get("names", ()))
        until = time.monotonic() + awaited.get("timeout_s", 0.0)
        while missing and self._part is not None and self._part.poll() is None and time.monotonic() < until:
            with suppress(HeadraceError), self._client(place, awaited) as client:
                ready = {each.name for each in client.instances() if each.state == "READY"}
                missing = [name for name in missing if name not in ready]
            time.sleep(LOOK_S / 4)
        return ", ".join(missing)

    def _client(self, place: DataDir, awaited: Mapping[str, Any]) -> Client:
        return Client(awaited["url"], awaited["token"], timeout_s=5, patience_s=0, ca_file=place.authority)

    def _spawn(self, command: Sequence[str], place: DataDir) -> subprocess.Popen[bytes]:
        with (place.logs / "start.log").open("wb") as log:
            if not _as_urgent_as_ray():
                log.write(NICE.encode())
                log.flush()
            return subprocess.Popen(
                [*command, "--foreground", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                preexec_fn=tether(SIGTERM),
            )

    def _answer(self) -> dict[str, Any]:
        """The one line that the command prints: what is ready, or what is wrong."""
        assert self._part is not None and self._part.stdout is not None
        line = self._part.stdout.readline()  # The command has a time limit of its own.
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            found = {"error": {"message": f"it ended with status {self._part.wait()}{self._log_end()}"}}
        if "error" in found:
            return {"error": f"{socket.gethostname()}: {found['error']['message']}"}
        return found

    def _log_end(self) -> str:
        assert self._data_dir is not None
        lines = (self._data_dir.logs / "start.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "; its last words: " + " / ".join(lines) if lines else ""

    def _warnings(self, place: DataDir) -> list[str]:
        lines = (place.logs / "start.log").read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("warning:")]

    def _secrets(self, place: DataDir) -> dict[str, Any]:
        """What the others and the user need of a head."""
        files = {
            "token": place.token_file,
            "http_token": place.http_token_file,
            "authority": place.tls / "ca.pem",
        }
        return {name: file.read_text(encoding="ascii") for name, file in files.items() if file.is_file()}

    def fleet_token(self, data_dir: str) -> str:
        """The token of the fleet whose files are in a data directory of this node; "" where there is none."""
        file = DataDir.at(data_dir).token_file
        return file.read_text(encoding="ascii").strip() if file.is_file() else ""

    def watch(self) -> str:
        """Returns when this node's part has ended, with the reason. Ray's notice that the node goes away ends it."""
        assert self._part is not None
        import ray

        own = ray.get_runtime_context().get_node_id()
        while (status := self._part.poll()) is None:
            if own in ray._private.state.state.get_draining_nodes():
                self.stop()
                return DRAINED
            time.sleep(LOOK_S)
        return f"the launcher ended with status {status}"

    def stop(self) -> None:
        """Ends this node's part in order: trainers save a checkpoint first."""
        if self._data_dir is not None and living_state(self._data_dir) is not None:
            stop_fleet(self._data_dir)
        if self._part is not None:
            self._part.terminate()
            self._part.wait()


def _as_urgent_as_ray() -> bool:
    """Takes what this thread starts out of the niceness of Ray's workers; False where the user may not.

    Ray's is for tasks that would starve its raylet: a fleet's services are the node's work.
    """
    rays = os.getpriority(os.PRIO_PROCESS, os.getppid())
    if os.getpriority(os.PRIO_PROCESS, 0) > rays:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, rays)
        except PermissionError:
            return False
    return True


def put(file: Path, content: str) -> None:
    """Writes a file of this user alone, in one piece."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.new")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(content)
    aside.replace(file)


def free_pair(first: int, address: str) -> int:
    """The first of two free ports in a row at an address of this host; `first` where none is free within a hundred."""

    def free(port: int) -> bool:
        try:
            listening(address, port).close()
        except OSError:
            return False
        return True

    return next((port for port in range(first, first + 100, 2) if free(port) and free(port + 1)), first)
