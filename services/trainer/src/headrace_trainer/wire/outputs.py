"""The calls that give out what was trained: versions, checkpoints, exported models, a helper's gradients.

Decides nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.failpoints import failpoint
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import MAX_ATTEMPT, check_name, check_number, check_page, invalid
from headrace_servicekit.weights.receiving import receive_weights

from headrace_trainer.backends._base import PrivateGradient
from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.learning.samples import Disposition, GroupRecord
from headrace_trainer.learning.step import Version
from headrace_trainer.session.helping import Contribution, Offer
from headrace_trainer.session.saving import Write
from headrace_trainer.session.session import Session
from headrace_trainer.versions.publishing import published_tensors
from headrace_trainer.versions.versions import Published
from headrace_trainer.wire import messages as wire
from headrace_trainer.wire.calls import Calls, Context, check_path, elsewhere, refusals

LEDGER_PIECE_BYTES = 1024 * 1024


class OutputCalls(Calls):
    """PublishPolicy, SaveCheckpoint, ListCheckpoints, FetchLedger and ExportModel."""

    async def PublishPolicy(
        self, request: trainer_pb2.PublishPolicyRequest, context: Context
    ) -> trainer_pb2.PublishPolicyResponse:
        self._check(request.header, lease=False)
        return await self._publish(self._session(), request.header.run, request.number)

    async def _publish(
        self, session: Session, run: str, number: int, first: Callable[[], None] = lambda: None
    ) -> trainer_pb2.PublishPolicyResponse:
        """Publishes a version after `first`, which runs in the compute thread too."""

        def act() -> Published:
            first()
            return session.publish(number)

        started = time.monotonic()
        published = await self._compute(act)
        return trainer_pb2.PublishPolicyResponse(
            version=published.version,
            manifest=published.manifest,
            source=published.source,
            publish_time=wire.duration(published.cast_seconds + time.monotonic() - started),
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        self._check(request.header, lease=False)
        write, stood_still = await self._save(request)
        if request.wait:
            with refusals():
                await asyncio.wrap_future(write.done)
        if write.durable:
            checkpoint = wire.checkpoint_message(write.done.result())
        else:
            checkpoint = trainer_pb2.Checkpoint(name=write.name, version=wire.version_message(write.version))
        return trainer_pb2.SaveCheckpointResponse(
            checkpoint=checkpoint, durable=write.durable, snapshot_time=wire.duration(stood_still)
        )

    async def ListCheckpoints(
        self, request: trainer_pb2.ListCheckpointsRequest, context: Context
    ) -> trainer_pb2.ListCheckpointsResponse:
        self._check(request.header, lease=False)
        first = check_page(request.page_size, request.page_token)
        directory = self._checkpoints(request.source_run_directory)
        found = await elsewhere(directory.live)
        size = request.page_size or 50
        page = found[first : first + size]
        return trainer_pb2.ListCheckpointsResponse(
            checkpoints=[wire.checkpoint_message(saved) for saved in page],
            next_page_token=str(first + size) if first + size < len(found) else "",
            last_failure="" if request.source_run_directory else self._trainer.last_failure(),
            set_aside=[wire.set_aside_message(found) for found in directory.asides.take_reports()],
        )

    async def FetchLedger(
        self, request: trainer_pb2.FetchLedgerRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.FetchLedgerResponse]:
        self._check(request.header, lease=False)
        directory = self._checkpoints(request.source_run_directory)
        ledger = await elsewhere(directory.ledger, request.checkpoint)
        for start in range(0, len(ledger), LEDGER_PIECE_BYTES):
            yield trainer_pb2.FetchLedgerResponse(data=ledger[start : start + LEDGER_PIECE_BYTES])

    async def ExportModel(
        self, request: trainer_pb2.ExportModelRequest, context: Context
    ) -> trainer_pb2.ExportModelResponse:
        self._check(request.header, lease=False)
        path, version = await self._compute(self._session().export, request.name)
        return trainer_pb2.ExportModelResponse(path=str(path), version=wire.version_message(version))

    def _checkpoints(self, source: str) -> CheckpointDirectory:
        if source:
            check_path("source_run_directory", source)
        with refusals():
            return self._trainer.checkpoints(source)

    async def _save(self, request: trainer_pb2.SaveCheckpointRequest) -> tuple[Write, float]:
        """Begins a checkpoint. A call that waits takes its turn after the one in flight, within its own deadline."""
        session = self._session()
        while True:
            try:
                return await self._compute(
                    session.save, request.number, bytes(request.ledger), list(request.retained_checkpoints)
                )
            except ServiceError as error:
                if not (request.wait and error.reason == "BUSY"):
                    raise
            flight = session.checkpoints.flight()
            if flight is not None:
                # Its own caller is told how it ends.
                await asyncio.wait([asyncio.wrap_future(flight.done)])


NO_VERSION = 0
"""`WeightStore.keep` with this number alone drops every version: none has it."""


class HelpingCalls(Calls):
    """Help, TakeContribution and AddContribution."""

    async def Help(self, request: trainer_pb2.HelpRequest, context: Context) -> trainer_pb2.HelpResponse:
        self._check(request.header, lease=True)
        version, run, started = request.version, request.header.run, time.monotonic()
        check_number("version.number", version.number, 1)
        check_number("version.ordinal", version.ordinal, 0)
        await failpoint("trainer.help")
        base = Version(version.number, version.parent, version.ordinal, version.digest)
        await self._obey(request.header, lambda session: session.check_help(base))
        store = self._instance.weights
        received = await receive_weights(
            store, run, version, request.manifest, request.sources, token=self._instance.token
        )
        try:
            with refusals():
                reader = StateReader.of_version(published_tensors(request.manifest, received.body))
            await self._obey(request.header, lambda session: session.help(base, reader))
        except ServiceError:
            store.keep(run, {NO_VERSION})
            raise
        store.keep(run, {version.number})
        return trainer_pb2.HelpResponse(
            transport=received.transport, load_time=wire.duration(time.monotonic() - started)
        )

    async def TakeContribution(
        self, request: trainer_pb2.TakeContributionRequest, context: Context
    ) -> trainer_pb2.TakeContributionResponse:
        self._check(request.header, lease=True)
        offer = await self._obey(
            request.header, lambda session: session.contribute(request.step, request.attempt)
        )
        await failpoint("trainer.contribution.before_reply")
        source = self._instance.weights.source(offer.name, offer.what.next_number)
        return trainer_pb2.TakeContributionResponse(contribution=contribution_message(offer, source))

    async def AddContribution(
        self, request: trainer_pb2.AddContributionRequest, context: Context
    ) -> trainer_pb2.AddContributionResponse:
        self._check(request.header, lease=True)
        given = request.contribution
        if (given.step, given.attempt) != (request.step, request.attempt):
            raise invalid("contribution", f"is of step {given.step} attempt {given.attempt}, not of this one")
        check_number("step", request.step, 0)
        check_number("attempt", request.attempt, 1, MAX_ATTEMPT)
        what = read_contribution(given, request.helper)
        if not given.name.startswith(f"{request.header.run}/helpers/"):
            raise invalid("contribution.name", f"{given.name!r} is no helper's of {request.header.run}")
        store = self._instance.weights
        version = common_pb2.PolicyVersion(number=given.next_number, digest=given.gradient.digest)
        received = await receive_weights(
            store, given.name, version, given.gradient, [given.source], token=self._instance.token
        )
        with refusals():
            tensors = published_tensors(given.gradient, received.body)
        gradient = PrivateGradient(tensors, dict(given.token_sums), dict(given.token_maxima))
        await failpoint("trainer.contribution.before_add")
        try:
            await self._obey(request.header, lambda session: session.add(what, gradient))
        finally:
            store.keep(given.name, {NO_VERSION})
        return trainer_pb2.AddContributionResponse(transport=received.transport)


def contribution_message(offer: Offer, source: common_pb2.WeightSource) -> trainer_pb2.Contribution:
    """A contribution as the coordinator passes it on."""
    what = offer.what
    return trainer_pb2.Contribution(
        step=what.step,
        attempt=what.attempt,
        base=wire.version_message(what.base),
        next_number=what.next_number,
        name=offer.name,
        gradient=offer.gradient.manifest,
        source=source,
        groups=[_group_message(record) for record in what.records],
        token_sums=dict(offer.token_sums),
        token_maxima=dict(offer.token_maxima),
    )


def _group_message(record: GroupRecord) -> trainer_pb2.AccumulatedGroup:
    return trainer_pb2.AccumulatedGroup(
        prompt_ordinal=record.prompt_ordinal,
        members=[
            trainer_pb2.AccumulatedMember(sample_index=sample, attempt=attempt, body_digest=digest)
            for _, sample, attempt, digest in record.keys
        ],
        trained_sequence_count=record.trained_sequences,
        token_count=record.tokens,
        all_equal=record.all_equal,
        tokens_by_version=dict(record.tokens_by_version),
        rewards=record.rewards,
        answer_lengths=record.answer_lengths,
    )


def read_contribution(given: trainer_pb2.Contribution, helper: str) -> Contribution:
    """A contribution without its gradient. Raises INVALID for one whose counts contradict each other."""
    check_name("helper", helper)
    check_name("contribution.name", given.name)
    check_number("contribution.next_number", given.next_number, 1)
    if not given.groups:
        raise invalid("contribution.groups", "give at least one group")
    if not all(map(math.isfinite, [*given.token_sums.values(), *given.token_maxima.values()])):
        raise invalid("contribution.token_sums", "a figure is not finite")
    base = given.base
    records = tuple(_read_group(group) for group in given.groups)
    if len({record.prompt_ordinal for record in records}) != len(records):
        raise invalid("contribution.groups", "names a prompt twice")
    return Contribution(
        given.step,
        given.attempt,
        Version(base.number, base.parent, base.ordinal, base.digest),
        given.next_number,
        helper,
        records,
    )


def _read_group(group: trainer_pb2.AccumulatedGroup) -> GroupRecord:
    keys = [(group.prompt_ordinal, m.sample_index, m.attempt, m.body_digest) for m in group.members]
    by_version = Counter(dict(group.tokens_by_version))
    consistent = (
        keys
        and group.token_count == by_version.total()
        and min(by_version.values(), default=1) > 0
        and 0 <= group.trained_sequence_count <= len(keys)
        and (group.trained_sequence_count > 0) == (group.token_count > 0)
        and 0 < len(group.rewards) == len(group.answer_lengths) <= len(keys)
        and all(map(math.isfinite, group.rewards))
    )
    if not consistent:
        raise invalid(
            "contribution.groups", f"the counts of prompt {group.prompt_ordinal} contradict each other"
        )
    return GroupRecord(
        prompt_ordinal=group.prompt_ordinal,
        digest=set_digest(keys),
        keys=tuple(keys),
        disposition=Disposition.ACCUMULATED,
        sequences=len(keys),
        trained_sequences=group.trained_sequence_count,
        tokens=group.token_count,
        all_equal=group.all_equal,
        tokens_by_version=by_version,
        rewards=tuple(group.rewards),
        answer_lengths=tuple(group.answer_lengths),
    )
