"""`headrace debug FILE`: one run, the servicers of a fleet in this process, deadlines off, state in memory.

So a `breakpoint()` in a loss, a reward or an engine stops right there, with the terminal attached.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pdb
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, refused, user_error
from headrace_cli.output import console, print_json

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator
    from headrace_coordinator.fleet.fleet import Fleet
    from headrace_coordinator.store.event_log import EventLog
    from headrace_schema.spec import RunSpec
    from headrace_servicekit.instance import Instance


FOR_EVER_S = 10_000_000.0
KINDS = ("trainer", "rollout", "reward", "simulator")
START_S = 60.0


def without_deadlines(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with limits that a person at a breakpoint cannot exceed."""
    limits = {**spec.get("limits", {}), "step_timeout_s": FOR_EVER_S, "instance_timeout_s": FOR_EVER_S}
    return {**spec, "limits": limits}


async def _run_in_process(spec: dict[str, Any], say: Callable[[str, dict[str, Any]], None]) -> str:
    """Runs a spec in this process, calls `say(type, data)` for each event, returns the final state."""
    from headrace_schema.spec import RunSpec
    from headrace_servicekit.rpc.client import disable_deadlines

    disable_deadlines()
    run_spec = RunSpec.model_validate(without_deadlines(spec))
    with tempfile.TemporaryDirectory(prefix="headrace-debug-") as directory:
        async with _fleet_in_process(run_spec, Path(directory)) as coordinator:
            run = await coordinator.submissions.submit(run_spec, "debug")
            async for event in coordinator.past.events(run, 0):
                say(event.type, event.data)
            return coordinator.reads.run(run).state


@asynccontextmanager
async def _fleet_in_process(spec: RunSpec, directory: Path) -> AsyncIterator[Coordinator]:
    from headrace.coordinator.v1 import fleet_pb2_grpc
    from headrace_coordinator.app import Coordinator
    from headrace_coordinator.fleet.fleet import Fleet
    from headrace_coordinator.fleet.grpc_client import GrpcInstanceClient
    from headrace_coordinator.fleet.service import FleetServicer
    from headrace_coordinator.fleet.sessions import FleetSettings
    from headrace_coordinator.store.event_log import EventLog
    from headrace_coordinator.store.memory_store import MemoryStore
    from headrace_servicekit.rpc.server import GrpcServer

    event_log = EventLog(MemoryStore(), time.time)
    await event_log.open("headrace debug")
    settings = FleetSettings(lease_ttl=FOR_EVER_S, heartbeat=1.0, notice=FOR_EVER_S)
    fleet = Fleet(
        event_log, lambda kind, address, who: GrpcInstanceClient(kind, address, who, None), settings
    )
    coordinator = Coordinator(event_log, fleet, directory)
    server = GrpcServer("127.0.0.1:0", token=None, instance="coordinator")
    add = fleet_pb2_grpc.add_FleetServiceServicer_to_server
    name = "headrace.coordinator.v1.FleetService"
    server.add_service(add, FleetServicer(fleet, coordinator.instance_changes.answered), name)
    address = await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.drain, 0.0)
        for kind in KINDS:
            for index in range(_wanted(kind, spec)):
                await _start_instance(stack, kind, index, address, directory)
        await stack.enter_async_context(_tasks(event_log, fleet, coordinator))
        await event_log.wait_until(
            lambda: all(len(fleet.ready(kind)) >= _wanted(kind, spec) for kind in KINDS),
            START_S,
            "the services to register",
        )
        stack.push_async_callback(coordinator.stop)
        yield coordinator


def _wanted(kind: str, spec: RunSpec) -> int:
    counts = {"trainer": spec.trainer.ranks, "rollout": spec.rollout.instances}
    return counts.get(kind, int(kind == "reward" or spec.environment is not None))


async def _start_instance(
    stack: AsyncExitStack, kind: str, index: int, coordinator: str, directory: Path
) -> None:
    from headrace_servicekit.instance import Instance, InstanceConfig

    config = InstanceConfig.model_validate(
        {
            "kind": kind,
            "name": f"{kind}-{index}",
            "coordinator": coordinator,
            "devices": "auto" if kind in ("rollout", "trainer") else "",
            "data_dir": directory,
            "shm_dir": directory / "shm",
        }
    )
    instance = Instance(config)
    stack.push_async_callback(await _mount(instance))
    await instance.start()
    stack.push_async_callback(instance.stop, 1.0)


async def _mount(instance: Instance) -> Callable[[], Awaitable[None]]:
    """Adds its kind's service to an instance that has not started; returns what ends it."""
    module = importlib.import_module(f"headrace_{instance.config.kind}.__main__")
    close: Callable[[], Awaitable[None]] = await module.mount(instance)
    return close


@asynccontextmanager
async def _tasks(event_log: EventLog, fleet: Fleet, coordinator: Coordinator) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(work) for work in (event_log.run(), fleet.sweep(), coordinator.scheduler.run())
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_debug(spec: dict[str, Any], say: Callable[[str, dict[str, Any]], None]) -> str:
    """Blocking form of `debug`; torch gets every core of the process."""
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    with breakpoints() as prompt:
        return asyncio.run(_run_in_process(spec, lambda kind, data: prompt.show(partial(say, kind, data))))


class Prompt:
    """Whether the terminal belongs to a debugger; what is to be shown meanwhile waits."""

    def __init__(self) -> None:
        self.over = False
        """The debugger was quit: no further breakpoint stops on the way out."""
        self._taken = threading.RLock()
        self._held = False
        self._waiting: list[Callable[[], None]] = []

    @contextmanager
    def take(self) -> Iterator[None]:
        """Keeps the terminal for the caller: a second thread at a breakpoint waits for the first one."""
        with self._taken:
            self._held = True
            try:
                yield
            finally:
                self._held = False
                self.show(lambda: None)

    def show(self, text: Callable[[], None]) -> None:
        """Calls `text`, which prints, now or when the debugger goes on."""
        self._waiting.append(text)
        while self._waiting and not self._held:
            self._waiting.pop(0)()


class Debugger(pdb.Pdb):
    """pdb with a terminal of its own; quitting interrupts the process, as Ctrl-C does."""

    prompt_of_run: Prompt

    def interaction(
        self, frame: FrameType | None, traceback: TracebackType | BaseException | None, *rest: Any
    ) -> None:
        """Reads commands until the program goes on."""
        with self.prompt_of_run.take():
            super().interaction(frame, traceback, *rest)  # type: ignore[arg-type]

    def set_quit(self) -> None:
        """Ends the run, and not only the scorer or the loss that has stopped."""
        super().set_quit()
        self.prompt_of_run.over = True
        signal.raise_signal(signal.SIGINT)


@contextmanager
def breakpoints() -> Iterator[Prompt]:
    """Makes breakpoint() start a Debugger, unless PYTHONBREAKPOINT names another one."""
    prompt, before = Prompt(), sys.breakpointhook

    def stop(*arguments: Any, **options: Any) -> None:
        if prompt.over:
            return
        debugger = Debugger(nosigint=True)
        debugger.prompt_of_run = prompt
        debugger.set_trace(sys._getframe(1))

    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = stop
    try:
        yield prompt
    finally:
        sys.breakpointhook = before


SHOWN_CHARACTERS = 160
NEEDED = ("headrace_coordinator", "headrace_rollout", "headrace_trainer", "headrace_reward")


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("debug")(debug)


def debug(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run spec, a YAML file.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, such as steps=2.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a spec in one process without deadlines, so that breakpoint() works in a loss or a reward."""
    from headrace.client import HeadraceError, load_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise user_error(
            "headrace debug", f"{', '.join(missing)} is not installed", "pip install 'headrace[local]'"
        )
    try:
        spec = load_spec(file, sets or [])
    except HeadraceError as error:
        raise refused(error) from error
    _run(spec, as_json)


def _run(spec: dict[str, object], as_json: bool) -> None:
    """Runs the spec and prints its events; raises CommandError unless the run succeeds."""
    from headrace.client.errors import Problem
    from headrace_coordinator.api.refusal import Refused

    from headrace_cli.dry_run import check_schema

    check_schema(spec)
    reason = ""

    def say(kind: str, data: dict[str, object]) -> None:
        nonlocal reason
        if kind == "run_state_changed":
            reason = str(data.get("reason", ""))
        if as_json:
            print_json({"type": kind, **data})
        else:
            text = " ".join(f"{key}={value}" for key, value in data.items())
            console().print(f"{kind:<18} {text[:SHOWN_CHARACTERS]}", markup=False)

    try:
        state = run_debug(spec, say)
    except Refused as error:
        problems = [Problem(item.key, item.problem, item.fix) for item in error.problems]
        raise CommandError(
            error.message, reason=error.reason, exit_code=EXIT_USER_ERROR, problems=problems
        ) from error
    if state != "SUCCEEDED":
        raise CommandError(f"the run {state}: {reason}", reason=state)
