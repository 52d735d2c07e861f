"""A trainer at work for a run: the calls of `TrainerService`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from headrace.trainer.v1 import trainer_pb2 as trainer

from headrace_coordinator.fleet.worker_client import LOAD_S, QUICK_S, SLOW_S, WorkerClient
from headrace_coordinator.run.workers.clients import Published


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
        response: trainer.OpenRunResponse = await self.instance_client.call("OpenRun", request, SLOW_S)
        self.barrier = response.barrier
        self.drop_equal, self.max_refill = response.drop_equal, response.max_refill
        self.greedy_first = response.greedy_first

    async def join(self, generation: int, world: int, rendezvous: str, timeout: float) -> None:
        """Meets the other ranks."""
        request = trainer.JoinTrainerGroupRequest(
            header=self.header(),
            generation=generation,
            rank=self.rank,
            world_size=world,
            rendezvous=rendezvous,
        )
        request.timeout.FromMilliseconds(int(timeout * 1000))
        await self.instance_client.call("JoinTrainerGroup", request, timeout + 10)

    async def leave(self, generation: int) -> None:
        """As the leader, leaves the trainer group and keeps the run's state for the next one."""
        request = trainer.LeaveTrainerGroupRequest(header=self.header(), generation=generation, carry=True)
        await self.instance_client.call("LeaveTrainerGroup", request, LOAD_S)

    async def take_up(self, number: int) -> None:
        """Shards what `leave` kept, which is version `number`, over the group that it leads now."""
        request = trainer.RestoreRequest(header=self.header(), number=number, carried=True)
        await self.instance_client.call("Restore", request, LOAD_S)

    async def state(self) -> trainer.GetStepStateResponse:
        """Where it stands."""
        request = trainer.GetStepStateRequest(header=self.header())
        response: trainer.GetStepStateResponse = await self.instance_client.call(
            "GetStepState", request, QUICK_S
        )
        return response

    async def list_checkpoints(self, source_directory: str = "") -> trainer.ListCheckpointsResponse:
        """Durable checkpoints of this run or of another run's directory, newest first, and the last failure."""
        request = trainer.ListCheckpointsRequest(
            header=self.header(), page_size=50, source_run_directory=source_directory
        )
        response: trainer.ListCheckpointsResponse = await self.instance_client.call(
            "ListCheckpoints", request, QUICK_S
        )
        return response

    async def fetch_ledger(self, checkpoint: str, source_directory: str = "") -> bytes:
        """The coordinator's ledger that a checkpoint holds."""
        request = trainer.FetchLedgerRequest(
            header=self.header(), checkpoint=checkpoint, source_run_directory=source_directory
        )
        return b"".join(
            [piece.data async for piece in self.instance_client.listen("FetchLedger", request, SLOW_S)]
        )

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
        response: trainer.RestoreResponse = await self.instance_client.call("Restore", request, LOAD_S)
        return response

    async def begin(self, step: int, attempt: int, base: int, number: int) -> None:
        """Opens a step attempt."""
        request = trainer.BeginStepRequest(
            header=self.header(), step=step, attempt=attempt, base_number=base, next_number=number
        )
        await self.instance_client.call("BeginStep", request, SLOW_S)

    def learn(
        self, step: int, attempt: int, messages: AsyncIterator[trainer.LearnRequest], timeout: float
    ) -> AsyncIterator[trainer.LearnResponse]:
        """Settled groups in, acknowledgements out; fills in what is the same for all messages."""

        async def requests() -> AsyncIterator[trainer.LearnRequest]:
            async for message in messages:
                message.header.CopyFrom(self.header())
                message.step, message.attempt = step, attempt
                yield message

        return self.instance_client.stream("Learn", requests(), timeout)

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
        response: trainer.CommitStepResponse = await self.instance_client.call(
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
        response: trainer.HelpResponse = await self.instance_client.call("Help", request, SLOW_S)
        return response

    async def take_contribution(self, step: int, attempt: int) -> trainer.Contribution:
        """Ends a helper's attempt; where its gradient is, and of which groups."""
        request = trainer.TakeContributionRequest(header=self.header(), step=step, attempt=attempt)
        response: trainer.TakeContributionResponse = await self.instance_client.call(
            "TakeContribution", request, SLOW_S
        )
        return response.contribution

    async def add_contribution(
        self, step: int, attempt: int, contribution: trainer.Contribution, helper: str
    ) -> None:
        """Adds a helper's gradient to the open step, whole or not at all."""
        request = trainer.AddContributionRequest(
            header=self.header(), step=step, attempt=attempt, contribution=contribution, helper=helper
        )
        await self.instance_client.call("AddContribution", request, SLOW_S)

    async def recorded(self, step: int, attempt: int, number: int) -> Published:
        """The ledger has the version, which is published too."""
        request = trainer.RecordStepRequest(
            header=self.header(), step=step, attempt=attempt, number=number, publish=True
        )
        response: trainer.RecordStepResponse = await self.instance_client.call("RecordStep", request, SLOW_S)
        if not response.HasField("published"):
            return await self.publish(number)  # a trainer of an older release
        return _published(response.published)

    async def abort(self, step: int, attempt: int) -> None:
        """Drops the accumulators."""
        request = trainer.AbortStepRequest(header=self.header(), step=step, attempt=attempt)
        await self.instance_client.call("AbortStep", request, SLOW_S)

    async def publish(self, number: int) -> Published:
        """Puts the version into the host's weight store."""
        request = trainer.PublishPolicyRequest(header=self.header(), number=number)
        response: trainer.PublishPolicyResponse = await self.instance_client.call(
            "PublishPolicy", request, SLOW_S
        )
        return _published(response)

    async def save(
        self, number: int, ledger: bytes, wait: bool, retained: Iterable[str] = ()
    ) -> trainer.SaveCheckpointResponse:
        """Starts a checkpoint, or waits until it is durable; checkpoints named in `retained` are not deleted."""
        request = trainer.SaveCheckpointRequest(
            header=self.header(), number=number, wait=wait, ledger=ledger, retained_checkpoints=retained
        )
        response: trainer.SaveCheckpointResponse = await self.instance_client.call(
            "SaveCheckpoint", request, LOAD_S
        )
        return response

    async def export(self, name: str) -> str:
        """Writes the weights as a Hugging Face directory; returns its path."""
        request = trainer.ExportModelRequest(header=self.header(), name=name)
        response: trainer.ExportModelResponse = await self.instance_client.call(
            "ExportModel", request, LOAD_S
        )
        return response.path

    async def suspend(self) -> None:
        """Gives the device back."""
        self.awake, self.kept = False, False  # Also where the reply is lost: what it did then is not known.
        await self.instance_client.call("Suspend", trainer.SuspendRequest(header=self.header()), SLOW_S)

    async def wake(self) -> None:
        """Takes the device."""
        await self.instance_client.call("Wake", trainer.WakeRequest(header=self.header()), SLOW_S)
        self.awake = True


def _published(response: trainer.PublishPolicyResponse) -> Published:
    return Published(response.version, response.manifest, response.source)
