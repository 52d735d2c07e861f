"""A simulated trainer: its "weights" are the list of slots in them, so that what was trained can be read off them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.rpc.streams import until
from headrace_servicekit.rpc.trajectories import segments_of

from headrace_simulation.fleet.trainer_checkpoints import TrainerCheckpoints
from headrace_simulation.specs import UNREADABLE


@dataclass
class Trainer(TrainerCheckpoints):
    """The step state machine of the contract, on weights that are lists of slots."""

    KIND: ClassVar[str] = "trainer"
    MAX_OPEN_RUNS: ClassVar[int] = 1
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_number: int = 0
    commit: trainer.CommitStepResponse = field(default_factory=trainer.CommitStepResponse)
    max_staleness: int = 0
    sampled: dict[int, Counter[int]] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)
    """Tokens by version, and staleness, of the groups that were learned."""
    offered: trainer.Contribution = field(default_factory=trainer.Contribution)
    helpers: dict[str, Trainer] = field(default_factory=dict)
    """Helpers that have offered a contribution, by name."""

    async def OpenRun(self, request: trainer.OpenRunRequest) -> trainer.OpenRunResponse:
        config = (request.config_json, request.run_directory)
        await self.open_run(request.header, config, lambda: self._build(request), self._end)
        options = json.loads(request.config_json)["algorithm"].get("options", {})
        self.greedy_first = bool(options.get("greedy_first"))
        self.by_turn = bool(options.get("by_turn"))
        self.max_staleness = json.loads(request.config_json)["algorithm"].get("max_staleness", 0)
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
        return trainer.RestoreResponse(version=self.version, layout=self._layout)

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
            first = next(segments_of(m.trajectory))
            greedy = first.HasField("tokens") and first.tokens.distribution.temperature == 0
            if not greedy == m.masked == (self.greedy_first and m.trajectory.sample.sample_index == 0):
                raise self._refuse("INVALID", "the greedy answer of a group is its first one, sent masked")
            turns = len(m.trajectory.conversation.turns) if self.by_turn else 0
            if len(m.turn_rewards) != turns or (turns and sum(m.turn_rewards) != m.reward):
                raise self._refuse(
                    "INVALID", f"rewards {m.turn_rewards} of {turns} turns, and {m.reward} in all"
                )
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
        lag = max(self.version.ordinal - m.oldest_version.ordinal for m in group.members)
        if lag > self.max_staleness:
            return trainer.GroupOutcome(
                prompt_ordinal=group.prompt_ordinal, disposition=trainer.GROUP_DISPOSITION_STALE
            )
        self.groups[group.prompt_ordinal] = members
        self.lags[group.prompt_ordinal] = lag
        self.sampled[group.prompt_ordinal] = _tokens_by_version(group)
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
        self.sampled |= {prompt: source.sampled[prompt] for prompt in added}
        self.lags |= {prompt: source.lags[prompt] for prompt in added}
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
        learned = [slot for prompt in sorted(self.groups) for slot in self.groups[prompt]]
        if set_digest(learned) != request.set_digest:
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
            return trainer.CommitStepResponse(result=trainer.COMMIT_RESULT_SET_MISMATCH)
        self._lead(governed=True)
        await asyncio.sleep(self.pace * (0.3 if self.rng.random() < 0.9 else self.rng.uniform(0.3, 20.0)))
        self._lead()
        if self.rng.random() < 0.02:
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
            return trainer.CommitStepResponse(result=trainer.COMMIT_RESULT_NONFINITE)
        base = self.version
        by_version = sum((self.sampled[prompt] for prompt in self.groups), Counter[int]())
        slots = tuple((prompt, sample) for prompt, sample, _, _ in sorted(learned))
        self._hold(self.weights + slots, request.next_number, base.number, base.ordinal + 1)
        self.phase = trainer.STEP_PHASE_COMMITTED
        self.commit = trainer.CommitStepResponse(
            result=trainer.COMMIT_RESULT_COMMITTED,
            version=self.version,
            group_count=len(self.groups),
            sequence_count=len(learned),
            token_count=by_version.total(),
            tokens_by_version=by_version,
            max_staleness=max(self.lags[prompt] for prompt in self.groups),
            figures={"log_prob_compared_tokens": len(learned), "log_prob_mismatch_mean": 0.0},
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


def _tokens_by_version(group: trainer.SettledGroup) -> Counter[int]:
    found = Counter[int]()
    for segment in (segment for member in group.members for segment in segments_of(member.trajectory)):
        actions = segment.WhichOneof("body") == "actions"
        count = len(segment.actions.valid_mask.data) if actions else len(segment.tokens.token_ids)
        found[segment.policy_number] += count
    return found


async def _chain(
    first: trainer.LearnRequest, rest: AsyncIterator[trainer.LearnRequest]
) -> AsyncIterator[trainer.LearnRequest]:
    yield first
    async for request in rest:
        yield request
