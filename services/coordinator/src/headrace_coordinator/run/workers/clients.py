"""Instances at work for a run: the contracts' calls with their authority and deadlines."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.sections.scoring import RewardSection

from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.ports import Port

QUICK_S, SLOW_S, LOAD_S, CLOSE_S = 30.0, 120.0, 900.0, 90.0
"""Deadlines: bookkeeping; moving memory; loading or writing a model; closing a run."""
_CLOSE = {
    "rollout": ("CloseRun", rollout.CloseRunRequest),
    "trainer": ("CloseRun", trainer.CloseRunRequest),
    "reward": ("CloseRun", reward.CloseRunRequest),
    "simulator": ("ClosePool", simulator.ClosePoolRequest),
}
"""By kind; a ClosePool that names no pool closes all of the run."""

KEYS_A_MESSAGE = 10_000
"""Slots that one request names."""

SlotKey = tuple[int, int]
Opening = rollout.GenerateOpen | rollout.RunEpisodesOpen
Produced = rollout.GenerateResponse | rollout.RunEpisodesResponse


def sample_key(slot: SlotKey) -> common.SampleKey:
    """(prompt ordinal, sample index) as the contracts' key."""
    return common.SampleKey(prompt_ordinal=slot[0], sample_index=slot[1])


def _parts(slots: Iterable[SlotKey]) -> Iterator[list[SlotKey]]:
    """Slots by the message."""
    source = iter(slots)
    while part := list(itertools.islice(source, KEYS_A_MESSAGE)):
        yield part


@dataclass
class Published:
    """A version that can be installed."""

    version: common.PolicyVersion
    manifest: common.WeightManifest
    source: common.WeightSource
    files: rollout.PolicyFiles | None = None
    """Read from disk in place of manifest and source; the version's digest may be empty until it was read."""


@dataclass
class WorkerClient:
    """One instance at work for one run."""

    run: str
    instance: InstanceState
    port: Port
    coordinator_epoch: int
    devices: tuple[str, ...] = ()
    lease_epoch: int = 0
    awake: bool = False
    installed: int = 0
    """The version that it generates with; 0 for none."""
    open_id: int = 0
    opened: bool = False
    kept: bool = False
    """It has no devices and stayed loaded."""
    _requests: ClassVar[Iterable[int]] = itertools.count(1)

    @property
    def incarnation(self) -> str:
        """Id of the process."""
        return self.instance.incarnation

    def header(self) -> common.CommandHeader:
        """Authority of the next call."""
        number = next(iter(self._requests))
        return common.CommandHeader(
            request_id=f"{self.run}-{self.coordinator_epoch}-{number}",
            run=f"runs/{self.run}",
            coordinator_epoch=self.coordinator_epoch,
            lease_epoch=self.lease_epoch,
            open_id=self.open_id,
            command_sequence=(self.coordinator_epoch << 32) + number,
        )

    def lost_lease(self) -> None:
        """Its lease was revoked: it has nothing on its devices any more."""
        self.lease_epoch, self.awake, self.kept = 0, False, False

    async def close_run(self) -> None:
        """Ends everything that the instance does for the run and frees what it keeps of it."""
        method, request = _CLOSE[self.instance.kind]
        await self.port.call(method, request(header=self.header()), CLOSE_S)


@dataclass
class RolloutClient(WorkerClient):
    """A rollout instance."""

    max_concurrency: int = 1
    digest: str = ""
    """Of the installed weights."""
    lost_pools: list[str] = field(default_factory=list)
    """Pools of environments that it says answer no more."""

    async def open_run(self, config_json: str) -> None:
        """Model architecture, tokenizer and engine."""
        request = rollout.OpenRunRequest(header=self.header(), config_json=config_json)
        response: rollout.OpenRunResponse = await self.port.call("OpenRun", request, LOAD_S)
        self.max_concurrency = max(1, response.max_concurrency)

    async def install(self, published: Published) -> rollout.InstallPolicyResponse:
        """Compare-and-set to a version."""
        request = rollout.InstallPolicyRequest(header=self.header(), version=published.version)
        if published.files is not None:
            request.files.CopyFrom(published.files)
        else:
            request.manifest.CopyFrom(published.manifest)
            request.sources.append(published.source)
        # The first one waits for the engine's start, which may take minutes.
        response: rollout.InstallPolicyResponse = await self.port.call("InstallPolicy", request, LOAD_S)
        self.installed, self.digest = published.version.number, response.version.digest
        return response

    def generate(
        self, opening: Opening, assignments: AsyncIterator[rollout.AssignGroups], timeout: float
    ) -> AsyncIterator[Produced]:
        """Groups in, chunks out: answers, or episodes, as the opening says."""
        opening.header.CopyFrom(self.header())
        episodes = isinstance(opening, rollout.RunEpisodesOpen)
        request: Any = rollout.RunEpisodesRequest if episodes else rollout.GenerateRequest

        async def requests() -> AsyncIterator[Any]:
            yield request(open=opening)
            async for assignment in assignments:
                yield request(assign=assignment)

        return self.port.stream("RunEpisodes" if episodes else "Generate", requests(), timeout)

    async def suspend(self) -> None:
        """Pause, then give the memory back."""
        self.installed, self.awake, self.kept = (
            0,
            False,
            False,
        )  # Also where a reply is lost: what it did then is not known.
        await self.port.call("Pause", rollout.PauseRequest(header=self.header()), QUICK_S)
        await self.port.call("Suspend", rollout.SuspendRequest(header=self.header()), SLOW_S)

    async def make_room(self) -> None:
        """Before an install: the weights' room, where they have none."""
        if not self.awake:
            weights = rollout.WakeRequest(header=self.header(), scope=rollout.WAKE_SCOPE_WEIGHTS)
            await self.port.call("Wake", weights, LOAD_S)

    async def go_on(self) -> None:
        """After an install: the cache's room, where it has none (PROTOCOL, Versions)."""
        if self.awake:
            return
        cache = rollout.WakeRequest(header=self.header(), scope=rollout.WAKE_SCOPE_KV_CACHE)
        await self.port.call("Wake", cache, SLOW_S)
        await self.port.call("Resume", rollout.ResumeRequest(header=self.header()), QUICK_S)
        self.awake = True

    async def abort(self) -> None:
        """Ends everything that runs."""
        await self.port.call("Abort", rollout.AbortRequest(header=self.header()), QUICK_S)

    async def inventory(self) -> Sequence[rollout.InventoryItem]:
        """Trajectories in what it retains."""
        request = rollout.ListInventoryRequest(header=self.header())
        response: rollout.ListInventoryResponse = await self.port.call("ListInventory", request, QUICK_S)
        return response.items

    async def fetch(self, slots: Iterable[SlotKey]) -> list[common.Trajectory]:
        """Bodies from what it retains; unknown ones are left out."""
        found: list[common.Trajectory] = []
        for part in _parts(slots):
            request = rollout.FetchTrajectoriesRequest(header=self.header(), samples=map(sample_key, part))
            async for response in self.port.listen("FetchTrajectories", request, SLOW_S):
                found += response.trajectories
        return found

    async def end_retention(self, slots: Iterable[SlotKey]) -> None:
        """The ledger says TRAINED or DROPPED."""
        for part in _parts(slots):
            request = rollout.ReleaseTrajectoriesRequest(header=self.header())
            for prompt, sample in part:
                request.samples.add(prompt_ordinal=prompt, sample_index=sample)
            await self.port.call("ReleaseTrajectories", request, QUICK_S)


@dataclass
class TrainerClient(WorkerClient):
    """A rank of the trainer group."""

    rank: int = 0
    barrier: int = field(default=trainer.BARRIER_GROUP)
    drop_equal: bool = False
    max_refill: int = 0
    greedy_first: bool = False
    joined: bool = False
    """A helper that is a group of its own."""

    def is_baseline(self, sample: int) -> bool:
        """Whether a group's sample is its greedy answer, which is scored and not learned from."""
        return self.greedy_first and sample == 0

    async def open_run(self, config_json: str, directory: str) -> None:
        """Model, optimizer and algorithm."""
        request = trainer.OpenRunRequest(
            header=self.header(), config_json=config_json, run_directory=directory
        )
        response: trainer.OpenRunResponse = await self.port.call("OpenRun", request, SLOW_S)
        self.barrier = response.barrier
        self.drop_equal, self.max_refill = response.drop_equal, response.max_refill
        self.greedy_first = response.greedy_first

    async def join(self, generation: int, world: int, rendezvous: str, timeout: float) -> None:
        """Meets the other ranks."""
        request = trainer.JoinGangRequest(
            header=self.header(),
            generation=generation,
            rank=self.rank,
            world_size=world,
            rendezvous=rendezvous,
        )
        request.timeout.FromMilliseconds(int(timeout * 1000))
        await self.port.call("JoinGang", request, timeout + 10)

    async def leave(self, generation: int) -> None:
        """As the leader, leaves the trainer group and keeps the run's state for the next one."""
        request = trainer.LeaveGangRequest(header=self.header(), generation=generation, carry=True)
        await self.port.call("LeaveGang", request, LOAD_S)

    async def take_up(self, number: int) -> None:
        """Shards what `leave` kept, which is version `number`, over the group that it leads now."""
        request = trainer.RestoreRequest(header=self.header(), number=number, carried=True)
        await self.port.call("Restore", request, LOAD_S)

    async def state(self) -> trainer.GetStepStateResponse:
        """Where it stands."""
        request = trainer.GetStepStateRequest(header=self.header())
        response: trainer.GetStepStateResponse = await self.port.call("GetStepState", request, QUICK_S)
        return response

    async def list_checkpoints(self, source_directory: str = "") -> trainer.ListCheckpointsResponse:
        """Durable checkpoints of this run or of another run's directory, newest first, and the last failure."""
        request = trainer.ListCheckpointsRequest(
            header=self.header(), page_size=50, source_run_directory=source_directory
        )
        response: trainer.ListCheckpointsResponse = await self.port.call("ListCheckpoints", request, QUICK_S)
        return response

    async def fetch_ledger(self, checkpoint: str, source_directory: str = "") -> bytes:
        """The coordinator's ledger that a checkpoint holds."""
        request = trainer.FetchLedgerRequest(
            header=self.header(), checkpoint=checkpoint, source_run_directory=source_directory
        )
        return b"".join([piece.data async for piece in self.port.listen("FetchLedger", request, SLOW_S)])

    async def restore(
        self, checkpoint: str, number: int, store_id: str, source_directory: str = ""
    ) -> trainer.RestoreResponse:
        """Loads a checkpoint, of this run or another's directory, or the initial model, as version `number`."""
        request = trainer.RestoreRequest(
            header=self.header(),
            checkpoint=checkpoint,
            number=number,
            store_id=store_id,
            source_run_directory=source_directory,
        )
        response: trainer.RestoreResponse = await self.port.call("Restore", request, LOAD_S)
        return response

    async def begin(self, step: int, attempt: int, base: int, number: int) -> None:
        """Opens a step attempt."""
        request = trainer.BeginStepRequest(
            header=self.header(), step=step, attempt=attempt, base_number=base, next_number=number
        )
        await self.port.call("BeginStep", request, SLOW_S)

    def learn(
        self, step: int, attempt: int, messages: AsyncIterator[trainer.LearnRequest], timeout: float
    ) -> AsyncIterator[trainer.LearnResponse]:
        """Settled groups in, acknowledgements out; fills in what is the same for all messages."""

        async def requests() -> AsyncIterator[trainer.LearnRequest]:
            async for message in messages:
                message.header.CopyFrom(self.header())
                message.step, message.attempt = step, attempt
                yield message

        return self.port.stream("Learn", requests(), timeout)

    async def commit(
        self,
        step: int,
        attempt: int,
        base: int,
        number: int,
        set_digest: str,
        manifest: bytes,
        timeout: float = LOAD_S,
    ) -> trainer.CommitStepResponse:
        """Applies the step; an algorithm that learns from its batch more than once does so within this call."""
        request = trainer.CommitStepRequest(
            header=self.header(),
            step=step,
            attempt=attempt,
            base_number=base,
            next_number=number,
            set_digest=set_digest,
            step_manifest=manifest,
        )
        response: trainer.CommitStepResponse = await self.port.call(
            "CommitStep", request, max(LOAD_S, timeout)
        )
        return response

    async def help(self, published: Published) -> trainer.HelpResponse:
        """Loads a published version as the base of what it accumulates for itself."""
        request = trainer.HelpRequest(
            header=self.header(),
            version=published.version,
            manifest=published.manifest,
            sources=[published.source],
        )
        response: trainer.HelpResponse = await self.port.call("Help", request, SLOW_S)
        return response

    async def take_contribution(self, step: int, attempt: int) -> trainer.Contribution:
        """Ends a helper's attempt; where its gradient is, and of which groups."""
        request = trainer.TakeContributionRequest(header=self.header(), step=step, attempt=attempt)
        response: trainer.TakeContributionResponse = await self.port.call("TakeContribution", request, SLOW_S)
        return response.contribution

    async def add_contribution(
        self, step: int, attempt: int, contribution: trainer.Contribution, helper: str
    ) -> None:
        """Adds a helper's gradient to the open step, whole or not at all."""
        request = trainer.AddContributionRequest(
            header=self.header(), step=step, attempt=attempt, contribution=contribution, helper=helper
        )
        await self.port.call("AddContribution", request, SLOW_S)

    async def recorded(self, step: int, attempt: int, number: int) -> Published:
        """The ledger has the version, which is published too."""
        request = trainer.RecordStepRequest(
            header=self.header(), step=step, attempt=attempt, number=number, publish=True
        )
        response: trainer.RecordStepResponse = await self.port.call("RecordStep", request, SLOW_S)
        if not response.HasField("published"):
            return await self.publish(number)  # a trainer of an older release
        return _published(response.published)

    async def abort(self, step: int, attempt: int) -> None:
        """Drops the accumulators."""
        request = trainer.AbortStepRequest(header=self.header(), step=step, attempt=attempt)
        await self.port.call("AbortStep", request, SLOW_S)

    async def publish(self, number: int) -> Published:
        """Puts the version into the host's weight store."""
        request = trainer.PublishPolicyRequest(header=self.header(), number=number)
        response: trainer.PublishPolicyResponse = await self.port.call("PublishPolicy", request, SLOW_S)
        return _published(response)

    async def save(
        self, number: int, ledger: bytes, wait: bool, retained: Iterable[str] = ()
    ) -> trainer.SaveCheckpointResponse:
        """Starts a checkpoint, or waits until it is durable; checkpoints named in `retained` are not deleted."""
        request = trainer.SaveCheckpointRequest(
            header=self.header(), number=number, wait=wait, ledger=ledger, retained_checkpoints=retained
        )
        response: trainer.SaveCheckpointResponse = await self.port.call("SaveCheckpoint", request, LOAD_S)
        return response

    async def export(self, name: str) -> str:
        """Writes the weights as a Hugging Face directory; returns its path."""
        request = trainer.ExportModelRequest(header=self.header(), name=name)
        response: trainer.ExportModelResponse = await self.port.call("ExportModel", request, LOAD_S)
        return response.path

    async def suspend(self) -> None:
        """Gives the device back."""
        self.awake, self.kept = False, False  # Also where the reply is lost: what it did then is not known.
        await self.port.call("Suspend", trainer.SuspendRequest(header=self.header()), SLOW_S)

    async def wake(self) -> None:
        """Takes the device."""
        await self.port.call("Wake", trainer.WakeRequest(header=self.header()), SLOW_S)
        self.awake = True


def _published(response: trainer.PublishPolicyResponse) -> Published:
    return Published(response.version, response.manifest, response.source)


@dataclass
class RewardClient(WorkerClient):
    """A reward instance."""

    async def open_run(self, section: RewardSection) -> None:
        """Loads and tries the scorers, within their own limits."""
        request = reward.OpenRunRequest(header=self.header(), config_json=section.model_dump_json())
        await self.port.call("OpenRun", request, section.opening_s + QUICK_S)

    def score(
        self, batches: AsyncIterator[Sequence[reward.ScoreItem]], timeout: float
    ) -> AsyncIterator[reward.ScoreResponse]:
        """Answers in, their results out, in any order."""

        async def requests() -> AsyncIterator[reward.ScoreRequest]:
            async for items in batches:
                yield reward.ScoreRequest(header=self.header(), items=items)

        return self.port.stream("Score", requests(), timeout)


@dataclass
class SimulatorClient(WorkerClient):
    """A simulator instance."""

    async def open_pool(self, request: simulator.OpenPoolRequest) -> simulator.OpenPoolResponse:
        """Makes environments; fills in the authority."""
        request.header.CopyFrom(self.header())
        response: simulator.OpenPoolResponse = await self.port.call("OpenPool", request, LOAD_S)
        return response

    async def close_pool(self, pool: str) -> None:
        """Ends the environments of a pool."""
        request = simulator.ClosePoolRequest(header=self.header(), pool=pool)
        await self.port.call("ClosePool", request, CLOSE_S)
