"""A rollout's share of the open step's work, as messages of its Generate stream.

Who has which sample is in the ledger alone. Kept here: the order in which groups start, and prefixes to go on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.domain.ledger.dispatch import (
    DispatchOrder,
    GroupWork,
    plan_assign,
    plan_dispatch,
    plan_return,
)
from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.modality import Sampling
from headrace_coordinator.run.workers.clients import Published, SlotKey
from headrace_coordinator.run.workers.rollout_client import Opening, RolloutClient
from headrace_coordinator.waits import Notifier


class Dispatch:
    """Gives the waiting samples of one step attempt to rollouts."""

    def __init__(
        self,
        context: RunContext,
        published: Published,
        news: Notifier,
        joining: Callable[[], Sequence[RolloutClient]],
    ) -> None:
        """`joining`: rollouts that have a share of the work beside the run's own, though they may not be awake yet."""
        self._context = context
        self._published = published
        self._ledger = context.state.ledger
        self._news = news
        self._joining = joining
        self._prefixes: dict[SlotKey, common.ResumeState] = {}
        expected = None if context.spec.deterministic else context.expected_tokens
        self._order = DispatchOrder(self._ledger.index.fresh, expected)

    def opening(self, member: RolloutClient) -> Opening:
        """The first message of a member's stream; its header is left to the client."""
        spec = self._context.spec
        sampling = Sampling(
            policy_number=self._published.version.number,
            seed=spec.seed,
            distribution=self._context.distribution(spec.sampling.temperature),
            max_new_tokens=spec.sampling.max_new_tokens,
            stop=spec.sampling.stop,
            chunk_tokens=spec.rollout.chunk_tokens,
            deterministic=spec.deterministic,
        )
        return self._context.modality.opening(member, sampling)

    async def assignments(
        self, member: RolloutClient, over: Callable[[], bool]
    ) -> AsyncIterator[rollout.AssignGroups]:
        """Work for one rollout as it gets room, until it is `over` or no group is open."""
        index, workers = self._ledger.index, self._context.workers
        while index.open and not over():
            news = self._news.next()
            self._order.reach(self._ledger.prompts)
            live = sum(workers.usable(each) for each in workers.rollouts) + len(self._joining())
            if work := plan_dispatch(index, self._order, member.incarnation, member.max_concurrency, live):
                yield await self._assign(member, work)
            else:
                await asyncio.shield(news)

    async def _assign(self, member: RolloutClient, work: list[GroupWork]) -> rollout.AssignGroups:
        slots = [self._slot(prompt, sample) for prompt, samples in work for sample in samples]
        event_log = self._context.event_log
        assigned = plan_assign(self._ledger, self._context.run_id, slots, member.incarnation, event_log.now())
        await event_log.commit(assigned)
        attempts = iter(attempt for _, _, attempt, _ in assigned.slots)
        is_baseline = self._context.workers.leader.is_baseline
        message = rollout.AssignGroups()
        for prompt, samples in work:
            group = message.groups.add(prompt_ordinal=prompt, prompt=self._context.prompt(prompt))
            for sample in samples:
                resume = self._prefixes.get((prompt, sample))
                group.samples.add(
                    sample_index=sample, attempt=next(attempts), resume=resume, greedy=is_baseline(sample)
                )
        return message

    def _slot(self, prompt: int, sample: int) -> Slot:
        slot = self._ledger.slot(prompt, sample)
        assert slot is not None, f"({prompt}, {sample}) is not a slot of the open step"
        return slot

    def resume_from(self, key: SlotKey, state: common.ResumeState) -> None:
        """The sample's next attempt begins with what a stopped one has made."""
        self._prefixes[key] = state

    def take_back(self, slots: list[Slot], *, failed: bool = False) -> None:
        """Slots to be made again, ahead of everything else."""
        event_log = self._context.event_log
        event_log.post(*plan_return(self._context.run_id, slots, event_log.now(), failed=failed))
        self._news.beat()

    def lost(self, member: RolloutClient) -> int:
        """The member's stream has ended: what it still held is made again; how many samples that is."""
        held = [self._slot(*key) for key in sorted(self._ledger.index.held.get(member.incarnation, ()))]
        self.take_back(held)
        return len(held)
