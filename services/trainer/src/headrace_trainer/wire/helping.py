"""The calls between helpers and owners, gRPC to the trainer's records and back. Decides nothing."""

from __future__ import annotations

import math
import time
from collections import Counter

from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.failpoints import failpoint
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import MAX_ATTEMPT, check_name, check_number, invalid
from headrace_servicekit.weights import receive_weights

from headrace_trainer.backends._base import PrivateGradient
from headrace_trainer.checkpoints.reader import TensorReader
from headrace_trainer.learning.samples import Disposition, GroupRecord
from headrace_trainer.learning.step import Version
from headrace_trainer.session.helping import Contribution, Offer
from headrace_trainer.session.publishing import published_tensors
from headrace_trainer.wire import messages as wire
from headrace_trainer.wire.calls import Calls, Context, refusals

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
                reader = TensorReader.of_version(published_tensors(request.manifest, received.body))
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
