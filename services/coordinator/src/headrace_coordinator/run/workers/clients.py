"""Clients of a run's reward instances and simulators, and what all of its clients share.

A call carries its authority and has a deadline. `rollout_client` and `trainer_client` have the calls of the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.sections.scoring import RewardSection
from typing_extensions import override

from headrace_coordinator.fleet.instance_client import CLOSE_S, LOAD_S, QUICK_S, InstanceClient, WorkerClient
from headrace_coordinator.waits import Waits

SlotKey = tuple[int, int]
SILENCE_S = 10.0
"""Answers take seconds in a healthy run; only what lasts longer is worth a line."""


PART_BYTES = 8 << 20
"""Most bytes of a message's pieces whose size users choose: rows, prompts, answers."""


class Sized(Protocol):
    """A message that knows its bytes."""

    def ByteSize(self) -> int:
        """Its bytes on the wire."""


S = TypeVar("S", bound=Sized)


def in_parts(pieces: Iterable[S]) -> Iterator[list[S]]:
    """The pieces in order, joined up to PART_BYTES; a larger one is alone."""
    part: list[S] = []
    size = 0
    for piece in pieces:
        own = piece.ByteSize()
        if part and size + own > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(piece)
        size += own
    if part:
        yield part


def sample_key(slot: SlotKey) -> common.SlotKey:
    """(prompt ordinal, sample index) as the contracts' key."""
    return common.SlotKey(prompt_ordinal=slot[0], sample_index=slot[1])


def slot_key(sample: common.SlotKey) -> SlotKey:
    """(prompt ordinal, sample index) of the contracts' key."""
    return sample.prompt_ordinal, sample.sample_index


@dataclass
class Published:
    """A version that can be installed."""

    version: common.PolicyVersion
    manifest: common.WeightManifest = field(default_factory=common.WeightManifest)
    source: common.WeightSource = field(default_factory=common.WeightSource)
    files: rollout.PolicyFiles | None = None
    """Read from disk in place of manifest and source; the version's digest may be empty until it was read."""


@dataclass
class RewardClient(WorkerClient):
    """A reward instance."""

    async def open_run(self, section: RewardSection, *, leased: bool = False) -> None:
        """Loads and tries the scorers, within their own limits; `leased`: they score on leased devices alone."""
        request = reward.OpenRunRequest(config_json=section.model_dump_json(), leased=leased)
        await self.call("OpenRun", request, section.opening_s + QUICK_S)

    def score(
        self, batches: AsyncIterator[Sequence[reward.ScoreItem]], timeout: float
    ) -> AsyncIterator[reward.ScoreResponse]:
        """Answers in, their results out, in any order."""

        async def requests() -> AsyncIterator[reward.ScoreRequest]:
            async for items in batches:
                for part in in_parts(items):
                    yield reward.ScoreRequest(header=self.header(), items=part)

        return self.instance_client.stream("Score", requests(), timeout)


@dataclass
class SimulatorClient(WorkerClient):
    """A simulator instance."""

    async def open_pool(
        self, request: simulator.OpenPoolRequest, limit_s: float = LOAD_S
    ) -> simulator.OpenPoolResponse:
        """Makes environments."""
        response: simulator.OpenPoolResponse = await self.call("OpenPool", request, limit_s)
        return response

    async def close_pool(self, pool: str) -> None:
        """Ends the environments of a pool."""
        await self.call("ClosePool", simulator.ClosePoolRequest(pool=pool), CLOSE_S)


STAGES = {
    ("trainer", "OpenRun"): ("opens the run", True),
    ("trainer", "Restore"): ("loads model and optimizer", True),
    ("trainer", "JoinTrainerGroup"): ("meets its trainer group", True),
    ("trainer", "SaveCheckpoint"): ("writes a checkpoint", False),
    ("trainer", "ExportModel"): ("exports the model", False),
    ("rollout", "OpenRun"): ("starts its engine", True),
    ("rollout", "InstallPolicy"): ("installs weights", False),
    ("reward", "OpenRun"): ("loads the scorers", True),
    ("simulator", "OpenPool"): ("makes environments", True),
}
"""Calls that may take long, as people know them, and whether their end is an event: of others another event tells."""


class WatchedInstanceClient(InstanceClient):
    """A client whose silence is a named wait, or a stage: a run that stands still says whose answer is missing."""

    def __init__(self, client: InstanceClient, waits: Waits, run: str, name: str, kind: str) -> None:
        self._client = client
        self._waits = waits
        self._run = run
        self._name, self._kind = name, kind

    @override
    async def call(self, method: str, request: Any, timeout: float) -> Any:
        with self._silence(method):
            return await self._client.call(method, request, timeout)

    @override
    async def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        responses = self._client.stream(method, sent, timeout)
        while True:
            with self._silence(method):
                try:
                    response = await anext(responses)
                except StopAsyncIteration:
                    return
            yield response

    def _silence(self, method: str) -> AbstractContextManager[None]:
        if (self._kind, method) in STAGES:
            what, told = STAGES[self._kind, method]
            far = partial(self._waits.progress.get, self._name)
            return self._waits.stage(self._run, f"{self._name} {what}", told=told, progress=far)
        return self._waits.named(self._run, f"{self._name} to answer {method}", after=SILENCE_S)
