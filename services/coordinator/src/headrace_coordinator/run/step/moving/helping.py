"""Devices that move inside a step: in the tail rollouts give theirs back, and helpers learn whole groups on them.

`planner.elastic` says when. A helper's groups stay SETTLED in the ledger until the trainer group has its gradient:
whatever happens to a helper, its groups are learned by the trainer group instead. A trainer group with devices of its
own learns meanwhile, and takes from the same queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
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
from headrace_coordinator.run.devices.placement import rank_devices
from headrace_coordinator.run.step.learning import identities, learn_requests, learned
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import LearnRequests, TrainerClient
from headrace_coordinator.waits import WaitTimeout

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

    def __init__(self, attempt: AttemptState, *, wanted: bool) -> None:
        self._attempt = attempt
        self._groups = attempt.groups
        self._context = attempt.context
        self._workers = attempt.context.workers
        self._ledger = attempt.ledger
        self._clock = attempt.context.event_log.monotonic
        self.wanted = (
            wanted and bool(self._context.spec.trainer.helpers) and not self._context.placement.hybrid
        )
        self._beside = attempt.streams
        """Whether the trainer group learns meanwhile."""
        self._groups.shared = self.wanted and self._beside
        self._moved_at = self._clock()
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._helps: list[Help] = []

    @property
    def _over(self) -> bool:
        """Nothing more is generated: helpers finish their groups, and share what waits with owners beside them."""
        return self._groups.closed.is_set()

    @property
    def moved(self) -> bool:
        """Whether a device has changed its side."""
        return bool(self._at_work)

    async def run(self) -> None:
        """Works until nothing more is generated and every helper has given its devices back."""
        if not self.wanted:
            return
        try:
            await self._context.staffing.staff_helpers()
            while not self._over:
                self._consider()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._groups.closed.wait()
            if self._beside:
                self._consider()  # Rollouts that decode no more help owners that still learn.
            await asyncio.gather(*self._at_work.values())
        finally:
            for task in self._at_work.values():
                task.cancel()
            await asyncio.gather(*self._at_work.values(), return_exceptions=True)

    # --- when

    def _consider(self) -> None:
        """Asks the policy, and begins the moves that it wants and that a dormant helper can take."""
        terms = self._attempt.terms(shared=not self._beside)
        rollouts = [worker for worker in self._workers.rollouts if self._workers.usable(worker)]
        busy = self._ledger.index.waiting or self._context.lending.trainers_lack_devices
        if terms is None or busy or not rollouts:
            return  # Every device is needed for samples that nobody has begun.
        state = self._state(terms, rollouts)
        if not self._over and not any(rollout.unfinished for rollout in state.rollouts):
            return  # Others may be decoded in place of a group that is dropped.
        by_name, moved = {worker.incarnation: worker for worker in rollouts}, 0
        for move in self.policy(state, self._clock()):
            worker = by_name[move.rollout]
            helper = self._dormant(worker) if move.role is Role.HELP else None
            if helper is not None:
                self._moved_at, moved = self._clock(), moved + 1
                self._at_work[helper.incarnation] = asyncio.ensure_future(self._help(worker, helper))
        if moved and not self._over:
            self._attempt.tail_expected = (self._moved_at, decode_after(state, moved))

    def _state(self, terms: Terms, rollouts: list[RolloutClient]) -> ElasticState:
        held, mean = self._ledger.index.held, self._context.tail.mean
        return ElasticState(
            terms,
            tuple(Rollout(m.incarnation, 1, len(held.get(m.incarnation, ()))) for m in rollouts),
            decoded=self._context.tail.longest / mean,
            finished=self._groups.tokens(self._groups.waiting) / mean,
            begun=self._groups.tokens(self._groups.sent) / mean,
            partial=self._groups.tokens(self._ledger.index.open) / mean,
            helpers=sum(not task.done() for task in self._at_work.values()),
            owners_learn=self._beside,
            moved_at=self._moved_at,
        )

    def _dormant(self, worker: RolloutClient) -> TrainerClient | None:
        """A helper that sees a rollout's devices and has nothing to do; on GPUs, the one that computes on that GPU."""
        for helper in self._workers.helpers:
            devices = rank_devices(worker.devices)
            sees = set(devices) <= set(helper.instance.devices)
            elsewhere = helper.joined and is_gpu(devices[0]) and helper.devices != devices
            if (
                sees
                and not elsewhere
                and self._workers.may_help(helper)
                and helper.incarnation not in self._at_work
            ):
                return helper
        return None

    # --- one helper

    async def _help(self, worker: RolloutClient, helper: TrainerClient) -> None:
        """From a rollout's devices to a contribution; whatever goes wrong costs the helper's work and no more."""
        attempt, tail, lending = self._attempt, self._context.tail, self._context.lending
        began, own = self._clock(), Help(helper)
        name, ledger, lineage = helper.instance.instance, self._ledger, self._context.state.lineage
        try:
            await lending.lend_to_helper(worker, helper)
            await self._context.staffing.join_helper(helper)
            await helper.help(attempt.published)
            await helper.begin(ledger.step, ledger.attempt, lineage.head, lineage.last_number)
            tail.joined(self._clock() - began)
            attempt.timer.add("switch", (began, self._clock()), helper.devices)
            requests, answered = LearnRequests(maxsize=1), asyncio.Event()
            await gather_all(self._feed(own, requests, answered), self._exchange(own, requests, answered))
            if own.prompts:
                started = self._clock()
                own.contribution = await helper.take_contribution(ledger.step, ledger.attempt)
                tail.contributed(self._clock() - started)
                self._helps.append(own)
        except (*Fault, HelperLost) as fault:
            self._context.note(f"helper {name} gives nothing to step {ledger.step + 1}: {fault}")
            self._groups.give_back(own.prompts)
        finally:
            await lending.release_helper(helper)

    async def _feed(self, own: Help, requests: LearnRequests, answered: asyncio.Event) -> None:
        while True:
            news = self._groups.grown.next()
            if prompts := self._borrow():
                own.prompts += prompts
                async for request in learn_requests(self._attempt, prompts):
                    answered.clear()
                    await requests.put(request)
                    await answered.wait()
            elif self._over:
                await requests.put(None)
                return
            else:
                await asyncio.wait({news}, timeout=LOOK_S)

    def _borrow(self) -> list[int]:
        """Groups that a helper can learn in time, at most a micro-batch of them."""
        terms = self._attempt.terms(shared=not self._beside)
        if (self._over and not self._beside) or terms is None or not self._groups.waiting:
            return []
        rollouts = [worker for worker in self._workers.rollouts if self._workers.usable(worker)]
        if not rollouts and not self._over:
            return []
        left_s = self.until(self._state(terms, rollouts))
        chosen: list[int] = []
        tokens = 0
        for prompt in self._groups.waiting:
            more = tokens + self._groups.tokens([prompt])
            if self._context.tail.helper_s(more) <= left_s and (
                not chosen or more <= self._context.spec.trainer.micro_batch_tokens
            ):
                chosen.append(prompt)
                tokens = more
        self._groups.lend(chosen)
        return chosen

    async def _exchange(self, own: Help, requests: LearnRequests, answered: asyncio.Event) -> None:
        helper, ledger, limit = own.helper, self._ledger, self._context.spec.limits.step_timeout_s
        kept: set[int] = set()
        began = self._clock()
        async for response in helper.learn(ledger.step, ledger.attempt, requests, limit):
            if response.revoked:
                raise HelperLost("its lease was revoked")
            now, seconds = self._clock(), response.metrics.wall_time.ToNanoseconds() / 1e9
            self._attempt.timer.add("help", (max(began, now - seconds), now), helper.devices)
            tokens = self._groups.tokens(outcome.prompt_ordinal for outcome in response.outcomes)
            self._context.tail.helped(seconds, tokens)
            kept.update(learned(self._attempt, response))
            answered.set()
        if unanswered := [
            p for p in own.prompts if p not in kept and self._ledger.group(p)[0].state == SETTLED
        ]:
            raise HelperLost(f"groups {unanswered} were left unanswered")
        own.prompts = sorted(kept)

    # --- to the trainer group

    async def contribute(self) -> None:
        """Adds the helpers' gradients to the open attempt; the trainer group learns the groups of those it refuses."""
        leader, ledger = self._workers.leader, self._ledger
        for own in self._helps:
            name, given = own.helper.instance.instance, own.contribution
            assert given is not None
            if problem := self._differs(own, given):
                self._context.note(f"the contribution of {name} is not used: {problem}")
                continue
            try:
                with self._attempt.timer.stage("sync", leader.devices):
                    await leader.add_contribution(ledger.step, ledger.attempt, given, name)
            except CallRefused as refused:
                self._context.note(f"the contribution of {name} is not used: {refused.message}")
                continue
            self._attempt.accumulate(own.prompts, name)
        self._groups.lent.clear()

    def _differs(self, own: Help, given: trainer.Contribution) -> str:
        """Why a contribution is not of the groups that the ledger knows; empty when it is."""
        slots = [slot for prompt in own.prompts for slot in self._ledger.group(prompt)]
        if any(slot.state != SETTLED for slot in slots):
            return "one of its groups is no longer to be learned"
        found = {
            (group.prompt_ordinal, each.sample_index, each.attempt, each.body_digest)
            for group in given.groups
            for each in group.members
        }
        if found == set(identities(slots)):
            return ""
        return "it has other groups or trajectories than the ledger knows"
