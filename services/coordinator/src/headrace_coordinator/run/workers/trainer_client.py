"""A run's client of a trainer instance: the calls of `TrainerService`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer

from headrace_coordinator.fleet.instance_client import LOAD_S, QUICK_S, SLOW_S, WorkerClient
from headrace_coordinator.run.workers.clients import Published

LearnRequests = asyncio.Queue[trainer.LearnRequest | None]
"""Messages of one Learn stream; None ends it."""


@dataclass
class TrainerClient(WorkerClient):
    """A rank of the trainer group."""

    rank: int = 0
    barrier: int = field(default=trainer.BARRIER_GROUP)
    drop_equal: bool = False
    max_refill: int = 0
    greedy_first: bool = False
    by_turn: bool = False
    """Groups go to it with rewards by turn."""
    given_rewards: tuple[int, ...] = ()
    """What the reward of a given answer is made of: what is inferred, and what is subtracted."""
    given_by_token: bool = False
    adam: trainer.AdamParams | None = None
    """The optimizer's parameters of the next commit, where the spec's are not meant."""
    joined: bool = False
    """Whether a helper has formed its own trainer group."""

    def is_baseline(self, sample: int) -> bool:
        """Whether a group's sample is its greedy answer, which is scored and not learned from."""
        return self.greedy_first and sample == 0

    async def open_run(self, config_json: str, directory: str) -> None:
        """Builds model, optimizer and algorithm."""
        request = trainer.OpenRunRequest(config_json=config_json, run_directory=directory)
        response: trainer.OpenRunResponse = await self.call("OpenRun", request, SLOW_S)
        self.barrier = response.barrier
        self.drop_equal, self.max_refill = response.drop_equal, response.max_refill
        self.greedy_first, self.by_turn = response.greedy_first, response.by_turn
        self.given_rewards, self.given_by_token = tuple(response.given_rewards), response.given_by_token

    async def join(self, generation: int, world: int, rendezvous: str, timeout: float) -> None:
        """Forms a trainer group with the other ranks."""
        request = trainer.JoinTrainerGroupRequest(
            generation=generation,
            rank=self.rank,
            world_size=world,
            rendezvous=rendezvous,
        )
        request.timeout.FromMilliseconds(int(timeout * 1000))
        await self.call("JoinTrainerGroup", request, timeout + 10)

    async def leave(self, generation: int) -> None:
        """As the leader, leaves the trainer group and keeps the run's state for the next one."""
        request = trainer.LeaveTrainerGroupRequest(generation=generation, carry=True)
        await self.call("LeaveTrainerGroup", request, LOAD_S)

    async def restore_carried(self, number: int) -> str:
        """Shards what `leave` kept, which is version `number`, over the group that it leads now; how it lies there."""
        request = trainer.RestoreRequest(number=number, carried=True)
        response: trainer.RestoreResponse = await self.call("Restore", request, LOAD_S)
        return response.layout

    async def step_state(self) -> trainer.GetStepStateResponse:
        """The version that it holds, and how far its open step is."""
        request = trainer.GetStepStateRequest()
        response: trainer.GetStepStateResponse = await self.call("GetStepState", request, QUICK_S)
        return response

    async def list_checkpoints(self, source_directory: str = "") -> trainer.ListCheckpointsResponse:
        """Durable checkpoints of this run or of another run's directory, newest first, and the last failure."""
        request = trainer.ListCheckpointsRequest(page_size=50, source_run_directory=source_directory)
        response: trainer.ListCheckpointsResponse = await self.call("ListCheckpoints", request, QUICK_S)
        return response

    async def fetch_ledger(self, checkpoint: str, source_directory: str = "") -> bytes:
        """The coordinator's ledger that a checkpoint holds."""
        request = trainer.FetchLedgerRequest(checkpoint=checkpoint, source_run_directory=source_directory)
        return b"".join([piece.data async for piece in self.stream("FetchLedger", request, SLOW_S)])

    async def restore(
        self,
        checkpoint: str,
        number: int,
        store_id: str,
        source_directory: str = "",
        *,
        weights_only: bool = False,
    ) -> trainer.RestoreResponse:
        """Loads a checkpoint, of this run or another's directory, or the initial model, as version `number`."""
        request = trainer.RestoreRequest(
            checkpoint=checkpoint,
            number=number,
            store_id=store_id,
            source_run_directory=source_directory,
            weights_only=weights_only,
        )
        response: trainer.RestoreResponse = await self.call("Restore", request, LOAD_S)
        return response

    async def begin(self, step: int, attempt: int, base: int, number: int) -> None:
        """Opens a step attempt, which may make version `number` from `base`."""
        request = trainer.BeginStepRequest(step=step, attempt=attempt, base_number=base, next_number=number)
        await self.call("BeginStep", request, SLOW_S)

    def learn(
        self, step: int, attempt: int, queue: LearnRequests, timeout: float
    ) -> AsyncIterator[trainer.LearnResponse]:
        """Settled groups in, acknowledgements out; fills in what is the same for all messages."""

        async def requests() -> AsyncIterator[trainer.LearnRequest]:
            while (message := await queue.get()) is not None:
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
            step=step,
            attempt=attempt,
            base_number=base,
            next_number=number,
            set_digest=set_digest,
            step_manifest=manifest,
            adam=self.adam,
        )
        response: trainer.CommitStepResponse = await self.call("CommitStep", request, max(LOAD_S, timeout))
        return response

    async def compute_loss(
        self, request: trainer.ComputeLossRequest, timeout: float
    ) -> trainer.ComputeLossResponse:
        """Log-probs and a loss of given sequences, and maybe its gradient."""
        response: trainer.ComputeLossResponse = await self.call("ComputeLoss", request, max(LOAD_S, timeout))
        return response

    async def infer(self, answers: Iterable[common.Trajectory], kind: int) -> list[list[float]]:
        """Figures of the tokens of answers under the weights that it holds: log-probs, or those of the reference."""
        request = trainer.InferRequest(kind=kind, trajectories=answers)  # type: ignore[arg-type]
        response: trainer.InferResponse = await self.call("Infer", request, LOAD_S)
        return [list(each.values) for each in response.sequences]

    async def help(self, published: Published) -> None:
        """Loads a published version as the base of what it accumulates for itself."""
        request = trainer.HelpRequest(
            version=published.version, manifest=published.manifest, sources=[published.source]
        )
        await self.call("Help", request, SLOW_S)

    async def take_contribution(self, step: int, attempt: int) -> trainer.Contribution:
        """Ends a helper's attempt; returns where its gradient is, and of which groups."""
        request = trainer.TakeContributionRequest(step=step, attempt=attempt)
        response: trainer.TakeContributionResponse = await self.call("TakeContribution", request, SLOW_S)
        return response.contribution

    async def add_contribution(
        self, step: int, attempt: int, contribution: trainer.Contribution, helper: str
    ) -> None:
        """Adds a helper's gradient to the open step, whole or not at all."""
        request = trainer.AddContributionRequest(
            step=step, attempt=attempt, contribution=contribution, helper=helper
        )
        await self.call("AddContribution", request, SLOW_S)

    async def recorded(self, step: int, attempt: int, number: int) -> Published:
        """Tells the trainer that the ledger has the version, and has it published."""
        request = trainer.RecordStepRequest(step=step, attempt=attempt, number=number, publish=True)
        response: trainer.RecordStepResponse = await self.call("RecordStep", request, SLOW_S)
        return _published(response.published)

    async def abort(self, step: int, attempt: int) -> None:
        """Ends a step attempt: what it has accumulated is dropped."""
        request = trainer.AbortStepRequest(step=step, attempt=attempt)
        await self.call("AbortStep", request, SLOW_S)

    async def publish(self, number: int) -> Published:
        """Puts the version into the host's weight store."""
        request = trainer.PublishPolicyRequest(number=number)
        response: trainer.PublishPolicyResponse = await self.call("PublishPolicy", request, SLOW_S)
        return _published(response)

    async def save(
        self, number: int, ledger: bytes, wait: bool, retained: Iterable[str] = ()
    ) -> trainer.SaveCheckpointResponse:
        """Starts a checkpoint, or waits until it is durable; checkpoints named in `retained` are not deleted."""
        request = trainer.SaveCheckpointRequest(
            number=number, wait=wait, ledger=ledger, retained_checkpoints=retained
        )
        response: trainer.SaveCheckpointResponse = await self.call("SaveCheckpoint", request, LOAD_S)
        return response

    async def export(self, name: str) -> str:
        """Writes the weights as a Hugging Face directory; returns its path."""
        request = trainer.ExportModelRequest(name=name)
        response: trainer.ExportModelResponse = await self.call("ExportModel", request, LOAD_S)
        return response.path

    async def suspend(self) -> None:
        """Releases the device's memory."""
        self.awake, self.kept = False, False  # Also where the reply is lost: it may have been done.
        await self.call("Suspend", trainer.SuspendRequest(), SLOW_S)

    async def wake(self) -> None:
        """Takes the device's memory."""
        await self.call("Wake", trainer.WakeRequest(), SLOW_S)
        self.awake = True


def _published(response: trainer.PublishPolicyResponse) -> Published:
    return Published(response.version, response.manifest, response.source)
