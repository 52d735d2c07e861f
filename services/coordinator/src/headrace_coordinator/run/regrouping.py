"""Between two steps: a run's trainer group gets another number of ranks, with the state that it has.

The leader keeps weights and optimizer in host memory while it leaves one group and joins the next one; nothing is read
from disk, and no version is lost or made. Which instances join is decided by `domain.devices.scheduling`.
"""

from __future__ import annotations

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.placement import first_mode
from headrace_coordinator.domain.devices.scheduling import plan_admission, plan_regroup
from headrace_coordinator.domain.run_states import QUEUED, RECOVERING, RUNNING
from headrace_coordinator.domain.runs import plan_move
from headrace_coordinator.fleet.instance_client import USER_ERRORS, CallRefused
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.converge import converge, form_trainer_group
from headrace_coordinator.run.leaving import close
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.opening import Unstaffed

UNFIT = frozenset({*USER_ERRORS, "MEMORY_SHORT"})
"""Why trainers refuse a state in a group of this size, for good: the run goes back to the size that it had."""

REFUSED_S = 600.0
"""After so long a run whose trainers refused a larger group tries one again."""


class Regrouping:
    """The changes of one run's trainer group."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._told = ""
        self._no_growth_until = 0.0

    def due(self) -> ev.TrainersChanged | None:
        """The change to make before the next step; notes once what a wanted change waits for."""
        wanted = self._context.state.wanted_ranks
        if not wanted:
            return self._release_for_waiting() or self._growth()
        found = self._plan(wanted, f"trainer.ranks: {wanted} is wanted")
        if isinstance(found, str):
            self._note_once(
                f"trainer.ranks: {wanted} waits for {found}; goes on with {self._context.state.ranks}"
            )
            return None
        return found

    def _release_for_waiting(self) -> ev.TrainersChanged | None:
        """Where the run has more trainers than its least: a group without those that let a waiting run start."""
        log, run = self._context.event_log, self._context.state
        surplus = any(ranks < run.ranks for ranks in run.sizes)
        if not surplus or not self._anybody_waits() or log.monotonic() < self._no_growth_until:
            return None
        now = log.now()
        gift = plan_admission(log.state, now).gifts.get(run.id)
        if gift is None:
            return None
        found = plan_regroup(log.state, run.id, gift.ranks, gift.reason, now, gift.given_to)
        return None if isinstance(found, str) else found

    def _anybody_waits(self) -> bool:
        return any(other.state == QUEUED for other in self._context.event_log.state.active_runs())

    def _growth(self) -> ev.TrainersChanged | None:
        """Where the run may grow: the largest group that free trainers make, unless another run waits for them."""
        log, run = self._context.event_log, self._context.state
        larger = [ranks for ranks in run.sizes if ranks > run.ranks]
        gave = bool(run.gave_at) and 0.0 <= log.now() - run.gave_at < run.quantum_s
        if not larger or gave or self._anybody_waits() or log.monotonic() < self._no_growth_until:
            return None
        plans = (self._plan(ranks, "a trainer is free") for ranks in reversed(larger))
        return next((plan for plan in plans if not isinstance(plan, str)), None)

    async def shrink(self) -> bool:
        """Makes the group smaller after trainers were lost; False where it may not be, or none was lost."""
        log, run = self._context.event_log, self._context.state
        held = run.grant.trainers if run.grant else []
        left = [who for who in held if (i := log.state.instances.get(who)) and not i.draining]
        smaller = [ranks for ranks in run.sizes if ranks <= len(left) and ranks < run.ranks]
        if not smaller or len(left) >= run.ranks or not isinstance(self._plan(run.ranks, ""), str):
            return False
        lost = run.ranks - len(left)
        change = self._plan(
            smaller[-1], f"{lost} of {run.ranks} trainers {'is' if lost == 1 else 'are'} lost"
        )
        if isinstance(change, str):
            return False
        if run.state == RUNNING:
            log.post(*plan_move(run, RECOVERING, change.reason))
        await log.commit(change, *self._replan(change))
        self._context.workers.adopt_leases()
        return True

    async def change(self) -> Published:
        """Makes the change that is due, and has the head published by the new group.

        Where the trainers refuse the state in a group of that size, the group becomes again what it was.
        """
        context, before = self._context, self._context.state.ranks
        context.regrouping = True
        await context.devices.hand_devices_to_trainers()
        await context.workers.leader.leave(context.state.trainer_group_generation)
        change = self.due()  # What was free may be lost by now.
        if change is None:
            return await self._form_group()
        try:
            return await self._follow(change)
        except CallRefused as refused:
            if refused.reason not in UNFIT:
                raise
            self._no_growth_until = context.event_log.monotonic() + REFUSED_S
            why = f"{change.ranks} ranks are refused: {refused.message}"
            back = self._plan(before, why)
            if not isinstance(back, str):
                return await self._follow(back)
            if not change.given_to:
                raise
            # The run that the trainers were released for has them by now.
            context.event_log.post(
                ev.RanksWanted(run=context.run_id, ranks=before, author="system", reason=why)
            )
            raise Unstaffed(f"{back}: {why}") from refused

    async def _follow(self, change: ev.TrainersChanged) -> Published:
        context = self._context
        await context.event_log.commit(change, *self._replan(change))
        trainers = context.workers.trainers
        leaving = [trainer for trainer in trainers if trainer.incarnation not in change.trainers]
        await close(context, leaving)
        await context.fleet.lease_manager.release_of(context.run_id, [each.incarnation for each in leaving])
        return await self._form_group()

    def _replan(self, change: ev.TrainersChanged) -> list[ev.PlanAdopted]:
        """What `auto` measured is of another group: the run measures again, from how it began."""
        context = self._context
        if context.spec.placement.mode != "auto" or context.state.plan is None:
            return []
        plan = ev.PlanAdopted(
            at=change.at,
            run=change.run,
            from_step=change.step,
            mode=first_mode(ahead=context.spec.algorithm.max_staleness > 0),
            reason=f"the trainer group has {change.ranks} rank{'s' if change.ranks > 1 else ''} now",
        )
        return [plan]

    async def _form_group(self) -> Published:
        context = self._context
        await context.staffing.staff_trainers()
        await context.devices.hand_devices_to_trainers()
        await form_trainer_group(context)
        published = await converge(context)
        context.regrouping = False
        return published

    def _plan(self, ranks: int, reason: str) -> ev.TrainersChanged | str:
        log = self._context.event_log
        return plan_regroup(log.state, self._context.run_id, ranks, reason, log.now())

    def _note_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._context.note(text)
