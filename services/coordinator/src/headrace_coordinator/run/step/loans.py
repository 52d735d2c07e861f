"""Loans: devices that change hands inside a step, with notice, and go back before it ends.

- `Borrowing`: rollouts without devices decode on the trainer group's, until that has work.
- `Helping`: in the tail rollouts give theirs up, and helpers learn whole groups on them.
- `Sharing`: another run that shares the devices has a turn.

`planner.elastic` says when; before a run has measured its pace, the first settled group ends a loan to decoders. A
loan that fails costs the borrower's work alone: other rollouts make its samples, and a helper's groups stay SETTLED
until the trainer group has its gradient.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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

from headrace_coordinator.domain.devices.leases import HELP, is_gpu
from headrace_coordinator.domain.devices.sharing import releases_to
from headrace_coordinator.domain.ledger.slot_index import SETTLED
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.handover import Seats, rank_devices
from headrace_coordinator.run.step.learning import contribution_problem, learn_requests, learned
from headrace_coordinator.run.step.state import AttemptState, Takes
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import LearnRequests, TrainerClient
from headrace_coordinator.waits import WaitTimeout

LOOK_S = 0.25
"""How often the policy is asked: it takes some milliseconds, and a large step settles hundreds of groups a second."""
TURN_LOOK_S = 1.0
"""No event tells that a turn on shared devices is over: this is how often it is looked at."""
Fault = (InstanceDown, CallRefused, WaitTimeout)


class Loan:
    """What the loans of one step attempt have in common."""

    policy: Callable[[ElasticState, float], tuple[Move, ...]] = staticmethod(plan_elastic)

    def __init__(self, attempt: AttemptState) -> None:
        self._attempt = attempt
        self._groups = attempt.groups
        self._context = attempt.context
        self._devices = attempt.context.devices
        self._workers = attempt.context.workers
        self._ledger = attempt.ledger
        self._clock = attempt.context.event_log.monotonic
        self._moved_at = (
            -math.inf
        )  # Nothing has moved in this step: the policy has nothing to let rest for a while.

    @property
    def _over(self) -> bool:
        """Whether nothing more is generated."""
        return self._groups.closed.is_set()

    def _usable(self, rollouts: Iterable[RolloutClient]) -> list[RolloutClient]:
        return [worker for worker in rollouts if self._workers.usable(worker)]

    def _moves(self, role: Role, state: ElasticState) -> set[str]:
        """Rollouts whose devices are to take a role now."""
        return {move.rollout for move in self.policy(state, self._clock()) if move.role is role}

    def _state(self, terms: Terms, workers: Sequence[RolloutClient], **more: Any) -> ElasticState:
        """The step in progress on rollouts, each with its part of what nobody has begun."""
        tail, groups, index = self._context.tail, self._groups, self._ledger.index
        share = -(-index.waiting // max(1, len(workers)))
        borrowed = {worker.incarnation for worker in self._attempt.joining}
        rollouts = (
            Rollout(who, 1, len(index.held.get(who, ())) + share, owner=who in borrowed)
            for who in (worker.incarnation for worker in workers)
        )
        return ElasticState(
            terms,
            tuple(rollouts),
            decoded=tail.longest / tail.mean,
            finished=groups.tokens(groups.waiting) / tail.mean,
            partial=groups.tokens(index.open) / tail.mean,
            moved_at=self._moved_at,
            **more,
        )


class Borrowing(Loan):
    """The begin of one step attempt, while the trainer group has nothing to learn."""

    def __init__(self, attempt: AttemptState) -> None:
        super().__init__(attempt)
        self.wanted = bool(self._context.spec.rollout.helpers) and not self._workers.placement.turns
        self.moved = False

    async def run(self) -> None:
        """Works until the trainer group has its devices."""
        if self.wanted:
            await self._context.staffing.staff_decoders()
            if seats := self._seats():
                await self._decode(seats)
        if self._devices.trainers_lack_devices:
            began = self._clock()
            with self._attempt.timer.stage("switch", self._workers.learning_devices):
                await self._devices.hand_devices_to_trainers()
            self._context.tail.switched.add(self._clock() - began)

    async def _decode(self, seats: Seats[RolloutClient]) -> None:
        attempt, borrowers = self._attempt, [worker for worker, _ in seats]
        attempt.joining = borrowers
        self.moved, began = True, self._clock()
        try:
            await self._devices.lend_trainers(seats, attempt.published)
            self._moved_at = self._clock()
            self._context.tail.borrowed.add(self._moved_at - began)
            attempt.timer.add("switch", (began, self._moved_at), [d for _, found in seats for d in found])
            attempt.work.beat()
            while not self._due():
                await asyncio.wait({self._groups.grown.next()}, timeout=LOOK_S)
        except Fault as fault:
            names = ", ".join(worker.instance.instance for worker in borrowers)
            self._context.note(f"{names} no longer decodes on the trainer group's devices: {fault}")
        finally:
            attempt.joining = []

    def _seats(self) -> Seats[RolloutClient]:
        """Which rollouts decode on which devices from the step's begin on."""
        able = [worker for worker in self._workers.decoders if self._workers.may_help(worker)]
        seats = self._devices.decoder_seats(able)
        if self._over or not self._ledger.index.waiting or not self._context.tail.begun:
            return []
        terms = self._attempt.terms(shared=False)
        if terms is None:
            return seats
        idle = tuple(Rollout(worker.incarnation, 1, 0, owner=True) for worker, _ in seats)
        own = self._usable(self._workers.rollouts)
        state = self._state(terms, own, owners_learn=bool(idle), idle_owners=idle)
        chosen = self._moves(Role.DECODE, state)
        return [seat for seat in seats if seat[0].incarnation in chosen]

    def _due(self) -> bool:
        """Whether the trainer group is to take its devices now."""
        borrowed = self._usable(self._attempt.joining)
        if self._over or not borrowed or not self._attempt.streams:
            return self._over or not borrowed
        terms = self._attempt.terms(shared=False)
        if terms is None:
            return bool(self._groups.waiting)
        decoding = [*self._usable(self._workers.rollouts), *borrowed]
        return bool(self._moves(Role.OWN, self._state(terms, decoding)))


class Sharing(Loan):
    """Gives devices to another run that shares them, while this run generates: when they idle, or its turn is over.

    The lease manager knows who waits for them, and `domain.devices.sharing` decides when this run gives way. Between
    two stages a run that shares holds no device anyway.
    """

    def __init__(self, attempt: AttemptState) -> None:
        super().__init__(attempt)
        self._turn: tuple[int, ...] = ()
        self._began, self._finished = self._clock(), 0
        # Episodes and conversations would begin anew elsewhere, and a deterministic run decodes in a fixed order: these
        # release devices only where nothing is in hand.
        self._in_parts = not self._context.spec.deterministic and self._context.modality.resumable

    async def run(self) -> None:
        """Works until nothing more is generated: releases the rollouts' devices whenever another run is due."""
        while self._workers.placement.section.share and not self._over:
            try:
                await self._context.event_log.wait_until(
                    lambda: self._over or self._due(), TURN_LOOK_S, "a run that shares the devices"
                )
            except WaitTimeout:
                continue
            if not self._over:
                await self._devices.lend(self._workers.rollouts)

    def _due(self) -> bool:
        held = [worker for worker in self._workers.rollouts if worker.lease_epoch]
        if not held:
            return False
        index, now = self._ledger.index, self._clock()
        done = len(self._ledger.slots) - index.waiting - index.assigned  # These need no device any more.
        if (epochs := tuple(worker.lease_epoch for worker in held)) != self._turn:
            self._turn, self._began, self._finished = epochs, now, done
        devices = [device for worker in held for device in worker.devices]
        waiter = self._context.fleet.lease_manager.next_for(devices, self._context.run_id)
        if waiter is None:
            return False
        idle = not index.waiting and not index.assigned
        made = self._in_parts and done > self._finished
        return releases_to(waiter, self._context.state.priority, now - self._began, made=made, idle=idle)


@dataclass
class Help:
    """One helper at work: the groups that it was given, and what it gives for them."""

    helper: TrainerClient
    prompts: list[int] = field(default_factory=list)
    contribution: trainer.Contribution | None = None


class Helping(Loan):
    """One step attempt's helpers."""

    until: Callable[[ElasticState], float] = staticmethod(helpers_until)

    def __init__(self, attempt: AttemptState, *, wanted: bool) -> None:
        super().__init__(attempt)
        self.wanted = wanted and bool(self._context.spec.trainer.helpers)
        self._beside = attempt.streams
        """Whether the trainer group learns meanwhile."""
        if self.wanted and self._beside:
            self._groups.takes = Takes.SHARED
        self._moved_at = self._clock()
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._helps: list[Help] = []

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

    def _consider(self) -> None:
        """Asks the policy, and begins the moves that it wants and that a dormant helper can take."""
        terms = self._attempt.terms(shared=not self._beside)
        rollouts = self._usable(self._workers.rollouts)
        busy = self._ledger.index.waiting or self._devices.trainers_lack_devices
        if terms is None or busy or not rollouts:
            return  # Every device is needed for samples that nobody has begun.
        state = self._tail_state(terms, rollouts)
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

    def _tail_state(self, terms: Terms, rollouts: Sequence[RolloutClient]) -> ElasticState:
        return self._state(
            terms,
            rollouts,
            begun=self._groups.tokens(self._groups.sent) / self._context.tail.mean,
            helpers=sum(not task.done() for task in self._at_work.values()),
            owners_learn=self._beside,
        )

    def _dormant(self, worker: RolloutClient) -> TrainerClient | None:
        """A helper that sees a rollout's devices and has nothing to do; on GPUs, the one that computes on that GPU."""
        devices = rank_devices(worker.devices)
        for helper in self._workers.helpers:
            elsewhere = helper.joined and is_gpu(devices[0]) and helper.devices != devices
            idle = self._workers.may_help(helper) and helper.incarnation not in self._at_work
            if idle and not elsewhere and {*devices} <= {*helper.instance.devices}:
                return helper
        return None

    # --- one helper

    async def _help(self, worker: RolloutClient, helper: TrainerClient) -> None:
        """From a rollout's devices to a contribution; whatever goes wrong costs the helper's work and no more."""
        attempt, ledger, lineage = self._attempt, self._ledger, self._context.state.lineage
        began, own, tail = self._clock(), Help(helper), self._context.tail
        try:
            await self._devices.lend([worker], [(helper, rank_devices(worker.devices))], HELP)
            await self._context.staffing.join_helper(helper)
            await helper.help(attempt.published)
            await helper.begin(ledger.step, ledger.attempt, lineage.head, lineage.last_number)
            tail.joined.add(self._clock() - began)
            attempt.timer.add("switch", (began, self._clock()), helper.devices)
            requests, answered = LearnRequests(maxsize=1), asyncio.Event()
            await gather_all(self._feed(own, requests, answered), self._exchange(own, requests, answered))
            if own.prompts:
                started = self._clock()
                own.contribution = await helper.take_contribution(ledger.step, ledger.attempt)
                tail.contributed.add(self._clock() - started)
                self._helps.append(own)
        except Fault as fault:
            name = helper.instance.instance
            self._context.note(f"helper {name} gives nothing to step {ledger.step + 1}: {fault}")
            self._groups.give_back(own.prompts)
        finally:
            await self._devices.give_back(helper)

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
        rollouts = self._usable(self._workers.rollouts)
        if not rollouts and not self._over:
            return []
        left_s, most = (
            self.until(self._tail_state(terms, rollouts)),
            self._context.spec.trainer.micro_batch_tokens,
        )
        chosen: list[int] = []
        tokens = 0
        for prompt in self._groups.waiting:
            more = tokens + self._groups.tokens([prompt])
            fits = not chosen or more <= most
            if fits and self._context.tail.helper_s(more) <= left_s:
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
                raise CallRefused(helper.incarnation, "LEASE_REVOKED", "its lease was revoked")
            now, seconds = self._clock(), response.metrics.wall_time.ToNanoseconds() / 1e9
            self._attempt.timer.add("help", (max(began, now - seconds), now), helper.devices)
            tokens = self._groups.tokens(outcome.prompt_ordinal for outcome in response.outcomes)
            self._context.tail.helped(seconds, tokens)
            kept.update(learned(self._attempt, response))
            answered.set()
        left = [p for p in own.prompts if p not in kept and self._ledger.group(p)[0].state == SETTLED]
        if left:
            raise CallRefused(helper.incarnation, "INTERNAL", f"groups {left} were left unanswered")
        own.prompts = sorted(kept)

    # --- to the trainer group

    async def contribute(self) -> None:
        """Adds the helpers' gradients to the open attempt; the trainer group learns the groups of those it refuses."""
        leader, ledger = self._workers.leader, self._ledger
        for own in self._helps:
            name, given = own.helper.instance.instance, own.contribution
            assert given is not None
            problem = contribution_problem(self._ledger, own.prompts, given)
            if not problem:
                try:
                    with self._attempt.timer.stage("sync", leader.devices):
                        await leader.add_contribution(ledger.step, ledger.attempt, given, name)
                except CallRefused as refused:
                    problem = refused.message
            if problem:
                self._context.note(f"the contribution of {name} is not used: {problem}")
            else:
                self._attempt.accumulate(own.prompts, name)
        self._groups.lent.clear()
