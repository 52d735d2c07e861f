"""What generation and learning share: trajectories, and groups from settled to learned or dropped.

Every event about a group of an open step is appended here. Calls no instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import Enum, auto

from headrace_planner.elastic.outlook import Terms

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.dispatch import plan_refill
from headrace_coordinator.domain.ledger.slot_index import DROPPED
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Trajectories
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.waits import Notifier

GROUPS_AT_ONCE = 64


class Learns(Enum):
    """When the trainer group learns a step's groups."""

    AFTER = auto()
    """Once all answers are made."""
    BESIDE = auto()
    """As they settle, while others are generated."""
    JOINING = auto()
    """As they settle, and what is left with the rollouts' devices too."""

    @classmethod
    def of(cls, context: RunContext) -> Learns:
        """Deterministic runs accumulate in ordinal order, whatever settles first.

        An algorithm that learns from its whole batch at the commit does its infer pass of each group as that comes.
        """
        placement, spec = context.workers.placement, context.spec
        if not placement.streams or spec.deterministic or spec.graph.whole_batch:
            return cls.AFTER
        return cls.JOINING if placement.joins else cls.BESIDE


class Takes(Enum):
    """What the trainer group takes of the settled groups that wait."""

    ALL = auto()
    SHARED = auto()
    """Helpers learn beside it: about half of what its ranks compute at once, so that the rest stays to be lent."""
    NONE = auto()
    """It is about to have more devices at once, and all of them learn the rest."""


class SettledGroups:
    """The queue of settled groups of the step that is learned: the trainer group takes from it, helpers borrow from it.

    Groups of steps ahead of it settle in the ledger; they wait here from `begin` of their step on.
    """

    def __init__(self, context: RunContext, trajectories: Trajectories, learns: Learns) -> None:
        self._context = context
        self._trajectories = trajectories
        self._ledger = context.state.ledger
        # With answers ahead it has more devices only once the rollouts have no credit left: it does not wait for them.
        joins_soon = learns is Learns.JOINING and not context.spec.algorithm.max_staleness
        self._waits_to_join = joins_soon and context.workers.placement.resident
        self.waiting: list[int] = []
        """Groups that nobody learns yet."""
        self.sent: set[int] = set()
        """Groups that the trainer group was given and has not answered yet."""
        self.lent: set[int] = set()
        """Groups that helpers learn, or have learned."""
        self.takes = Takes.ALL
        self.closed = asyncio.Event()
        """Set once no more groups of the step will settle."""
        self.grown = Notifier()
        """Tells that a group has settled, or that none will any more."""
        self.changed = Notifier()
        """Tells that the trainer group may find groups to take, or the queue's end."""

    def begin(self) -> None:
        """The next step is learned from now on."""
        self.lent.clear()
        self.closed.clear()
        self.collect()
        if self._ledger.complete:
            self.close()
        self.changed.beat()

    @property
    def backlog(self) -> bool:
        """Whether the trainer group has groups to work on."""
        return bool(self._unlearned())

    def _unlearned(self) -> list[int]:
        """Settled groups of the step that are not lent."""
        return [prompt for prompt in self._ledger.settled if prompt not in self.lent]

    @property
    def exhausted(self) -> bool:
        """Whether the trainer group has been given everything."""
        return self.closed.is_set() and not self.waiting

    def tokens(self, prompts: Iterable[int]) -> int:
        """Tokens of all trajectories of some groups."""
        return sum(slot.tokens for prompt in prompts for slot in self._ledger.group(prompt))

    def put(self, prompts: Iterable[int]) -> None:
        """Adds those of the groups that have settled which belong to the step."""
        mine = self._ledger.prompts
        self.waiting += [prompt for prompt in prompts if prompt in mine]
        self.changed.beat()
        self.grown.beat()

    def reach(self) -> None:
        """The step has taken groups in place of dropped ones: adds those that settled ahead of it."""
        known = {*self.waiting, *self.sent}
        self.put(prompt for prompt in self._unlearned() if prompt not in known)

    def take(self) -> list[int]:
        """Groups to send to the trainer group now; none while it has enough, or waits for more devices."""
        if not self.waiting or self.takes is Takes.NONE:
            return []
        count = min(GROUPS_AT_ONCE, len(self.waiting))
        if self.takes is Takes.SHARED:
            at_once = self._context.spec.trainer.micro_batch_tokens * self._context.workers.ranks
            if self.tokens(self.sent) >= at_once:
                return []
            fitting = (at for at in range(1, count) if self.tokens(self.waiting[: at + 1]) > at_once // 2)
            count = next(fitting, count)
        prompts, self.waiting = self.waiting[:count], self.waiting[count:]
        self.sent.update(prompts)
        return sorted(prompts) if self._context.spec.deterministic else prompts

    def lend(self, prompts: Iterable[int]) -> None:
        """A helper learns groups that wait."""
        self.lent.update(prompts)
        self.waiting = [prompt for prompt in self.waiting if prompt not in self.lent]
        self._trajectories.release(())  # Who waits for the trainer group to take their messages looks again.

    def give_back(self, prompts: Iterable[int]) -> None:
        """A helper failed with groups that were lent: those that are still settled wait again."""
        back = [prompt for prompt in prompts if prompt in self.lent]
        self.lent.difference_update(back)
        self.waiting += [prompt for prompt in back if prompt in self._ledger.index.settled]
        self.changed.beat()

    def collect(self) -> list[int]:
        """Lets every settled group wait that is not lent, those that were sent included; returns them."""
        self.sent.clear()
        self.waiting = self._unlearned()
        return self.waiting

    def unanswered(self) -> list[int]:
        """Groups that the trainer group was given and has neither learned nor refused."""
        waiting = set(self.waiting)
        return [prompt for prompt in self._unlearned() if prompt not in waiting]

    def close(self) -> None:
        """No more groups of the step will settle."""
        if self._waits_to_join:
            self.takes = Takes.NONE
        self.changed.beat()
        self.closed.set()
        self.grown.beat()

    def go_on(self) -> None:
        """The trainer group has the devices that it waits for."""
        if self.takes is Takes.NONE:
            self.takes = Takes.ALL
        self.changed.beat()


class AttemptState:
    """One attempt at a step; with answers of older versions, the attempts at steps that follow each other."""

    def __init__(
        self,
        context: RunContext,
        timer: StepTimer,
        published: Published,
        trajectories: Trajectories,
    ) -> None:
        """`published`: the version that generates."""
        self.context = context
        self.timer = timer
        self.ahead = context.spec.algorithm.max_staleness
        """Steps behind the one that is learned whose answers are made."""
        self.published = published
        self.trajectories = trajectories
        self.learns = Learns.of(context)
        self.ledger = context.state.ledger
        self.groups = SettledGroups(context, trajectories, self.learns)
        self.work = Notifier()
        """Tells that there may be samples to hand out, or another rollout for them, or that no group is open."""
        self.joining: list[RolloutClient] = []
        """Rollouts that decode on the trainer group's devices, or are about to."""
        self.tail_expected = (0.0, 0.0)
        """When the last device went to a helper, and in how many seconds all is decoded by the pace without helpers."""
        self.refused = 0
        """Trajectories and scores for slots that wait for something else."""

    @property
    def streams(self) -> bool:
        """Whether groups are learned while others are generated."""
        return self.learns is not Learns.AFTER

    @property
    def generates(self) -> bool:
        """Whether there are, or will be, slots to fill."""
        return self.ahead > 0 or bool(self.ledger.index.open)

    def open_ahead(self) -> None:
        """Opens the slots of the next steps, as far as `max_staleness` and the next boundary allow."""
        if not self.ahead:
            return
        end = self.ledger.step + min(self.ahead + 1, self.context.steps_to_boundary())
        for step in range(self.ledger.step + len(self.ledger.steps), end):
            self.context.event_log.post(ev.SlotsOpened(run=self.context.run_id, step=step))

    @property
    def draining(self) -> bool:
        """Whether the trainer group is about to take messages that are kept."""
        return self.streams and not self.joining and self.groups.backlog

    def terms(self, *, shared: bool) -> Terms | None:
        """What the run has measured of its pace; None before that is enough.

        `shared`: the trainer group learns once answers are complete, and not while others decode.
        """
        owners = max(1, len(self.context.workers.learning_devices))
        return self.context.tail.terms(owners, self.ledger.group_size, shared=shared)

    def settle(self, groups: list[tuple[int, list[float]]]) -> None:
        """Every trajectory of these groups is finished, with its final reward."""
        if groups:
            self.context.event_log.post(ev.GroupsSettled(run=self.context.run_id, groups=groups))
            self.groups.put([prompt for prompt, _ in groups])
            self._group_closed()

    def accumulate(self, prompts: list[int], helper: str = "") -> None:
        """The trainer group has these groups' gradients, which came from a `helper` where one is named."""
        self._release(prompts)
        if prompts:
            self.context.event_log.post(
                ev.GroupsAccumulated(
                    run=self.context.run_id,
                    step=self.ledger.step,
                    attempt=self.ledger.attempt,
                    prompts=prompts,
                    helper=helper,
                )
            )

    def drop(self, prompt: int, reason: str, detail: str, reward: float = 0.0) -> None:
        """The group will not be trained; nothing for one that is dropped already."""
        if self.ledger.group(prompt)[0].state == DROPPED:
            return
        was_open = prompt in self.ledger.index.open
        self.context.event_log.post(
            ev.GroupDropped(
                run=self.context.run_id,
                step=self.ledger.step_of(prompt),
                prompt=prompt,
                reason=reason,
                detail=detail,
                reward=reward,
            )
        )
        self._release([prompt])
        if was_open:
            self._group_closed()

    def refill(self) -> None:
        """Opens the next groups in place of those that were dropped, if the algorithm asks for it."""
        context, ledger = self.context, self.ledger
        limit = context.workers.leader.max_refill * ledger.prompts_per_step
        whole = context.spec.deterministic
        while refills := plan_refill(ledger, context.run_id, limit, whole=whole):
            context.event_log.post(*refills)
            if len(ledger.steps) > 1:
                self.groups.reach()

    def _group_closed(self) -> None:
        """Closes the queue with the step's last open group at once: streams of work take longer to end."""
        self.refill()
        if self.ledger.complete:
            self.complete()
        self.work.beat()

    def complete(self) -> None:
        """Nothing more is generated for the step."""
        moved_at, expected_s = self.tail_expected
        if expected_s and not self.groups.closed.is_set():
            self.context.tail.tailed(self.context.event_log.monotonic() - moved_at, expected_s)
        self.groups.close()

    def _release(self, prompts: list[int]) -> None:
        size = self.ledger.group_size
        self.trajectories.release((prompt, sample) for prompt in prompts for sample in range(size))
