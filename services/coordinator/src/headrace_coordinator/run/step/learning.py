"""Settled groups to the trainer group's leader, and its answers into the ledger.

A lease that lapses or is revoked under the leader is no fault: what it has not answered is sent again on another
stream, under the lease that it holds then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TypeVar

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.images import MOST_GROUP_IMAGE_BYTES
from headrace_servicekit.rpc.digests import set_digest

from headrace_coordinator.domain.ledger.slot_index import SETTLED, Slot
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.timer import WAIT_DATA, WAIT_TAIL
from headrace_coordinator.run.step.trajectories import Trajectory, is_shown
from headrace_coordinator.run.workers.trainer_client import LearnRequests

T = TypeVar("T")
MESSAGE_BYTES = 1 << 20
"""A message is sent once it has so much: gRPC is fastest at this size, and refuses those of 64 MiB."""


class MessagesLost(Exception):
    """No producer retains some settled trajectories any more: the step attempt starts again without them."""


class AttemptLost(Exception):
    """The trainer group had to end the step attempt: the next one begins with what is settled."""


class _LeaseAway(Exception):
    """The leader's lease has lapsed, or is `revoked`: the stream has ended and nothing is lost."""

    def __init__(self, *, revoked: bool) -> None:
        super().__init__()
        self.revoked = revoked


class Learning:
    """One step attempt's way from settled groups to accumulated gradients."""

    def __init__(self, attempt: AttemptState) -> None:
        self._attempt = attempt
        self._context = attempt.context
        self.seconds, self.tokens = 0.0, 0
        """What the trainer group has learned itself, and in how many seconds."""

    async def run(self) -> None:
        """Works until no more groups will settle and everything that was sent is answered."""
        while True:
            requests = LearnRequests(maxsize=2)
            try:
                await gather_all(self._feed(requests), self._exchange(requests))
                return
            except _LeaseAway as away:
                self._attempt.groups.collect()  # What was sent has no answer any more.
                if away.revoked:
                    await _next_lease(self._context)
                else:
                    await self._context.workers.wait_for_renewal(self._context.workers.leader)

    async def _feed(self, requests: LearnRequests) -> None:
        # Not inside the request iterator: an error there would only cancel the call.
        groups = self._attempt.groups
        while True:
            news = groups.changed.next()
            if prompts := groups.take():
                async for request in learn_requests(self._attempt, prompts):
                    await requests.put(request)
            elif groups.exhausted:
                await requests.put(None)
                return
            else:
                with self._idle():
                    await asyncio.shield(news)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Counts the time in which the trainer group has nothing to learn, where answers are made ahead of it."""
        attempt, clock = self._attempt, self._context.event_log.monotonic
        if not attempt.ahead or attempt.groups.sent:
            yield
            return
        prompts, index, began = attempt.ledger.prompts, attempt.ledger.index, clock()
        unstarted = any(prompt in prompts for prompt in (*index.fresh, *index.returned))
        try:
            yield
        finally:
            stage = WAIT_DATA if unstarted else WAIT_TAIL
            attempt.timer.add(stage, (began, clock()), self._context.workers.leader.devices)

    async def _exchange(self, requests: LearnRequests) -> None:
        attempt, ledger, leader = self._attempt, self._attempt.ledger, self._context.workers.leader
        clock, limit = self._context.event_log.monotonic, self._context.spec.limits.step_timeout_s
        epoch, heard = leader.lease_epoch, clock()
        try:
            async for response in leader.learn(ledger.step, ledger.attempt, requests, limit):
                if response.revoked:
                    raise _LeaseAway(revoked=True)
                now, seconds = clock(), response.metrics.wall_time.ToNanoseconds() / 1e9
                attempt.timer.add("learn", (now - seconds, now), leader.devices)
                # Groups that wait for those before them are not learned twice.
                self.seconds, heard = self.seconds + min(seconds, now - heard), now
                answered = [outcome.prompt_ordinal for outcome in response.outcomes]
                self.tokens += attempt.groups.tokens(answered)
                attempt.groups.sent.difference_update(answered)
                attempt.accumulate(learned(attempt, response))
                attempt.groups.changed.beat()
        except CallRefused as refused:
            if refused.reason == "ATTEMPT_LOST":
                raise AttemptLost(refused.message) from refused
            if refused.reason == "LEASE_QUIESCED":
                raise _LeaseAway(revoked=False) from refused
            if self._context.workers.lease_ended(leader, refused, epoch):
                raise _LeaseAway(revoked=True) from refused
            raise
        if unanswered := len(attempt.groups.unanswered()):
            raise CallRefused(leader.incarnation, "INTERNAL", f"Learn left {unanswered} groups unanswered")


async def learn_requests(attempt: AttemptState, prompts: list[int]) -> AsyncIterator[trainer.LearnRequest]:
    """Whole settled groups, in order, in requests of about MESSAGE_BYTES; raises `MessagesLost`."""
    slots = [slot for prompt in prompts for slot in attempt.ledger.group(prompt)]
    messages = await attempt.trajectories.messages(slots, attempt.context.workers.producers)
    if lost := len(slots) - len(messages):
        raise MessagesLost(f"{lost} settled trajectories are lost with their producer")
    request, size = trainer.LearnRequest(), 0
    for prompt in prompts:
        members = attempt.ledger.group(prompt)
        own = {image.digest: image for slot in members for image in messages[slot.key].images}
        group = request.groups.add(
            prompt_ordinal=prompt,
            images=[*attempt.context.images(prompt), *own.values()],
            rated=attempt.context.spec.tracking.ratios and is_shown(attempt.context, members[0]),
        )
        size += _image_bytes(attempt, group)
        for slot in members:
            trajectory = attempt.trajectories[slot.key]
            _fill(group.members.add(), attempt, trajectory, messages[slot.key])
            size += trajectory.size
        if size >= MESSAGE_BYTES:
            yield request
            request, size = trainer.LearnRequest(), 0
    if request.groups:
        yield request


def _image_bytes(attempt: AttemptState, group: trainer.SettledGroup) -> int:
    """Raises `CallRefused` for more than a message takes, which conversations alone come to."""
    size = sum(len(image.data) for image in group.images)
    if size > MOST_GROUP_IMAGE_BYTES:
        why = (
            f"environment.tasks: the images of {len(group.images)} messages of group {group.prompt_ordinal} have "
            f"{size:,} bytes, and {MOST_GROUP_IMAGE_BYTES:,} of a group travel: let the environment show smaller ones, "
            "or JPEG files, or lower algorithm.group_size"
        )
        raise CallRefused(attempt.context.workers.leader.incarnation, "INVALID", why)
    return size


def _fill(
    settled: trainer.SettledTrajectory,
    attempt: AttemptState,
    trajectory: Trajectory,
    message: common.Trajectory,
) -> None:
    """In place: a message given to a constructor would be copied once for every message around it."""
    context, slot = attempt.context, trajectory.slot
    oldest = context.state.lineage.versions[trajectory.oldest]
    settled.trajectory.CopyFrom(message)
    settled.trajectory.ClearField("images")  # the group has them, each once
    settled.reward = slot.reward
    if context.workers.leader.by_turn or trajectory.turn_roles:
        settled.turn_rewards.extend(trajectory.turn_rewards)
    settled.masked = carries_no_loss(context, slot.sample, message.finish_reason)
    version = settled.oldest_version
    version.number, version.parent = oldest.number, oldest.parent
    version.ordinal, version.digest = oldest.ordinal, oldest.digest


def carries_no_loss(context: RunContext, sample: int, finish_reason: int) -> bool:
    """Whether a trajectory counts for its group's baseline alone."""
    truncated = finish_reason == common.FINISH_REASON_LENGTH
    hidden = truncated and context.spec.algorithm.truncated == "mask"
    return hidden or context.workers.leader.is_baseline(sample)


def learned(attempt: AttemptState, response: trainer.LearnResponse) -> list[int]:
    """Groups whose gradient a trainer has, by its answer; drops the others. Raises `CallRefused` for a wrong digest."""
    accumulated: list[int] = []
    for outcome in response.outcomes:
        prompt = outcome.prompt_ordinal
        if outcome.disposition == trainer.GROUP_DISPOSITION_ACCUMULATED:
            slots = attempt.ledger.group(prompt)
            if outcome.digest != set_digest(identities(slots)):
                raise CallRefused(
                    attempt.context.workers.leader.incarnation,
                    "DIGEST_MISMATCH",
                    f"group {prompt} was accumulated with other trajectories than the ledger knows",
                )
            _keep_advantages(attempt, slots, outcome)
            accumulated.append(prompt)
        else:
            name = trainer.GroupDisposition.Name(outcome.disposition).removeprefix("GROUP_DISPOSITION_")
            if outcome.disposition == trainer.GROUP_DISPOSITION_NONFINITE:
                attempt.context.recording.fails(f"prompt {prompt} was NONFINITE: {outcome.detail}")
            attempt.drop(prompt, "ABANDONED" if name == "STALE" else name, outcome.detail)
    return accumulated


def _keep_advantages(attempt: AttemptState, slots: list[Slot], outcome: trainer.GroupOutcome) -> None:
    """For people who are shown the trajectories: a trainer need not say advantages, and nothing depends on them."""
    if len(outcome.advantages) == len(slots):
        for slot, advantage in zip(slots, outcome.advantages, strict=True):
            trajectory = attempt.trajectories.get(slot.key)
            if trajectory is not None and trajectory.shown is not None and isfinite(advantage):
                trajectory.shown.advantage = advantage


async def under_lease(context: RunContext, command: Callable[[], Awaitable[T]]) -> T:
    """A command to the leader, given again under the next lease as long as the leader's was revoked before it."""
    while True:
        epoch = context.workers.leader.lease_epoch
        try:
            return await command()
        except CallRefused as refused:
            if not context.workers.lease_ended(context.workers.leader, refused, epoch):
                raise
        await _next_lease(context)


async def _next_lease(context: RunContext) -> None:
    """The leader's lease was revoked: it takes another one."""
    leader = context.workers.leader
    context.note(f"the lease of {leader.instance.instance} was revoked; it goes on under the next one")
    leader.lost_lease()
    await context.devices.hand_devices_to_trainers()


def contribution_problem(ledger: SlotLedger, prompts: list[int], given: trainer.Contribution) -> str:
    """Why a helper's contribution is not of the groups that the ledger knows; empty when it is."""
    slots = [slot for prompt in prompts for slot in ledger.group(prompt)]
    if any(slot.state != SETTLED for slot in slots):
        return "one of its groups is no longer to be learned"
    found = {
        (group.prompt_ordinal, each.sample_index, each.attempt, each.body_digest)
        for group in given.groups
        for each in group.members
    }
    return (
        "" if found == {*identities(slots)} else "it has other groups or trajectories than the ledger knows"
    )


def identities(slots: list[Slot]) -> list[tuple[int, int, int, str]]:
    """What a set digest is made of."""
    return [(slot.prompt, slot.sample, slot.attempt, slot.digest) for slot in slots]
