"""The driver of a fleet on Ray, `python -m headrace_clusters.ray.driver PLAN_JSON`: a launcher over many nodes.

It has the lock of the user's data directory and writes the state file, so that `headrace down` and all other commands
find it. Ray releases what it has taken as soon as it is gone, however it went.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import FleetLock, FleetState
from headrace_servicekit.rpc.addresses import host_port

from headrace_clusters.ray.connecting import connect
from headrace_clusters.ray.fleet import TICK_S, RayFleet
from headrace_clusters.ray.node import put
from headrace_clusters.ray.plan import RayPlan

WANTED = "ray-nodes"
"""How many nodes the user wants, as `headrace ray nodes N` writes it."""
MEMBERS = "ray.json"


class Driver:
    """One fleet on Ray, from the lock to the last node that is given back."""

    def __init__(self, plan: RayPlan) -> None:
        self._plan, self._place = plan, DataDir.at(plan.data_dir)
        self._lock = FleetLock(self._place.lock_file)
        self._stopping = False
        self._written: tuple[object, object] = (None, None)

    def run(self) -> None:
        """Runs the fleet until a signal. Raises CommandError where it does not come up or cannot go on."""
        if not self._lock.acquire():
            problem = f"a fleet already runs on {self._place.root}"
            raise user_error("--data-dir", problem, "use it, or stop it with headrace down")
        (self._place.root / WANTED).unlink(missing_ok=True)
        self._write("starting", {})
        ray = connect(self._plan.address)
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
        ):  # Ray sets handlers of its own as it connects.
            signal.signal(number, self._stop)
        fleet = RayFleet(ray, self._plan, self._place.fleet_id, say)
        try:
            fleet.start()
            self._show(fleet)
            tell({"ready": fleet.head["url"]})
            while fleet.fatal is None:
                fleet.look()
                self._grow(fleet)
                self._show(fleet)
                time.sleep(TICK_S)
            raise fleet.fatal
        except KeyboardInterrupt:
            return
        finally:
            self._end(ray, fleet)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Once: what follows has deadlines, and half of it would leave nodes to their tethers."""
        if not self._stopping:
            self._stopping = True
            raise KeyboardInterrupt

    def _end(self, ray: Any, fleet: RayFleet) -> None:
        self._stopping = True
        self._write("stopping the nodes, at most 60 s", fleet.head)
        fleet.stop()
        ray.shutdown()
        for name in (self._place.state_file, self._place.root / MEMBERS):
            name.unlink(missing_ok=True)
        self._lock.release()

    def _grow(self, fleet: RayFleet) -> None:
        file = self._place.root / WANTED
        with suppress(OSError, ValueError):
            wanted = int(file.read_text(encoding="ascii"))
            file.unlink()
            fleet.grow(wanted)

    def _show(self, fleet: RayFleet) -> None:
        """Puts what has changed into the files that commands read."""
        members = [
            {
                "node": each.name,
                "stage": each.stage,
                "host": each.about.get("host", ""),
                "why": str(each.error or ""),
            }
            for each in fleet.members
        ]
        if (fleet.head, members) == self._written:
            return
        self._written = (dict(fleet.head), members)
        put(self._place.root / MEMBERS, json.dumps(members, indent=1))
        for name, file in (
            ("token", self._place.token_file),
            ("http_token", self._place.http_token_file),
            ("authority", self._place.tls / "ca.pem"),
        ):
            if name in fleet.head:
                put(file, fleet.head[name])
        self._write("running", fleet.head)

    def _write(self, phase: str, head: dict[str, Any]) -> None:
        state = FleetState(
            launcher_pid=os.getpid(),
            phase=phase,
            url=head.get("url", ""),
            grpc_address=host_port(head["address"], head["port"] + 1) if head else "",
            token_file=str(self._place.http_token_file) if "http_token" in head else "",
            shared_memory="",
            redis_url="",
            started_at=time.time(),
        )
        state.write(self._place)


def say(text: str) -> None:
    """A line for the log, and for whoever waits for the start."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
    with suppress(OSError):
        tell({"waiting": text})


def tell(document: dict[str, Any]) -> None:
    """A line for the command that started this driver; nobody reads any once the fleet is ready."""
    if not _told["ready"]:
        _told["ready"] = "ready" in document
        os.write(_told["to"], json.dumps(document).encode() + b"\n")


_told = {"to": 1, "ready": False}


def main() -> int:
    """Runs the fleet that the only argument describes; the exit status."""
    _told["to"] = os.dup(1)
    os.dup2(2, 1)  # What Ray prints is for the log.
    try:
        Driver(RayPlan.from_json(sys.argv[1])).run()
    except CommandError as error:
        print(error.message, file=sys.stderr, flush=True)
        problems = [{"key": each.key, "problem": each.problem, "fix": each.fix} for each in error.problems]
        with suppress(OSError):
            tell(
                {
                    "error": error.message,
                    "reason": error.reason,
                    "exit_code": error.exit_code,
                    "problems": problems,
                }
            )
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
