"""Devices that move before a step is learned: rollouts without any decode on the trainer group's, until that has work;
and another run that shares them has a turn.

`planner.elastic` says when rollouts borrow; before a run has measured its pace, the first settled group does. A rollout
that is lost there costs the answers that it had not finished: the trainer group takes its devices back all the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from headrace_planner.elastic.outlook import Terms
from headrace_planner.elastic.policy import ElasticState, Move, Role, Rollout, plan_elastic

from headrace_coordinator.domain.devices.sharing import releases_to
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.devices.placement import Seats
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.waits import WaitTimeout

LOOK_S = 0.25
"""How often the policy is asked while nothing settles."""
TURN_LOOK_S = 1.0
"""No event tells that a turn on shared devices is over: this is how often it is looked at."""


class Borrowing:
    """The begin of one step attempt, while the trainer group has nothing to learn."""

    policy: Callable[[ElasticState, float], tuple[Move, ...]] = staticmethod(plan_elastic)

    def __init__(self, attempt: AttemptState) -> None:
        self._attempt = attempt
        self._groups = attempt.groups
        self._context = attempt.context
        self._workers = attempt.context.workers
        self._clock = attempt.context.event_log.monotonic
        self.wanted = bool(self._context.spec.rollout.helpers) and not self._workers.in_turns
        # Nothing has moved in this step: the policy has nothing to let rest for a while.
        self._moved_at = -math.inf
        self.moved = False

    @property
    def _over(self) -> bool:
        """Nothing more is generated."""
        return self._groups.closed.is_set()

    async def run(self) -> None:
        """Works until the trainer group has its devices."""
        if self.wanted:
            await self._context.staffing.staff_decoders()
            if seats := self._seats():
                await self._decode(seats)
        if self._context.lending.trainers_lack_devices:
            await self._return()

    async def _decode(self, seats: Seats) -> None:
        attempt, borrowers = self._attempt, [worker for worker, _ in seats]
        attempt.joining = borrowers
        self.moved, began = True, self._clock()
        try:
            await self._context.lending.lend_to_decoders(seats, attempt.published)
            self._moved_at = self._clock()
            self._context.tail.borrowed(self._moved_at - began)
            devices = [device for _, found in seats for device in found]
            attempt.timer.add("switch", (began, self._moved_at), devices)
            attempt.work.beat()
            news = self._groups.grown.next()
            while not self._due():
                await asyncio.wait({news}, timeout=LOOK_S)
                news = self._groups.grown.next()
        except (InstanceDown, CallRefused, WaitTimeout) as fault:
            names = ", ".join(worker.instance.instance for worker in borrowers)
            self._context.note(f"{names} no longer decodes on the trainer group's devices: {fault}")
        finally:
            attempt.joining = []

    async def _return(self) -> None:
        began = self._clock()
        devices = [device for worker in self._workers.trainers for device in worker.devices]
        with self._attempt.timer.stage("switch", devices):
            await self._context.placement.hand_devices_to_trainers()
        self._context.tail.switched(self._clock() - began)

    # --- when

    def _seats(self) -> Seats:
        """Which rollouts decode on which devices from the step's begin on."""
        able = [worker for worker in self._workers.decoders if self._workers.may_help(worker)]
        seats = self._context.lending.decoder_seats(able)
        if self._over or not self._attempt.ledger.index.waiting or not self._context.tail.begun:
            return []
        terms = self._attempt.terms(shared=False)
        if terms is None:
            return seats
        idle = tuple(Rollout(worker.incarnation, 1, 0, owner=True) for worker, _ in seats)
        moves = self.policy(self._state(terms, self._usable(self._workers.rollouts), idle), self._clock())
        chosen = {move.rollout for move in moves if move.role is Role.DECODE}
        return [seat for seat in seats if seat[0].incarnation in chosen]

    def _due(self) -> bool:
        """Whether the trainer group is to take its devices now."""
        own, borrowed = self._usable(self._workers.rollouts), self._usable(self._attempt.joining)
        if self._over or not borrowed or not self._attempt.streams:
            return self._over or not borrowed
        terms = self._attempt.terms(shared=False)
        if terms is None:
            return bool(self._groups.waiting)
        state = self._state(terms, [*own, *borrowed])
        return any(move.role is Role.OWN for move in self.policy(state, self._clock()))

    def _usable(self, rollouts: Sequence[RolloutClient]) -> list[RolloutClient]:
        return [worker for worker in rollouts if self._workers.usable(worker)]

    def _state(
        self, terms: Terms, workers: Sequence[RolloutClient], idle: tuple[Rollout, ...] = ()
    ) -> ElasticState:
        tail, index = self._context.tail, self._attempt.ledger.index
        share = -(-index.waiting // max(1, len(workers)))
        borrowed = {worker.incarnation for worker in self._attempt.joining}
        rollouts = [
            Rollout(each, 1, len(index.held.get(each, ())) + share, owner=each in borrowed)
            for each in (worker.incarnation for worker in workers)
        ]
        return ElasticState(
            terms,
            tuple(rollouts),
            decoded=tail.longest / tail.mean,
            finished=self._groups.tokens(self._groups.waiting) / tail.mean,
            partial=self._groups.tokens(index.open) / tail.mean,
            owners_learn=bool(idle),
            idle_owners=idle,
            moved_at=self._moved_at,
        )


class Sharing:
    """Gives devices to another run that shares them, while this run generates: when they idle, or its turn is over.

    The lease manager knows who waits for them, and `domain.devices.sharing` decides when this run gives way. Between
    two stages a run that shares holds no device anyway.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._index = context.state.ledger.index
        self._clock = context.event_log.monotonic
        self._over = False
        self._began = self._clock()
        self._turn: tuple[int, ...] = ()
        self._finished = 0
        spec = context.spec
        self._wanted = spec.placement.share
        # Episodes and conversations would begin anew elsewhere, and a deterministic run decodes in a fixed order: these
        # release devices only where nothing is in hand.
        self._in_parts = not spec.deterministic and context.modality.resumable

    def close(self) -> None:
        """Generation is over."""
        self._over = True
        self._context.event_log.wake()

    async def run(self) -> None:
        """Works until it is closed: releases the rollouts' devices whenever another run is due."""
        while self._wanted and not self._over:
            try:
                await self._context.event_log.wait_until(
                    lambda: self._over or self._due(), TURN_LOOK_S, "a run that shares the devices"
                )
            except WaitTimeout:
                continue
            if not self._over:
                await self._context.lending.release_to_other_run()

    def _due(self) -> bool:
        held = [worker for worker in self._context.workers.rollouts if worker.lease_epoch]
        if not held:
            return False
        self._note_turn(tuple(worker.lease_epoch for worker in held))
        devices = [device for worker in held for device in worker.devices]
        waiter = self._context.fleet.lease_manager.next_for(devices, self._context.run_id)
        if waiter is None:
            return False
        idle = not self._index.waiting and not self._index.assigned
        made = self._in_parts and self._done() > self._finished
        held_s = self._clock() - self._began
        return releases_to(waiter, self._context.state.priority, held_s, made=made, idle=idle)

    def _note_turn(self, epochs: tuple[int, ...]) -> None:
        if epochs != self._turn:
            self._turn, self._began, self._finished = epochs, self._clock(), self._done()

    def _done(self) -> int:
        """How many slots of the step need no device any more."""
        return len(self._context.state.ledger.slots) - self._index.waiting - self._index.assigned
