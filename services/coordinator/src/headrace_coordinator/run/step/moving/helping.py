"""Devices that move inside a step: in the tail rollouts give theirs back, and helpers learn whole groups on them.

When is `planner.elastic`'s to say. A helper's groups stay SETTLED in the ledger until the trainer group has its
gradient: whatever becomes of a helper, its groups are learned by the owners instead. Owners with devices of their own
learn meanwhile, and both take from what waits in `Learning`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_planner.elastic.outlook import Terms
from headrace_planner.elastic.policy import (
    ElasticState,
    Move,
    Role,
    Rollout,
    decode_after,
    helpers_until,
    plan_elastic,
)

from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.ledger.slot_index import SETTLED
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.learning import Learning, members_of
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient
from headrace_coordinator.waits import Notifier, WaitTimeout

LOOK_S = 0.25
"""How often the policy is asked: it takes some milliseconds, and a large step settles hundreds of groups a second."""
Fault = (InstanceDown, CallRefused, WaitTimeout)
Policy = Callable[[ElasticState, float], tuple[Move, ...]]


class HelperLost(Exception):
    """A helper's stream ended without its groups; the message says why."""


@dataclass
class Help:
    """One helper at work: the groups that it was given, and what it gives for them."""

    helper: TrainerClient
    prompts: list[int] = field(default_factory=list)
    contribution: trainer.Contribution | None = None


class Helping:
    """One step attempt's helpers."""

    policy: Policy = staticmethod(plan_elastic)
    until: Callable[[ElasticState], float] = staticmethod(helpers_until)

    def __init__(
        self, context: RunContext, timer: StepTimer, published: Published, learning: Learning, *, wanted: bool
    ) -> None:
        self._context = context
        self._workers = context.workers
        self._ledger = context.state.ledger
        self._timer = timer
        self._published = published
        self._learning = learning
        self.wanted = wanted and bool(context.spec.trainer.helpers) and not context.placement.hybrid
        self._beside = context.placement.streams
        """Whether the trainer group learns meanwhile."""
        learning.shares = self.wanted and self._beside
        self._clock = context.event_log.monotonic
        self._news = Notifier()
        self._closed = asyncio.Event()
        self._moved_at = self._clock()
        self._expected_s = 0.0
        """Seconds from the last move until all is decoded, by the pace without helpers."""
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._helps: list[Help] = []

    @property
    def _over(self) -> bool:
        """Nothing more is generated."""
        return self._closed.is_set()

    @property
    def moved(self) -> bool:
        """Whether a device has changed its side."""
        return bool(self._at_work)

    def news(self) -> None:
        """A group has settled."""
        self._news.beat()

    def close(self) -> None:
        """Nothing more is generated: helpers finish what they have begun, and share what waits with owners beside."""
        if self._expected_s and not self._over:
            self._context.tail.tailed(self._clock() - self._moved_at, self._expected_s)
        self._closed.set()
        self._news.beat()

    async def run(self) -> None:
        """Until closed and every helper has given its devices back."""
        if not self.wanted:
            return
        try:
            await self._context.staffing.staff_helpers()
            while not self._over:
                self._consider()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), LOOK_S)
            if self._beside:
                self._consider()  # Rollouts that decode no more help owners that still learn.
            await asyncio.gather(*self._at_work.values())
        finally:
            for task in self._at_work.values():
                task.cancel()
            await asyncio.gather(*self._at_work.values(), return_exceptions=True)

    @contextmanager
    def switching(self) -> Iterator[None]:
        """Measures the handing over of the devices to the trainer group."""
        began = self._clock()
        yield
        self._context.tail.switched(self._clock() - began)

    def owners_learned(self) -> None:
        """The trainer group has learned what it learns itself."""
        devices = sum(len(member.devices) for member in self._workers.trainers)
        self._context.tail.learned(self._learning.learned_s, self._learning.learned_tokens, devices)

    # --- when

    def _consider(self) -> None:
        """Asks the policy, and begins the moves that it wants and that a dormant helper can take."""
        terms = self._terms()
        rollouts = [member for member in self._workers.rollouts if self._workers.usable(member)]
        busy = self._ledger.index.waiting or self._context.lending.trainers_lack_devices
        if terms is None or busy or not rollouts:
            return  # What nobody has begun, every device is needed for.
        state = self._state(terms, rollouts)
        if not self._over and not any(rollout.unfinished for rollout in state.rollouts):
            return  # Others may be decoded in place of a group that is dropped.
        by_name, moved = {member.incarnation: member for member in rollouts}, 0
        for move in self.policy(state, self._clock()):
            member = by_name[move.rollout]
            helper = self._dormant(member) if move.role is Role.HELP else None
            if helper is not None:
                self._moved_at, moved = self._clock(), moved + 1
                self._at_work[helper.incarnation] = asyncio.ensure_future(self._help(member, helper))
        if moved and not self._over:
            self._expected_s = decode_after(state, moved)

    def _terms(self) -> Terms | None:
        owners = sum(len(member.devices) for member in self._workers.trainers)
        return self._context.tail.terms(max(1, owners), self._ledger.group_size, shared=not self._beside)

    def _state(self, terms: Terms, rollouts: list[RolloutClient]) -> ElasticState:
        held, mean = self._ledger.index.held, self._context.tail.mean
        return ElasticState(
            terms,
            tuple(Rollout(m.incarnation, 1, len(held.get(m.incarnation, ()))) for m in rollouts),
            decoded=self._context.tail.longest / mean,
            finished=self._learning.tokens(self._learning.waiting) / mean,
            begun=self._learning.tokens(self._learning.sent) / mean,
            partial=self._learning.tokens(self._ledger.index.open) / mean,
            helpers=sum(not task.done() for task in self._at_work.values()),
            owners_learn=self._beside,
            moved_at=self._moved_at,
        )

    def _dormant(self, member: RolloutClient) -> TrainerClient | None:
        """A helper that sees a rollout's devices and has nothing to do; on GPUs, the one that computes on that GPU."""
        for helper in self._workers.helpers:
            sees = set(member.devices) <= set(helper.instance.devices)
            elsewhere = helper.joined and is_gpu(member.devices[0]) and helper.devices != member.devices
            if (
                sees
                and not elsewhere
                and self._workers.may_help(helper)
                and helper.incarnation not in self._at_work
            ):
                return helper
        return None

    # --- one helper

    async def _help(self, member: RolloutClient, helper: TrainerClient) -> None:
        """From a rollout's devices to a contribution; whatever goes wrong costs the helper's work and no more."""
        began, own = self._clock(), Help(helper)
        name, ledger, lineage = helper.instance.instance, self._ledger, self._context.state.lineage
        try:
            await self._context.lending.lend_to_helper(member, helper)
            await self._context.staffing.join_helper(helper)
            await helper.help(self._published)
            await helper.begin(ledger.step, ledger.attempt, lineage.head, lineage.last_number)
            self._context.tail.joined(self._clock() - began)
            self._timer.add("switch", (began, self._clock()), helper.devices)
            await self._teach(own)
            if own.prompts:
                started = self._clock()
                own.contribution = await helper.take_contribution(ledger.step, ledger.attempt)
                self._context.tail.contributed(self._clock() - started)
                self._helps.append(own)
        except (*Fault, HelperLost) as fault:
            self._context.note(f"helper {name} gives nothing to step {ledger.step + 1}: {fault}")
            self._learning.give_back(own.prompts)
        finally:
            await self._context.lending.release_helper(helper)

    async def _teach(self, own: Help) -> None:
        ready: asyncio.Queue[trainer.LearnRequest | None] = asyncio.Queue(maxsize=1)
        answered = asyncio.Event()
        await gather_all(self._feed(own, ready, answered), self._exchange(own, ready, answered))

    async def _feed(
        self, own: Help, ready: asyncio.Queue[trainer.LearnRequest | None], answered: asyncio.Event
    ) -> None:
        while True:
            news = self._news.next()
            if prompts := self._next():
                own.prompts += prompts
                for message in self._learning.filled(prompts, await self._learning.bodies(prompts)):
                    answered.clear()
                    await ready.put(message)
                    await answered.wait()
            elif self._over:
                await ready.put(None)
                return
            else:
                await asyncio.wait({news}, timeout=LOOK_S)

    def _next(self) -> list[int]:
        """Groups that a helper can learn in time, at most a micro-batch of them."""
        terms = self._terms()
        if (self._over and not self._beside) or terms is None or not self._learning.waiting:
            return []
        rollouts = [member for member in self._workers.rollouts if self._workers.usable(member)]
        if not rollouts and not self._over:
            return []
        left_s = self.until(self._state(terms, rollouts))
        chosen: list[int] = []
        tokens = 0
        for prompt in self._learning.waiting:
            more = tokens + self._learning.tokens([prompt])
            if self._context.tail.helper_s(more) <= left_s and (
                not chosen or more <= self._context.spec.trainer.micro_batch_tokens
            ):
                chosen.append(prompt)
                tokens = more
        self._learning.lend(chosen)
        return chosen

    async def _exchange(
        self, own: Help, ready: asyncio.Queue[trainer.LearnRequest | None], answered: asyncio.Event
    ) -> None:
        helper, ledger, limit = own.helper, self._ledger, self._context.spec.limits.step_timeout_s
        kept: set[int] = set()
        began = self._clock()
        async for response in helper.learn(ledger.step, ledger.attempt, _messages(ready), limit):
            if response.revoked:
                raise HelperLost("its lease was revoked")
            now, seconds = self._clock(), response.metrics.wall_time.ToNanoseconds() / 1e9
            self._timer.add("help", (max(began, now - seconds), now), helper.devices)
            self._context.tail.helped(
                seconds, self._learning.tokens(o.prompt_ordinal for o in response.outcomes)
            )
            kept.update(self._learning.judge(response))
            answered.set()
        if unanswered := [
            p for p in own.prompts if p not in kept and self._ledger.group(p)[0].state == SETTLED
        ]:
            raise HelperLost(f"groups {unanswered} were left unanswered")
        own.prompts = sorted(kept)

    # --- to the owners

    async def contribute(self) -> None:
        """Adds what helpers have to the open attempt at the trainer group; what cannot be added, the owners learn."""
        leader, ledger = self._workers.leader, self._ledger
        for own in self._helps:
            name, given = own.helper.instance.instance, own.contribution
            assert given is not None
            if problem := self._differs(own, given):
                self._context.note(f"the contribution of {name} is not used: {problem}")
                continue
            try:
                with self._timer.stage("sync", leader.devices):
                    await leader.add_contribution(ledger.step, ledger.attempt, given, name)
            except CallRefused as refused:
                self._context.note(f"the contribution of {name} is not used: {refused.message}")
                continue
            self._learning.accumulated(own.prompts, name)
        self._learning.lent.clear()  # What was not used, the owners learn.

    def _differs(self, own: Help, given: trainer.Contribution) -> str:
        """Why a contribution is not of the groups that the ledger knows; empty when it is."""
        found = {
            (group.prompt_ordinal, m.sample_index, m.attempt, m.body_digest)
            for group in given.groups
            for m in group.members
        }
        slots = [slot for prompt in own.prompts for slot in self._ledger.group(prompt)]
        if any(slot.state != SETTLED for slot in slots):
            return "one of its groups is no longer to be learned"
        return (
            "" if found == set(members_of(slots)) else "it has other groups or bodies than the ledger knows"
        )


async def _messages(ready: asyncio.Queue[trainer.LearnRequest | None]) -> AsyncIterator[trainer.LearnRequest]:
    while (message := await ready.get()) is not None:
        yield message
