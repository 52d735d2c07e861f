"""Hands the waiting samples of open steps out to rollouts, as messages of their streams of work.

The ledger alone knows who has which sample. Kept here: the order in which groups start, and the prefixes of samples
that were stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.domain.ledger.dispatch import (
    DispatchOrder,
    GroupWork,
    credit,
    plan_assign,
    plan_dispatch,
    plan_return,
)
from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.trajectories import is_shown
from headrace_coordinator.run.workers.clients import SlotKey
from headrace_coordinator.run.workers.rollout_client import RolloutClient

IMAGE_BYTES = 16 << 20
"""Most bytes of a message's images, unless one prompt has more: gRPC refuses messages of 64 MiB."""


def by_size(message: rollout.AssignGroups) -> Iterator[rollout.AssignGroups]:
    """The same groups in messages of about IMAGE_BYTES of images; a message without images as it is."""
    if not any(group.prompt.images for group in message.groups):
        yield message
        return
    part, size = rollout.AssignGroups(), 0
    for group in message.groups:
        own = sum(len(image.data) for image in group.prompt.images)
        if part.groups and size + own > IMAGE_BYTES:
            yield part
            part, size = rollout.AssignGroups(), 0
        part.groups.add().CopyFrom(group)
        size += own
    yield part


class Dispatch:
    """Gives the waiting samples of open steps to rollouts."""

    def __init__(self, attempt: AttemptState) -> None:
        self._attempt = attempt
        self._context = attempt.context
        self._ledger = attempt.ledger
        self._prefixes: dict[SlotKey, common.ResumeState] = {}
        expected = None if self._context.spec.deterministic else self._context.expected_tokens
        self._order = DispatchOrder((), expected)

    async def assignments(
        self, worker: RolloutClient, over: Callable[[], bool]
    ) -> AsyncIterator[rollout.AssignGroups]:
        """Work for one rollout as it gets room, until its stream is `over` or there will be no more."""
        index, workers = self._ledger.index, self._context.workers
        while self._attempt.generates and not over():
            news = self._attempt.work.next()
            for step in self._ledger.steps:
                self._order.reach(self._ledger.prompts_of(step))
            live = sum(workers.usable(each) for each in workers.decoding) + len(self._attempt.joining)
            room, below = worker.max_concurrency, self._credit(worker)
            if work := plan_dispatch(index, self._order, worker.incarnation, room, live, below):
                for part in by_size(await self._assign(worker, work)):
                    yield part
            else:
                await asyncio.shield(news)

    def _credit(self, worker: RolloutClient) -> int:
        most, lineage = self._context.spec.algorithm.max_staleness, self._context.state.lineage
        return credit(self._ledger, lineage, worker.installed, most)

    async def _assign(self, worker: RolloutClient, work: list[GroupWork]) -> rollout.AssignGroups:
        slots = [self._slot(prompt, sample) for prompt, samples in work for sample in samples]
        event_log = self._context.event_log
        assigned = plan_assign(self._ledger, self._context.run_id, slots, worker.incarnation)
        await event_log.commit(assigned)
        attempts = iter(attempt for _, _, attempt, _ in assigned.slots)
        is_baseline = self._context.workers.leader.is_baseline
        message = rollout.AssignGroups()
        agent = self._context.spec.agent
        online = agent is not None and agent.online is not None
        for prompt, samples in work:
            group = message.groups.add(
                prompt_ordinal=prompt,
                prompt=self._context.prompt(prompt, record=self._recorded(prompt)),
                oldest_version=self._oldest(prompt) if online else 0,
            )
            for sample in samples:
                resume = self._prefixes.get((prompt, sample))
                group.samples.add(
                    sample_index=sample,
                    attempt=next(attempts),
                    resume=resume,
                    greedy=is_baseline(sample),
                    shown=is_shown(self._context, self._slot(prompt, sample)),
                )
        return message

    def _recorded(self, prompt: int) -> bool:
        """Whether the episodes of a prompt are recorded."""
        environment = self._context.spec.environment
        if environment is None or environment.videos is None:
            return False
        step = self._ledger.step_of(prompt)
        place = prompt - self._ledger.prompts_of(step).start
        return step % environment.videos.every == 0 and place < environment.videos.starts

    def _oldest(self, prompt: int) -> int:
        """Number of the oldest version whose tokens a prompt's step may learn from."""
        lineage, ahead = self._context.state.lineage, self._ledger.step_of(prompt) - self._ledger.step
        base, most = lineage.base, self._context.spec.algorithm.max_staleness - ahead
        numbers = lineage.chain(lineage.head)
        fit = [n for n in numbers if base is not None and base.ordinal - lineage.versions[n].ordinal <= most]
        return min(fit, default=lineage.head + 1)

    def _slot(self, prompt: int, sample: int) -> Slot:
        slot = self._ledger.slot(prompt, sample)
        assert slot is not None, f"({prompt}, {sample}) is not a slot of an open step"
        return slot

    def resume_from(self, key: SlotKey, state: common.ResumeState) -> None:
        """Keeps the prefix with which the sample's next attempt begins."""
        self._prefixes[key] = state

    def forget(self, keys: Iterable[SlotKey]) -> None:
        """Removes the prefixes of a step that has ended."""
        for key in keys:
            self._prefixes.pop(key, None)

    def take_back(self, slots: list[Slot], *, failed: bool = False) -> None:
        """Has slots made again, ahead of everything else."""
        event_log = self._context.event_log
        event_log.post(*plan_return(self._context.run_id, slots, failed=failed))
        self._attempt.work.beat()

    def take_back_from(self, worker: RolloutClient) -> int:
        """Has the samples made again that a rollout whose stream has ended did not finish; how many these are."""
        held = [self._slot(*key) for key in sorted(self._ledger.index.held.get(worker.incarnation, ()))]
        self.take_back(held)
        return len(held)
