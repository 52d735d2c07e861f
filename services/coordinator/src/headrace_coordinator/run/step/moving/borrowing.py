"""Devices that move at a step's begin: rollouts without any decode on the trainer group's, until it has work.

When is `planner.elastic`'s to say; before a run has measured its pace, until the first group is ready. A rollout that
is lost there costs the answers that it had not finished: the trainer group takes its devices back all the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headrace_planner.elastic.outlook import Terms
from headrace_planner.elastic.policy import ElasticState, Move, Role, Rollout, plan_elastic

from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.learning import Learning
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.waits import Notifier, WaitTimeout

LOOK_S = 0.25
"""How often the policy is asked while nothing settles."""
Seats = list[tuple[RolloutClient, tuple[str, ...]]]


class Borrowing:
    """The begin of one step attempt, while the trainer group has nothing to learn."""

    policy: Callable[[ElasticState, float], tuple[Move, ...]] = staticmethod(plan_elastic)

    def __init__(
        self,
        context: RunContext,
        timer: StepTimer,
        published: Published,
        learning: Learning,
        *,
        streams: bool,
    ) -> None:
        """`streams`: the trainer group learns groups as they settle, not all once the answers are complete."""
        self._context = context
        self._workers = context.workers
        self._index = context.state.ledger.index
        self._timer = timer
        self._published = published
        self._learning = learning
        self._streams = streams
        self.wanted = bool(context.spec.rollout.helpers) and not context.workers.in_turns
        self._clock = context.event_log.monotonic
        self._news = Notifier()
        self._over = False
        # Nothing has moved in this step: the policy has nothing to let rest for a while.
        self._moved_at = -math.inf
        self.joining: list[RolloutClient] = []
        """Rollouts that decode on the trainer group's devices, or are about to."""
        self.moved = False

    def news(self) -> None:
        """A group has settled."""
        self._news.beat()

    def close(self) -> None:
        """Nothing more is generated."""
        self._over = True
        self._news.beat()

    async def run(self, look: Callable[[], None]) -> None:
        """Until the trainer group has its devices. `look` is told when there are more rollouts to give work to."""
        if self.wanted:
            await self._context.staffing.staff_decoders()
            if seats := self._seats():
                await self._decode(seats, look)
        if self._context.lending.trainers_lack_devices:
            await self._return()

    async def _decode(self, seats: Seats, look: Callable[[], None]) -> None:
        self.joining = [member for member, _ in seats]
        self.moved, began = True, self._clock()
        try:
            await self._context.lending.lend_to_decoders(seats, self._published)
            self._moved_at = self._clock()
            self._context.tail.borrowed(self._moved_at - began)
            self._timer.add("switch", (began, self._moved_at), [d for _, devices in seats for d in devices])
            look()
            news = self._news.next()
            while not self._due():
                await asyncio.wait({news}, timeout=LOOK_S)
                news = self._news.next()
        except (InstanceDown, CallRefused, WaitTimeout) as fault:
            names = ", ".join(member.instance.instance for member in self.joining)
            self._context.note(f"{names} no longer decodes on the trainer group's devices: {fault}")
        finally:
            self.joining = []

    async def _return(self) -> None:
        began = self._clock()
        devices = [device for member in self._workers.trainers for device in member.devices]
        with self._timer.stage("switch", devices):
            await self._context.placement.hand_devices_to_trainers()
        self._context.tail.switched(self._clock() - began)

    # --- when

    def _seats(self) -> Seats:
        """Who decodes where from the step's begin on."""
        able = [member for member in self._workers.decoders if self._workers.may_help(member)]
        seats = self._context.lending.decoder_seats(able)
        if self._over or not self._index.waiting or not self._context.tail.begun:
            return []
        terms = self._terms()
        if terms is None:
            return seats
        idle = tuple(Rollout(member.incarnation, 1, 0, owner=True) for member, _ in seats)
        moves = self.policy(self._state(terms, self._usable(self._workers.rollouts), idle), self._clock())
        chosen = {move.rollout for move in moves if move.role is Role.DECODE}
        return [seat for seat in seats if seat[0].incarnation in chosen]

    def _due(self) -> bool:
        """Whether the trainer group is to take its devices now."""
        own, borrowed = self._usable(self._workers.rollouts), self._usable(self.joining)
        if self._over or not borrowed or not self._streams:
            return self._over or not borrowed
        terms = self._terms()
        if terms is None:
            return bool(self._learning.waiting)
        state = self._state(terms, [*own, *borrowed])
        return any(move.role is Role.OWN for move in self.policy(state, self._clock()))

    def _usable(self, members: list[RolloutClient]) -> list[RolloutClient]:
        return [member for member in members if self._workers.usable(member)]

    def _terms(self) -> Terms | None:
        owners = sum(len(member.devices) for member in self._workers.trainers)
        size = self._context.state.ledger.group_size
        return self._context.tail.terms(max(1, owners), size, shared=False)

    def _state(
        self, terms: Terms, members: list[RolloutClient], idle: tuple[Rollout, ...] = ()
    ) -> ElasticState:
        tail, held = self._context.tail, self._index.held
        share = -(-self._index.waiting // max(1, len(members)))
        borrowed = {member.incarnation for member in self.joining}
        rollouts = [
            Rollout(each, 1, len(held.get(each, ())) + share, owner=each in borrowed)
            for each in (member.incarnation for member in members)
        ]
        return ElasticState(
            terms,
            tuple(rollouts),
            decoded=tail.longest / tail.mean,
            finished=self._learning.tokens(self._learning.waiting) / tail.mean,
            partial=self._learning.tokens(self._index.open) / tail.mean,
            owners_learn=bool(idle),
            idle_owners=idle,
            moved_at=self._moved_at,
        )
