"""The coordinator's process of `chunk_stream.py`: its own event log on the embedded store, its own step's streams.

`Generation` and `Learning` are what a run's step uses, `WorkerGroup` opens both, gRPC ports carry the calls. Only
the scorer is not a process: it answers at once, because no peer scores. A step is a pattern's burst of messages.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from _chunk_services import GO, ONE, RUN, TOKEN
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.grpc_client import GrpcInstanceClient
from headrace_coordinator.fleet.instance_client import InstanceClient
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.learning import Learning
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.redis_store import RedisStore
from headrace_schema.spec import RunSpec
from headrace_simulation.world import Quiet

VERSION = common_pb2.PolicyVersion(number=1, digest="weights")


class AtOnce(InstanceClient):
    """A client of a reward service that takes no time."""

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """OpenRun."""
        return reward_pb2.OpenRunResponse()

    async def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        """Score: 1 for everybody."""
        async for request in sent:
            results = [
                reward_pb2.ScoreResult(
                    sample=item.sample, attempt=item.attempt, status=reward_pb2.SCORE_STATUS_OK, reward=1.0
                )
                for item in request.items
            ]
            yield reward_pb2.ScoreResponse(results=results)


class Watched(AttemptState):
    """Notes when each message began and when its acknowledgement is durable; tells a producer that waits for that."""

    def __init__(self, *parts: Any, **modes: Any) -> None:
        super().__init__(*parts, **modes)
        self.go: asyncio.StreamWriter | None = None
        self.began_at: dict[int, float] = {}
        self.durable_at: dict[int, float] = {}
        self.flushes: list[asyncio.Future[None]] = []

    def settle(self, groups: list[tuple[int, list[float]]]) -> None:
        """Reads when a message began off its text, which is kept until it is learned."""
        for prompt, _ in groups:
            self.began_at[prompt] = float(self.trajectories[prompt, 0].received.completion_text.split()[0])
        super().settle(groups)

    def accumulate(self, prompts: list[int], helper: str = "") -> None:
        """Waits for the event to be durable."""
        super().accumulate(prompts, helper)
        self.flushes.append(asyncio.ensure_future(self._note(prompts)))

    async def _note(self, prompts: list[int]) -> None:
        await self.context.event_log.flush()
        now = time.monotonic()
        self.durable_at.update(dict.fromkeys(prompts, now))
        if self.go is not None:
            self.go.write(GO * len(prompts))


def make_spec(model: str, messages: int, steps: int, together: int, group: int = 1) -> RunSpec:
    """A run of so many messages a step, `together` of them at once; its model's path is for the producer."""
    return RunSpec.model_validate(
        {
            "name": RUN,
            "steps": steps,
            "model": {"path": model},
            "data": {"source": "copy_digits", "options": {"digits": 3}},
            "algorithm": {"name": "none", "group_size": group, "prompts_per_step": messages // group},
            "placement": {"mode": "disaggregated"},  # The trainer learns while the rollout generates.
            "rollout": {"max_concurrency": together},
            "reward": {"scorers": [{"name": "exact"}]},
        }
    )


class Bench:
    """One coordinator with a run a pattern."""

    def __init__(self, event_log: EventLog, settings: dict[str, Any]) -> None:
        self.event_log = event_log
        self.fleet = Fleet(event_log, self._connect, FleetSettings())
        self._settings = settings
        self._producers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    def _connect(self, kind: str, address: str, incarnation: str) -> Any:
        return AtOnce() if kind == "reward" else GrpcInstanceClient(kind, address, incarnation, TOKEN)

    async def open(self) -> None:
        """Registers the services, as their sessions would."""
        addresses = {**self._settings["addresses"], "reward": ""}
        for kind, address in addresses.items():
            await self.fleet.register(InstanceState(kind, kind, kind, "host", address, [], {}), [], 0)
            self.fleet.attach(kind, lambda *_: None)

    async def producer_connected(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The line on which a producer hears that it may send the next message."""
        self._producers.put_nowait(writer)

    async def measure(
        self, kind: str, pattern: str, messages: int, steps: int, window: int, group: int = 1
    ) -> list[Any]:
        """[(began, durable)] of the first message of each group, and CPU seconds of this process, of each step."""
        run = f"{RUN}-{kind}-{pattern}"
        # One at a time, the producer waits for its line, not for its assignment.
        together = messages if pattern == ONE else window
        spec = make_spec(f"{kind}-{pattern}", messages, steps, together, group)
        now, folder = self.event_log.now(), str(Path(self._settings["directory"]) / "runs" / run)
        submitted = ev.RunSubmitted(at=now, run=run, spec=spec.model_dump(mode="json"), directory=folder)
        restored = ev.VersionRestored(
            at=now, run=run, number=1, parent=0, ordinal=0, digest="weights", checkpoint="", frontier_step=0
        )
        admitted = ev.RunAdmitted(at=now, run=run, rollouts=["rollout"], trainers=["trainer"], devices=[])
        await self.event_log.commit(submitted, admitted, restored)
        context = RunContext(
            self.event_log,
            self.fleet,
            run,
            spec,
            await asyncio.to_thread(Dataset.open, spec.data, 0),
            Quiet(),
        )
        await context.staffing.staff()
        for member in context.workers.rollouts:
            # It has no device and no weights to take first.
            member.awake, member.installed = True, VERSION.number
        found = [await self._step(context, pattern) for _ in range(steps)]
        await context.staffing.score_streams.end()
        await self.event_log.commit(ev.RunReleased(at=self.event_log.now(), run=run))
        return found

    async def _step(self, context: RunContext, pattern: str) -> tuple[list[tuple[float, float]], float]:
        """As `Attempt.run`, whose trainer learns while the rollout generates."""
        ledger, event_log, spent = context.state.ledger, self.event_log, time.process_time()
        await event_log.commit(
            ev.StepOpened(
                at=event_log.now(),
                run=context.run_id,
                step=ledger.step,
                attempt=1,
                base=1,
                number=context.state.lineage.last_number + 1,
            )
        )
        published = Published(VERSION, common_pb2.WeightManifest(), common_pb2.WeightSource())
        generation = Generation(context, published, StepTimer(event_log.now))
        with patch("headrace_coordinator.run.step.generation.AttemptState", Watched):
            attempt = generation.begin()
        assert isinstance(attempt, Watched)
        learning = Learning(attempt)

        async def generate() -> None:
            await generation.fill()
            attempt.complete()

        async def first_go() -> None:
            line = await self._producers.get()
            if pattern == ONE:
                attempt.go = line
                line.write(GO)

        await gather_all(generate(), learning.run(), first_go())
        await asyncio.gather(*attempt.flushes)
        if attempt.refused or len(attempt.durable_at) != len(ledger.slots) // ledger.group_size:
            raise RuntimeError(f"{attempt.refused} chunks were refused")
        keys = [(slot.prompt, slot.sample) for slot in ledger.slots.values()]
        await event_log.commit(
            ev.StepSkipped(at=event_log.now(), run=context.run_id, step=ledger.step, dropped={})
        )
        for member in context.workers.rollouts:
            await member.end_retention(keys)
        times = [(attempt.began_at[prompt], at) for prompt, at in sorted(attempt.durable_at.items())]
        return times, time.process_time() - spent


async def coordinate(settings: dict[str, Any]) -> None:
    """Reads (kind, pattern, messages, steps, window, group) from standard input; a line of JSON for each."""
    import sys

    store = RedisStore(settings["store"])
    event_log = EventLog(store, time.time)
    await event_log.open("benchmark", Path(settings["directory"]) / "store_id")
    writer = asyncio.create_task(event_log.run(), name="event_log")
    bench = Bench(event_log, settings)
    lines = await asyncio.start_unix_server(bench.producer_connected, settings["go"])
    await bench.open()
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await bench.measure(*json.loads(line))), flush=True)
    lines.close()
    await event_log.flush()
    writer.cancel()
    await store.close()
