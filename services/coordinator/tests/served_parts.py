"""The HTTP API over a real coordinator: its store is in memory, its instances only hear what they are told."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from headrace_coordinator import serving as sockets
from headrace_coordinator.api.http import make_app
from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings, InstanceUsage, Supervisor
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.history import History
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_servicekit import http_server

SPEC: dict[str, Any] = {
    "name": "sums",
    "model": {"path": "owner/model"},
    "data": {"source": "copy_digits", "heldout": 10},
    "reward": {"scorers": [{"name": "exact"}]},
}
CAPABILITIES = {
    "rollout": {"engines": ["transformers"]},
    "trainer": {"backends": ["fsdp"], "algorithms": ["grpo"]},
    "reward": {"scorers": ["exact", "last_number"]},
}
FLEET = {
    "rollout-0": "h/cpu:0",
    "rollout-1": "h/cpu:1",
    "rollout-2": "h/cpu:2",
    "trainer-0": "h/cpu:3",
    "trainer-1": "h/cpu:4",
    "reward-0": "h/cpu:5",
}
TO_END = {
    "SUCCEEDED": (run_states.PLANNING, run_states.RUNNING, run_states.SUCCEEDED),
    "FAILED": (run_states.PLANNING, run_states.FAILED),
    "CANCELLED": (run_states.PLANNING, run_states.CANCELLED),
}


class Served:
    """A coordinator with a small fleet. Devices for runs are in quarantine, so that runs wait."""

    def __init__(self, directory) -> None:
        self.runs = directory / "runs"
        self.event_log = EventLog(MemoryStore(), time.time, history=History(self.runs))
        self.fleet = Fleet(self.event_log, lambda *_: None, FleetSettings())
        ids = map(str, itertools.count())
        self.coordinator = Coordinator(self.event_log, self.fleet, directory, new_id=lambda: next(ids))
        self.app = self.app_with(None)

    def app_with(self, token: str | None) -> Any:
        """The API, which asks for a token where there is one."""
        return make_app(self.coordinator, runs_directory=self.runs, token=token, heartbeat_s=0.1)

    async def open(self) -> None:
        await self.event_log.open("test", self.runs.parent / "store_id")
        lasting = (self.event_log.run(), self.coordinator.scheduler.run(), self.coordinator.archive.run())
        self._tasks = [asyncio.create_task(each) for each in lasting]
        for name, device in FLEET.items():
            kind = name.partition("-")[0]
            await self.register(
                InstanceState(name, f"i-{name}", kind, "h", "h:1", [device], CAPABILITIES[kind])
            )
        hosted = frozenset(f"i-{name}" for name in FLEET)
        self.fleet.supervised(Supervisor("h", self._hear, frozenset({"rollout", "trainer"}), hosted))
        await self.post(
            self.lease(7, "gone", *list(FLEET.values())[:-1]),
            ev.LeaseEnded(at=0, epoch=7, cause="its holder is silent", proven=False),
            self.lease(8, "i-reward-0", FLEET["reward-0"]),
        )
        self.fleet.heartbeat("i-rollout-1", [], InstanceUsage(1000, 0.5, (("GPU-aa/gpu:0", 0.5, 9),)))

    def _hear(self, command: str, body: Any) -> None:
        if command == "scale":
            asyncio.get_running_loop().call_soon(self.coordinator.instance_changes.answered, body[0], "")

    async def register(self, instance: InstanceState) -> None:
        """An instance with an open session."""
        await self.fleet.register(instance, [], 0, self.event_log.state.store_id)
        self.fleet.attach(instance.incarnation, lambda *_: None)

    def lease(self, epoch: int, incarnation: str, *devices: str) -> ev.LeaseGranted:
        """A lease of devices for no run."""
        return ev.LeaseGranted(
            at=0, epoch=epoch, incarnation=incarnation, run="", stage="learn", devices=[*devices]
        )

    async def post(self, *events: ev.Event) -> None:
        """Adds events; returns when they are in the histories."""
        self.event_log.post(*events)
        await self.event_log.flush()

    async def note(self, run: str, text: str = "") -> None:
        """Adds an event that changes nothing."""
        await self.post(ev.Noted(at=0, run=run, text=text))

    async def end(self, run: str, state: str = "CANCELLED") -> None:
        """Ends a run that is queued."""
        await self.post(*(ev.RunStateChanged(at=0, run=run, state=each, reason="") for each in TO_END[state]))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.contextmanager
def serving(served: Served) -> Iterator[str]:
    """Its URL on this host, for clients that block; a thread serves it."""
    listening, ended = sockets.listen("127.0.0.1", 0), threading.Event()

    async def serve() -> None:
        await served.open()
        server = http_server.make_server(served.app, timeout_graceful_shutdown=1)
        task = asyncio.create_task(http_server.serve(server, listening))
        await asyncio.to_thread(ended.wait)
        server.should_exit = server.force_exit = True
        await task
        await served.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        thread.join()
        listening.close()
