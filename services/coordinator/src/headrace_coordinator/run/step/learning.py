"""Settled groups to the trainer group's leader, and its acknowledgements into the ledger.

A lease that lapses or is revoked under the leader is no fault: what it has not acknowledged is sent again on another
stream, under the lease that it holds then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from math import isfinite
from typing import TypeVar

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_servicekit.rpc.digests import set_digest

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import DROPPED, Slot
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.state import Batch
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Relay, SizedBody
from headrace_coordinator.run.workers.clients import SlotKey
from headrace_coordinator.waits import Notifier

T = TypeVar("T")
GROUPS_A_MESSAGE = 64
MESSAGE_BYTES = 1 << 20
"""A message is sent once it has so much: gRPC is fastest at this size, and refuses those of 64 MiB."""


class LostBodies(Exception):
    """Bodies of settled groups are in no retention any more: the step attempt starts again without them."""

    def __init__(self, slots: list[SlotKey]) -> None:
        super().__init__(f"{len(slots)} settled bodies are lost with their producer")
        self.slots = slots


class AttemptLost(Exception):
    """The trainer group had to give up the step attempt: the next one begins with what is settled."""


class _LeaseAway(Exception):
    """The leader's lease has lapsed, or is `revoked`: the stream has ended and nothing is lost."""

    def __init__(self, *, revoked: bool) -> None:
        super().__init__()
        self.revoked = revoked


class Learning:
    """One step attempt's way from settled groups to accumulated gradients."""

    def __init__(self, context: RunContext, relay: Relay, timer: StepTimer, batch: Batch) -> None:
        self._context = context
        self._ledger = context.state.ledger
        self._relay = relay
        self._timer = timer
        self._batch = batch
        self.waiting: list[int] = []
        """Settled groups that nobody learns yet; helpers take of them too."""
        self.lent: set[int] = set()
        """Settled groups that helpers learn, or have learned."""
        self.shares = False
        """Whether helpers learn beside the trainer group, which then has no more groups at once than it works on."""
        self.learned_s, self.learned_tokens = 0.0, 0
        """What the trainer group has learned itself, and in how many seconds."""
        self.sent: set[int] = set()
        """Settled groups that the trainer group was given and has not answered yet."""
        self._closed = self._held = False
        self._news = Notifier()

    @property
    def backlog(self) -> bool:
        """The trainer group has groups to work on."""
        return bool(self._ledger.index.settled - self.lent)

    def put(self, prompt: int) -> None:
        """A group has settled."""
        self.waiting.append(prompt)
        self._news.beat()

    def lend(self, prompts: list[int]) -> None:
        """A helper learns groups that wait."""
        self.waiting = [prompt for prompt in self.waiting if prompt not in prompts]
        self.lent.update(prompts)
        self._relay.drop(())  # Who waits for the trainer group to take them looks again.

    def give_back(self, prompts: Iterable[int]) -> None:
        """A helper gives nothing for groups that were lent: those that are settled wait again."""
        back = [prompt for prompt in prompts if prompt in self.lent]
        self.lent.difference_update(back)
        self.waiting += [prompt for prompt in back if prompt in self._ledger.index.settled]
        self._news.beat()

    def collect(self) -> list[int]:
        """Whatever is settled and not lent waits, and nothing is on its way; those groups."""
        self.sent.clear()
        self.waiting = sorted(self._ledger.index.settled - self.lent)
        return self.waiting

    def close(self) -> None:
        """No more groups will settle."""
        self._closed = True
        self._news.beat()

    def hold(self) -> None:
        """What waits stays here: the trainer group is about to have more devices, and would keep them waiting."""
        self._held = True

    def go_on(self) -> None:
        """The trainer group has the devices that it waits for."""
        self._held = False
        self._news.beat()

    async def run(self) -> None:
        """Until closed and everything sent is acknowledged."""
        while True:
            ready: asyncio.Queue[trainer.LearnRequest | None] = asyncio.Queue(maxsize=2)
            try:
                await gather_all(self._feed(ready), self._exchange(ready))
                return
            except _LeaseAway as away:
                self.collect()  # What was sent has no answer any more.
                if away.revoked:
                    await _next_lease(self._context)
                else:
                    await self._context.workers.wait_for_renewal(self._context.workers.leader)

    async def _exchange(self, ready: asyncio.Queue[trainer.LearnRequest | None]) -> None:
        ledger, limit = self._ledger, self._context.spec.limits.step_timeout_s
        leader = self._context.workers.leader
        epoch, heard = leader.lease_epoch, self._context.event_log.monotonic()
        try:
            async for response in leader.learn(ledger.step, ledger.attempt, _messages(ready), limit):
                if response.revoked:
                    raise _LeaseAway(revoked=True)
                now = self._context.event_log.monotonic()
                seconds = response.metrics.wall_time.ToNanoseconds() / 1e9
                self._timer.add("learn", (now - seconds, now), leader.devices)
                # Groups that wait for those before them are not learned twice.
                self.learned_s, heard = self.learned_s + min(seconds, now - heard), now
                self._take(response)
        except CallRefused as refused:
            if refused.reason == "ATTEMPT_LOST":
                raise AttemptLost(refused.message) from refused
            if refused.reason == "LEASE_QUIESCED":
                raise _LeaseAway(revoked=False) from refused
            if self._context.workers.lease_ended(leader, refused, epoch):
                raise _LeaseAway(revoked=True) from refused
            raise
        if unanswered := len(ledger.index.settled - self.lent - set(self.waiting)):
            raise CallRefused(leader.incarnation, "INTERNAL", f"Learn left {unanswered} groups unanswered")

    async def _feed(self, ready: asyncio.Queue[trainer.LearnRequest | None]) -> None:
        # Not inside `_messages`: an error in a request iterator would only cancel the call.
        while True:
            news = self._news.next()
            if self.waiting and not self._held and self._has_room():
                prompts = self._next()
                if self._context.spec.deterministic:
                    prompts.sort()
                for message in self.filled(prompts, await self.bodies(prompts)):
                    await ready.put(message)
            elif self._closed and not self.waiting:
                await ready.put(None)
                return
            else:
                await asyncio.shield(news)

    def _has_room(self) -> bool:
        """Whether the trainer group may have more: where helpers share, what it works on and a piece to go on with."""
        return not self.shares or self.tokens(self.sent) < self._share

    def _next(self) -> list[int]:
        """Groups to send now, off what waits: where helpers share, about half of what the ranks compute at once."""
        count = min(GROUPS_A_MESSAGE, len(self.waiting))
        if self.shares:
            half = self._share // 2
            fitting = (at for at in range(1, count) if self.tokens(self.waiting[: at + 1]) > half)
            count = next(fitting, count)
        prompts, self.waiting = self.waiting[:count], self.waiting[count:]
        self.sent.update(prompts)
        return prompts

    @property
    def _share(self) -> int:
        """Tokens that the ranks compute at once."""
        return self._context.spec.trainer.micro_batch_tokens * self._context.workers.ranks

    def tokens(self, prompts: Iterable[int]) -> int:
        """Of all answers of some groups."""
        return sum(slot.tokens for prompt in prompts for slot in self._ledger.group(prompt))

    async def bodies(self, prompts: list[int]) -> dict[SlotKey, SizedBody]:
        """Bodies of settled groups; raises `LostBodies`."""
        slots = [slot for prompt in prompts for slot in self._ledger.group(prompt)]
        bodies = await self._relay.bodies(slots, self._context.workers.producers)
        lost = [key for slot in slots if (key := (slot.prompt, slot.sample)) not in bodies]
        if lost:
            raise LostBodies(lost)
        return bodies

    def filled(self, prompts: list[int], bodies: dict[SlotKey, SizedBody]) -> Iterator[trainer.LearnRequest]:
        """Whole groups, in order, in messages of about MESSAGE_BYTES."""
        message, size = trainer.LearnRequest(), 0
        for prompt in prompts:
            group = message.groups.add(prompt_ordinal=prompt)
            for slot in self._ledger.group(prompt):
                body, body_size = bodies[slot.prompt, slot.sample]
                self._fill(group.members.add(), slot, body)
                size += body_size
            if size >= MESSAGE_BYTES:
                yield message
                message, size = trainer.LearnRequest(), 0
        if message.groups:
            yield message

    def _fill(self, member: trainer.SettledTrajectory, slot: Slot, body: common.Trajectory) -> None:
        """In place: a body given to a constructor would be copied once for every message around it."""
        truncated = body.finish_reason == common.FINISH_REASON_LENGTH
        oldest = self._context.state.lineage.versions[self._batch.scored[slot.prompt, slot.sample].oldest]
        member.trajectory.CopyFrom(body)
        member.reward = slot.reward
        hidden = truncated and self._context.spec.algorithm.truncated == "mask"
        member.masked = hidden or self._context.workers.leader.is_baseline(slot.sample)
        version = member.oldest_version
        version.number, version.parent = oldest.number, oldest.parent
        version.ordinal, version.digest = oldest.ordinal, oldest.digest

    def _take(self, response: trainer.LearnResponse) -> None:
        answered = [outcome.prompt_ordinal for outcome in response.outcomes]
        self.learned_tokens += self.tokens(answered)
        self.sent.difference_update(answered)
        self.accumulated(self.judge(response))
        self._news.beat()

    def judge(self, response: trainer.LearnResponse) -> list[int]:
        """Groups whose gradient is in; the others are dropped."""
        accumulated: list[int] = []
        for outcome in response.outcomes:
            prompt = outcome.prompt_ordinal
            if outcome.disposition == trainer.GROUP_DISPOSITION_ACCUMULATED:
                self._same_group(outcome)
                self._keep_advantages(outcome)
                accumulated.append(prompt)
            else:
                name = trainer.GroupDisposition.Name(outcome.disposition).removeprefix("GROUP_DISPOSITION_")
                self._drop(prompt, "ABANDONED" if name == "STALE" else name, outcome.detail)
                self._release([prompt])
        return accumulated

    def accumulated(self, prompts: list[int], helper: str = "") -> None:
        """The trainer group has these groups' gradients, which came from a `helper` where one is named."""
        self._release(prompts)
        if prompts:
            self._context.event_log.post(
                ev.GroupsAccumulated(
                    at=self._context.event_log.now(),
                    run=self._context.run_id,
                    step=self._ledger.step,
                    attempt=self._ledger.attempt,
                    prompts=prompts,
                    helper=helper,
                )
            )

    def _release(self, prompts: list[int]) -> None:
        size = self._ledger.group_size
        self._relay.drop((prompt, sample) for prompt in prompts for sample in range(size))

    def _same_group(self, outcome: trainer.GroupOutcome) -> None:
        expected = set_digest(members_of(self._ledger.group(outcome.prompt_ordinal)))
        if outcome.digest != expected:
            raise CallRefused(
                self._context.workers.leader.incarnation,
                "DIGEST_MISMATCH",
                f"group {outcome.prompt_ordinal} was accumulated with other bodies than the ledger knows",
            )

    def _keep_advantages(self, outcome: trainer.GroupOutcome) -> None:
        """What people are shown beside each answer; a trainer need not say it, and nothing rests on it."""
        slots = self._ledger.group(outcome.prompt_ordinal)
        if len(outcome.advantages) == len(slots):
            for slot, advantage in zip(slots, outcome.advantages, strict=True):
                scored = self._batch.scored.get((slot.prompt, slot.sample))
                if scored is not None and scored.shown is not None and isfinite(advantage):
                    scored.shown.advantage = advantage

    def _drop(self, prompt: int, reason: str, detail: str) -> None:
        if self._ledger.group(prompt)[0].state != DROPPED:
            self._context.event_log.post(
                ev.GroupDropped(
                    at=self._context.event_log.now(),
                    run=self._context.run_id,
                    step=self._ledger.step,
                    prompt=prompt,
                    reason=reason,
                    detail=detail,
                )
            )


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
    await context.placement.hand_devices_to_trainers()


async def _messages(ready: asyncio.Queue[trainer.LearnRequest | None]) -> AsyncIterator[trainer.LearnRequest]:
    while (message := await ready.get()) is not None:
        yield message


def members_of(slots: list[Slot]) -> list[tuple[int, int, int, str]]:
    """What a set digest is made of."""
    return [(slot.prompt, slot.sample, slot.attempt, slot.digest) for slot in slots]
