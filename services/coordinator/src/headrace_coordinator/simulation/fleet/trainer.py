"""An imaginary trainer: its "weights" are the list of slots in them, so that what was trained can be read off them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_servicekit.rpc.digests import digest_bytes, set_digest
from headrace_servicekit.rpc.streams import until

from headrace_coordinator.fleet.ports import CallRefused
from headrace_coordinator.simulation.fleet.disk import Disk, Stored, Weights
from headrace_coordinator.simulation.fleet.instances import Instance
from headrace_coordinator.simulation.specs import UNREADABLE

PIECE_BYTES = 1 << 20
"""Of a ledger, in one message."""


Gangs = dict[tuple[int, str], dict[int, "Trainer"]]
"""Who has met, by generation and rendezvous, and rank."""


@dataclass
class Trainer(Instance):
    """The step state machine of the contract, on weights that are lists of slots."""

    KIND: ClassVar[str] = "trainer"
    MAX_OPEN_RUNS: ClassVar[int] = 1
    disk: Disk = field(default_factory=Disk)
    directory: str = ""
    reports: list[trainer.SetAsideCheckpoint] = field(default_factory=list)
    writing: tuple[int, asyncio.Future[None]] | None = None
    generation: int = 0
    phase: int = trainer.STEP_PHASE_UNSPECIFIED
    version: common.PolicyVersion = field(default_factory=common.PolicyVersion)
    weights: Weights = ()
    made: dict[tuple[str, int], Weights] = field(default_factory=dict)
    """Weights of every version it held, for the judge: a run that is closed leaves nothing else."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    attempt: tuple[int, int] = (0, 0)
    next_number: int = 0
    groups: dict[int, list[tuple[int, int, int, str]]] = field(default_factory=dict)
    commit: trainer.CommitStepResponse = field(default_factory=trainer.CommitStepResponse)

    lineage: int = 0
    """Where it writes: stays when a version is carried to another group."""
    carried: tuple[common.PolicyVersion, Weights] | None = None
    """What it keeps between two trainer groups."""
    helps: bool = False
    """It holds a base to help with, and makes no versions."""
    offered: trainer.Contribution = field(default_factory=trainer.Contribution)
    helpers: dict[str, Trainer] = field(default_factory=dict)
    """Whoever has offered a contribution, by its name."""
    gangs: Gangs = field(default_factory=dict)
    joined: tuple[int, int, int, str] | None = None
    keep: int = 0
    suspended: bool = False
    last_failure: str = ""

    def _refuse(self, reason: str, message: str) -> CallRefused:
        return CallRefused(self.incarnation, reason, message)

    async def OpenRun(self, request: trainer.OpenRunRequest) -> trainer.OpenRunResponse:
        config = (request.config_json, request.run_directory)
        await self.open_run(request.header, config, lambda: self._build(request), self._end)
        options = json.loads(request.config_json)["algorithm"].get("options", {})
        self.greedy_first = bool(options.get("greedy_first"))
        return trainer.OpenRunResponse(barrier=trainer.BARRIER_GROUP, **options)

    async def _build(self, request: trainer.OpenRunRequest) -> None:
        await self.take_time()
        config = json.loads(request.config_json)
        if config["model"]["path"] == UNREADABLE:
            raise self._refuse("MODEL_NOT_READABLE", "model.path: it cannot be read")
        self.directory, self.keep = request.run_directory, config["checkpoint"].get("keep", 0)

    async def CloseRun(self, request: trainer.CloseRunRequest) -> trainer.CloseRunResponse:
        await self.close_run(request.header)
        return trainer.CloseRunResponse()

    async def _end(self) -> None:
        async with self.busy:  # A commit at work is decided first.
            if self.writing is not None:
                await asyncio.wait({self.writing[1]}, timeout=60.0)
            self._disband()
            self.joined, self.suspended, self.writing, self.last_failure = None, False, None, ""
            self.generation, self.phase = 0, trainer.STEP_PHASE_UNSPECIFIED
            self.version, self.weights = common.PolicyVersion(), ()
            self.helps, self.offered, self.carried = False, trainer.Contribution(), None
            self.attempt, self.groups = (0, 0), {}

    async def JoinGang(self, request: trainer.JoinGangRequest) -> trainer.JoinGangResponse:
        self.fence(request.header, lease=False)
        # With port 0 a group of one rank meets nobody, wherever it is.
        where = f"{request.header.run} {request.rendezvous}"
        key = (request.generation, request.rank, request.world_size, where)
        if self.joined == key and self.generation:
            return trainer.JoinGangResponse(generation=self.generation)
        if self.joined and request.generation <= self.joined[0]:
            raise self._refuse("CONFLICT", f"generation {request.generation} is not above {self.joined[0]}")
        self._disband()
        self.phase, self.version, self.groups = trainer.STEP_PHASE_UNSPECIFIED, common.PolicyVersion(), {}
        self.joined, self.helps = key, False
        self.carried = None if request.rank else self.carried
        met = self.gangs.setdefault((request.generation, where), {})
        met[request.rank] = self
        patience = request.timeout.ToNanoseconds() / 1e9 or 60.0
        while len(self._gang()) < request.world_size:
            await asyncio.sleep(0.1)
            patience -= 0.1
            if patience < 0 or self.joined != key:
                raise self._refuse("RENDEZVOUS_TIMEOUT", f"{len(met)} of {request.world_size} ranks came")
        self.generation = request.generation
        return trainer.JoinGangResponse(generation=self.generation)

    async def LeaveGang(self, request: trainer.LeaveGangRequest) -> trainer.LeaveGangResponse:
        self.fence(request.header, lease=False)
        if not self.generation:
            return trainer.LeaveGangResponse()
        if request.carry:
            self._lead()
            if self.phase != trainer.STEP_PHASE_IDLE or self.helps:
                raise self._refuse("CONFLICT", f"nothing is carried out of phase {self.phase}")
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
            self._lead()
            self.carried = self.version, self.weights
            self.phase, self.version, self.weights = (
                trainer.STEP_PHASE_UNSPECIFIED,
                common.PolicyVersion(),
                (),
            )
        self._disband()
        return trainer.LeaveGangResponse()

    async def _take_up(self, number: int) -> trainer.RestoreResponse:
        if self.carried is None and self.phase == trainer.STEP_PHASE_IDLE and self.version.number == number:
            return trainer.RestoreResponse(version=self.version)
        if self.carried is None or self.carried[0].number != number:
            raise self._refuse("NOT_CARRIED", f"version {number} is not carried")
        await asyncio.sleep(0.5 * self.pace)
        self._lead(governed=True)
        if self.carried is not None:
            (self.version, self.weights), self.carried = self.carried, None
            self.phase, self.groups, self.attempt = trainer.STEP_PHASE_IDLE, {}, (0, 0)
        return trainer.RestoreResponse(version=self.version)

    def _gang(self) -> list[Trainer]:
        """Members of its trainer group that are still in it."""
        if self.joined is None:
            return []
        met = self.gangs.get((self.joined[0], self.joined[3]), {})
        return [m for m in met.values() if m.alive and m.joined is not None and m.joined[0] == self.joined[0]]

    def _disband(self) -> None:
        """Leaves the trainer group; when the leader leaves, the others are in none."""
        if self.joined is not None and self.joined[1] == 0:
            for member in self._gang():
                member.generation = 0
        self.generation = 0

    def _lead(self, *, governed: bool = False) -> None:
        """A round of the whole gang: refused by a follower, and by a leader that has lost a rank.

        A governed one begins only where every rank has its lease and its memory.
        """
        if not self.joined or not self.generation:
            raise self._refuse("NOT_OPEN", "the trainer is in no gang: call JoinGang first")
        if self.joined[1]:
            raise self._refuse("NOT_LEADER", f"rank {self.joined[1]} follows")
        gang = self._gang()
        if len(gang) < self.joined[2] or any(m.generation != self.generation for m in gang):
            self.generation, self.phase = 0, trainer.STEP_PHASE_UNSPECIFIED
            raise self._refuse(
                "GANG_LOST", "a rank is gone; form the trainer group anew and restore a checkpoint"
            )

        if governed and (lapsed := [m.joined for m in gang if m.suspended or not m.live_leases()]):
            raise self._refuse("LEASE_QUIESCED", f"the lease of {lapsed} was not renewed in time")

    def _awake(self) -> None:
        if self.suspended:
            raise self._refuse("SUSPENDED", "the trainer is suspended: call Wake first")

    def revoked(self) -> None:
        """Its memory is released until the next grant."""
        self.suspended = True

    def rested(self) -> None:
        """Nothing runs until the next grant."""
        self.suspended = True

    def granted(self) -> None:
        """See `revoked` and `rested`."""
        self.suspended = False

    async def GetStepState(self, request: trainer.GetStepStateRequest) -> trainer.GetStepStateResponse:
        if request.header.run not in self.open_runs and not request.header.open_id:
            self.fence(request.header, lease=False, opening=False)
            return trainer.GetStepStateResponse()
        self.fence(request.header, lease=False)
        return trainer.GetStepStateResponse(
            phase=self.phase,  # type: ignore[arg-type]
            version=self.version,
            step=self.attempt[0],
            attempt=self.attempt[1],
            accumulated_prompts=list(self.groups),
            commit=self.commit if self.phase == trainer.STEP_PHASE_COMMITTED else None,
            generation=self.generation if self._whole() else 0,
            carried_number=self.carried[0].number if self.carried else 0,
        )

    def _whole(self) -> bool:
        return self.joined is not None and len(self._gang()) == self.joined[2]

    async def Restore(self, request: trainer.RestoreRequest) -> trainer.RestoreResponse:
        self.fence(request.header, lease=True)
        self._awake()
        self._lead(governed=True)
        if request.carried:
            return await self._take_up(request.number)
        if self.writing is not None:
            await asyncio.wait({self.writing[1]}, timeout=60.0)
        await asyncio.sleep(0.5 * self.pace)
        self._lead()
        directory = self._source(request.source_run_directory)
        if request.source_run_directory and not request.checkpoint:
            raise self._refuse("INVALID", "checkpoint: name one of source_run_directory")
        if request.checkpoint:
            found = self._intact(directory, request.checkpoint)
            parent = found.version.number if directory == self.directory else 0
            self._hold(found.weights, request.number, parent, found.version.ordinal)
        else:
            self._hold((), request.number, 0, 0)
        self.groups, self.attempt, self.carried = {}, (0, 0), None
        self.lineage = self.generation
        return trainer.RestoreResponse(version=self.version)

    def _hold(self, weights: Weights, number: int, parent: int, ordinal: int) -> None:
        self.weights = self.made[self.directory, number] = weights
        digest = digest_bytes(repr(weights).encode())
        self.version = common.PolicyVersion(number=number, parent=parent, ordinal=ordinal, digest=digest)
        self.phase = trainer.STEP_PHASE_IDLE

    async def BeginStep(self, request: trainer.BeginStepRequest) -> trainer.BeginStepResponse:
        self.fence(request.header, lease=True)
        key = (request.step, request.attempt)
        if self.phase == trainer.STEP_PHASE_ACCUMULATING and self.attempt == key:
            return trainer.BeginStepResponse()
        if self.phase != trainer.STEP_PHASE_IDLE or self.version.number != request.base_number:
            raise self._refuse("CONFLICT", f"cannot begin {key} in phase {self.phase}")
        self.phase, self.attempt, self.groups = trainer.STEP_PHASE_ACCUMULATING, key, {}
        self.next_number = request.next_number
        return trainer.BeginStepResponse()

    async def Learn(
        self, requests: AsyncIterator[trainer.LearnRequest]
    ) -> AsyncIterator[trainer.LearnResponse]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        self.fence(first.header, lease=True)
        revoked = self.revocations[first.header.lease_epoch]
        clock = asyncio.get_running_loop()
        async for request in until(revoked, _chain(first, requests)):
            began = clock.time()
            async for outcome in self._learn(request, revoked):
                response = trainer.LearnResponse(outcomes=[outcome])
                response.metrics.wall_time.FromNanoseconds(int(1e9 * (clock.time() - began)))
                yield response
                began = clock.time()
            if not request.groups:
                yield trainer.LearnResponse()
        if revoked.is_set():
            yield trainer.LearnResponse(revoked=True)

    async def _learn(
        self, request: trainer.LearnRequest, revoked: asyncio.Event
    ) -> AsyncIterator[trainer.GroupOutcome]:
        """Learns groups until the lease is revoked. One that lapses inside a group costs the step attempt."""
        for group in request.groups:
            if revoked.is_set():
                return
            self._awake()
            self.fence(request.header, lease=True)
            self._lead(governed=True)
            await asyncio.sleep(self.rng.uniform(0.05, 0.3))
            if revoked.is_set():
                return
            if request.header.lease_epoch not in self.live_leases():
                self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
                raise self._refuse("ATTEMPT_LOST", "the lease lapsed while a group was accumulated")
            yield self._accumulate(request, group)

    def _accumulate(self, request: trainer.LearnRequest, group: trainer.SettledGroup) -> trainer.GroupOutcome:
        if self.phase != trainer.STEP_PHASE_ACCUMULATING or self.attempt != (request.step, request.attempt):
            raise self._refuse("CONFLICT", "no such attempt is open")
        for m in group.members:
            first = m.trajectory.segments[0]
            greedy = first.HasField("tokens") and first.tokens.distribution.temperature == 0
            if not greedy == m.masked == (self.greedy_first and m.trajectory.sample.sample_index == 0):
                raise self._refuse("INVALID", "the greedy answer of a group is its first one, sent masked")
        members = [
            (
                m.trajectory.sample.prompt_ordinal,
                m.trajectory.sample.sample_index,
                m.trajectory.attempt,
                m.trajectory.body_digest,
            )
            for m in group.members
        ]
        if self.rng.random() < 0.005:
            return trainer.GroupOutcome(
                prompt_ordinal=group.prompt_ordinal, disposition=trainer.GROUP_DISPOSITION_NONFINITE
            )
        self.groups[group.prompt_ordinal] = members
        return trainer.GroupOutcome(
            prompt_ordinal=group.prompt_ordinal,
            disposition=trainer.GROUP_DISPOSITION_ACCUMULATED,
            digest=set_digest(members),
        )

    async def Help(self, request: trainer.HelpRequest) -> trainer.HelpResponse:
        self.fence(request.header, lease=True)
        self._awake()
        if self.carried or (self.version.number and not self.helps):
            raise self._refuse("CONFLICT", "this trainer leads the run's steps")
        await asyncio.sleep(0.1 * self.pace)
        self._lead(governed=True)
        if self.version == request.version:
            return trainer.HelpResponse()
        if request.version.number <= self.version.number:
            raise self._refuse(
                "INVALID", f"version {request.version.number} is not above {self.version.number}"
            )
        self.version, self.helps, self.groups = request.version, True, {}
        self.phase, self.attempt = trainer.STEP_PHASE_IDLE, (0, 0)
        return trainer.HelpResponse()

    async def TakeContribution(
        self, request: trainer.TakeContributionRequest
    ) -> trainer.TakeContributionResponse:
        self.fence(request.header, lease=True)
        self._awake()
        key = (request.step, request.attempt)
        if (self.offered.step, self.offered.attempt) == key and self.offered.groups:
            return trainer.TakeContributionResponse(contribution=self.offered)
        self._lead(governed=True)
        if self.phase != trainer.STEP_PHASE_ACCUMULATING or self.attempt != key or not self.helps:
            raise self._refuse("NOT_OPEN", f"attempt {key} is not open")
        if not self.groups:
            raise self._refuse("EMPTY_STEP", "no group is accumulated")
        self.offered = trainer.Contribution(
            step=key[0],
            attempt=key[1],
            base=self.version,
            next_number=self.next_number,
            name=self.incarnation,
        )
        for prompt, members in sorted(self.groups.items()):
            group = self.offered.groups.add(prompt_ordinal=prompt, token_count=len(members))
            for _, sample, attempt, digest in members:
                group.members.add(sample_index=sample, attempt=attempt, body_digest=digest)
        self.helpers[self.incarnation] = self
        self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
        return trainer.TakeContributionResponse(contribution=self.offered)

    async def AddContribution(
        self, request: trainer.AddContributionRequest
    ) -> trainer.AddContributionResponse:
        self.fence(request.header, lease=True)
        self._awake()
        given = request.contribution
        source = self.helpers.get(given.name)
        await asyncio.sleep(self.rng.uniform(0.05, 0.2))
        if source is None or not source.alive or source.offered != given:
            raise self._refuse("WEIGHTS_UNAVAILABLE", f"{given.name} has no such gradient any more")
        self._awake()
        self.fence(request.header, lease=True)
        self._lead(governed=True)
        if self.phase != trainer.STEP_PHASE_ACCUMULATING or self.attempt != (given.step, given.attempt):
            raise self._refuse("NOT_OPEN", f"attempt {given.step, given.attempt} is not open")
        if given.base != self.version:
            raise self._refuse("POLICY_MISMATCH", "another base")
        if self.rng.random() < 0.02:
            raise self._refuse("NONFINITE", "the contribution is not finite")
        added = {
            group.prompt_ordinal: [
                (group.prompt_ordinal, m.sample_index, m.attempt, m.body_digest) for m in group.members
            ]
            for group in given.groups
        }
        if all(self.groups.get(prompt) == members for prompt, members in added.items()):
            return trainer.AddContributionResponse()
        if self.groups.keys() & added.keys():
            raise self._refuse("CONFLICT", "one of the groups is in already")
        self.groups |= added
        return trainer.AddContributionResponse()

    async def CommitStep(self, request: trainer.CommitStepRequest) -> trainer.CommitStepResponse:
        self.fence(request.header, lease=True)
        self._awake()
        async with self.busy:
            return await self._commit(request)

    async def _commit(self, request: trainer.CommitStepRequest) -> trainer.CommitStepResponse:
        key = (request.step, request.attempt)
        if self.helps:
            raise self._refuse("NOT_LEADER", "a helper commits nothing")
        if self.phase == trainer.STEP_PHASE_COMMITTED and self.attempt == key:
            return self.commit
        if self.phase != trainer.STEP_PHASE_ACCUMULATING or self.attempt != key:
            raise self._refuse("CONFLICT", f"attempt {key} is not open")
        members = [member for prompt in sorted(self.groups) for member in self.groups[prompt]]
        if set_digest(members) != request.set_digest:
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
            return trainer.CommitStepResponse(result=trainer.COMMIT_RESULT_SET_MISMATCH)
        self._lead(governed=True)
        await asyncio.sleep(self.pace * (0.3 if self.rng.random() < 0.9 else self.rng.uniform(0.3, 20.0)))
        self._lead()
        if self.rng.random() < 0.02:
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
            return trainer.CommitStepResponse(result=trainer.COMMIT_RESULT_NONFINITE)
        base = self.version
        slots = tuple((prompt, sample) for prompt, sample, _, _ in sorted(members))
        self._hold(self.weights + slots, request.next_number, base.number, base.ordinal + 1)
        self.phase = trainer.STEP_PHASE_COMMITTED
        self.commit = trainer.CommitStepResponse(
            result=trainer.COMMIT_RESULT_COMMITTED,
            version=self.version,
            group_count=len(self.groups),
            sequence_count=len(members),
            token_count=len(members),
            tokens_by_version={base.number: len(members)},
            figures={"log_prob_compared_tokens": len(members), "log_prob_mismatch_mean": 0.0},
        )
        return self.commit

    async def RecordStep(self, request: trainer.RecordStepRequest) -> trainer.RecordStepResponse:
        self.fence(request.header, lease=False)
        if self.attempt == (request.step, request.attempt) and self.phase == trainer.STEP_PHASE_COMMITTED:
            self.phase = trainer.STEP_PHASE_IDLE
        published = self._published(request.number) if request.publish else None
        return trainer.RecordStepResponse(published=published)

    async def AbortStep(self, request: trainer.AbortStepRequest) -> trainer.AbortStepResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED and self.attempt == (request.step, request.attempt):
            raise self._refuse("COMMITTED", "record it, or restore a checkpoint")
        if self.phase == trainer.STEP_PHASE_ACCUMULATING and self.attempt == (request.step, request.attempt):
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
        return trainer.AbortStepResponse()

    async def PublishPolicy(self, request: trainer.PublishPolicyRequest) -> trainer.PublishPolicyResponse:
        self.fence(request.header, lease=False)
        return self._published(request.number)

    def _published(self, number: int) -> trainer.PublishPolicyResponse:
        if self.phase == trainer.STEP_PHASE_COMMITTED or self.version.number != number:
            raise self._refuse("CONFLICT", f"version {number} is not held and recorded")
        return trainer.PublishPolicyResponse(version=self.version)

    async def SaveCheckpoint(self, request: trainer.SaveCheckpointRequest) -> trainer.SaveCheckpointResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED or self.version.number != request.number:
            raise self._refuse("CONFLICT", f"version {request.number} is not held and recorded")
        self._lead()
        name = f"lineage-{self.lineage}/step-{self.version.ordinal}-{request.number}"
        stored = Stored(self.directory, name, self.version, self.weights, request.ledger)
        while self.writing is not None and not self.writing[1].done() and self.writing[0] != request.number:
            if not request.wait:
                raise self._refuse("BUSY", f"the checkpoint of version {self.writing[0]} is being written")
            await asyncio.wait({self.writing[1]})
        if not self._written(request.number):
            self.writing = (
                request.number,
                asyncio.ensure_future(self._mortal(self._write(stored, list(request.retained_checkpoints)))),
            )
            self.writing[1].add_done_callback(lambda done: done.cancelled() or done.exception())
        if request.wait and self.writing is not None:
            await asyncio.shield(self.writing[1])
        return trainer.SaveCheckpointResponse(
            checkpoint=trainer.Checkpoint(name=name, version=stored.version), durable=request.wait
        )

    def _written(self, number: int) -> bool:
        """The version is being written, or was, by the last write."""
        if self.writing is None or self.writing[0] != number:
            return False
        done = self.writing[1]
        return not done.done() or (not done.cancelled() and done.exception() is None)

    async def _write(self, stored: Stored, retained: list[str]) -> None:
        self.last_failure = ""
        await asyncio.sleep(self.rng.uniform(0.2, 2.0))
        if self.disk.full:
            self.last_failure = f"{stored.name}: no space left on device"
            raise self._refuse("CHECKPOINT_NOT_WRITTEN", self.last_failure)
        self.disk.save(stored, self.keep, retained)

    def _source(self, directory: str) -> str:
        """The directory to read checkpoints from: this run's own, or one beside it."""
        if not self.directory:
            raise self._refuse("NOT_OPEN", "no run is open: call OpenRun first")
        if not directory:
            return self.directory
        if directory == self.directory or directory.rpartition("/")[0] != self.directory.rpartition("/")[0]:
            raise self._refuse("INVALID", f"source_run_directory {directory!r} is not beside this run's")
        if not self.disk.listed(directory):
            raise self._refuse("NOT_FOUND", f"source_run_directory {directory!r} has no checkpoints")
        return directory

    def _intact(self, directory: str, name: str) -> Stored:
        found = self.disk.find(directory, name)
        if found is None:
            raise self._refuse("NOT_FOUND", f"no live checkpoint {name!r}")
        if found.damage:
            self._set_aside(found)
            raise self._refuse("CHECKPOINT_DAMAGED", f"{name}: {found.damage}")
        return found

    def _set_aside(self, found: Stored) -> None:
        """Another run's are left in their place."""
        found.set_aside = found.directory == self.directory
        self.reports.append(
            trainer.SetAsideCheckpoint(
                name=found.name,
                reason=found.damage,
                set_aside_as=f"{found.name}.damaged-1" if found.set_aside else "",
            )
        )

    async def ListCheckpoints(
        self, request: trainer.ListCheckpointsRequest
    ) -> trainer.ListCheckpointsResponse:
        self.fence(request.header, lease=False)
        directory = self._source(request.source_run_directory)
        found = self.disk.listed(directory)
        for checkpoint in found:
            if checkpoint.torn:
                self._set_aside(checkpoint)
        reports, self.reports = self.reports, []
        return trainer.ListCheckpointsResponse(
            checkpoints=[trainer.Checkpoint(name=c.name, version=c.version) for c in found if not c.torn],
            set_aside=reports,
            last_failure="" if request.source_run_directory else self.last_failure,
        )

    async def FetchLedger(
        self, requests: AsyncIterator[trainer.FetchLedgerRequest]
    ) -> AsyncIterator[trainer.FetchLedgerResponse]:
        request = await anext(aiter(requests))
        self.fence(request.header, lease=False)
        directory = self._source(request.source_run_directory)
        ledger = self._intact(directory, request.checkpoint).ledger
        for start in range(0, len(ledger), PIECE_BYTES):
            yield trainer.FetchLedgerResponse(data=ledger[start : start + PIECE_BYTES])

    async def ExportModel(self, request: trainer.ExportModelRequest) -> trainer.ExportModelResponse:
        self.fence(request.header, lease=False)
        return trainer.ExportModelResponse(path="/export")

    async def Suspend(self, request: trainer.SuspendRequest) -> trainer.SuspendResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED:
            raise self._refuse("CONFLICT", "inside a commit")
        self.suspended = True
        return trainer.SuspendResponse()

    async def Wake(self, request: trainer.WakeRequest) -> trainer.WakeResponse:
        self.fence(request.header, lease=True)
        self.suspended = False
        return trainer.WakeResponse()


async def _chain(
    first: trainer.LearnRequest, rest: AsyncIterator[trainer.LearnRequest]
) -> AsyncIterator[trainer.LearnRequest]:
    yield first
    async for request in rest:
        yield request
