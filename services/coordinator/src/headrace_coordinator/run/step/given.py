"""Fills the slots of a step with the answers that the data gives: nothing is sampled, and no reward is asked for.

Stands in `Generation`'s place. The trainer renders and tokenizes what is told here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headrace.common.v1 import common_pb2 as common
from headrace_schema.openings import GivenAnswer
from headrace_servicekit.rpc.digests import digest_bytes, trajectory_digest

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.given import STEPS, steps_of
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import PENDING, Slot
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Shown, Trajectories, Trajectory, is_shown
from headrace_coordinator.run.workers.clients import Published

DATA = "data"
"""Holder of the slots, in place of a rollout."""
TOGETHER = 64
"""Groups that settle at once."""


class GivenAnswers:
    """The answers of an attempt at one step."""

    goes_on = False

    def __init__(self, context: RunContext, published: Published, timer: StepTimer) -> None:
        """`published`: the version that learns from them."""
        self.context, self.timer, self.published = context, timer, published
        self.trajectories = Trajectories(context.spec.limits.in_flight_bytes, made=self._message)
        self._attempt: AttemptState

    def begin(self) -> AttemptState:
        """As `Generation.begin`."""
        self._attempt = AttemptState(self.context, self.timer, self.published, self.trajectories)
        return self._attempt

    async def fill(self) -> None:
        """Finishes and settles every open group of the step, and those that it takes in place of dropped ones."""
        self._attempt.refill()
        while prompts := sorted(self._attempt.ledger.index.open)[:TOGETHER]:
            self._settle(prompts)
            await asyncio.sleep(0)

    async def spent(self) -> bool:
        """True: nobody has anything left to do."""
        return True

    def install(self, published: Published) -> None:
        """Nobody takes a version."""

    def step_ended(self, slots: Iterable[Slot]) -> None:
        """The slots of the step are terminal: removes what is kept of them."""
        self.trajectories.forget(slot.key for slot in slots)

    def count_time(self) -> None:
        """No stream is open."""

    async def stop(self) -> None:
        """Nothing is being made."""

    def _settle(self, prompts: Sequence[int]) -> None:
        ledger, log, run = self._attempt.ledger, self.context.event_log, self.context.run_id
        slots = [slot for prompt in prompts for slot in ledger.group(prompt)]
        fresh = [slot for slot in slots if slot.state == PENDING]
        if fresh:
            first = ledger.last_attempt + 1
            assigned = [(*slot.key, first + place, DATA) for place, slot in enumerate(fresh)]
            log.post(ev.SlotsAssigned(run=run, slots=assigned))
        for slot in slots:
            self._keep(slot)
        finished = [(*slot.key, slot.attempt, self._digest(slot), 0) for slot in fresh]
        if finished:
            log.post(ev.SlotsFinished(run=run, slots=finished))
        rewards = [(prompt, [each.reward or 0.0 for each in self._kept(prompt)]) for prompt in prompts]
        self._attempt.settle(rewards)

    def _keep(self, slot: Slot) -> None:
        message = self._message(slot)
        kept = Trajectory(slot, message, message.ByteSize(), 0, (), oldest=self.published.version.number)
        kept.reward = answers_of(self.context, slot.prompt)[slot.sample][1]
        kept.shown = Shown.of(message) if is_shown(self.context, slot) else None
        self.trajectories.put(kept)

    def _kept(self, prompt: int) -> list[Trajectory]:
        return [self.trajectories[slot.key] for slot in self._attempt.ledger.group(prompt)]

    def _digest(self, slot: Slot) -> str:
        kept = self.trajectories[slot.key].message or self._message(slot)
        return kept.body_digest

    def _message(self, slot: Slot) -> common.Trajectory:
        """What a slot is filled with, the same whenever it is asked for."""
        answer = answers_of(self.context, slot.prompt)[slot.sample][0]
        item, key = (
            self.context.item(slot.prompt),
            common.SlotKey(prompt_ordinal=slot.prompt, sample_index=slot.sample),
        )
        return told(self.context.dataset, item, answer, key, slot.attempt)


def answers_of(context: RunContext, prompt: int) -> list[tuple[str, float]]:
    """The answers of a prompt ordinal's row, with their rewards."""
    form = context.dataset.given
    assert form is not None, "of a run whose data gives answers"
    return form.answers(context.item(prompt), context.item(prompt + 1))


def told(
    dataset: Dataset, item: DataItem, answer: str, key: common.SlotKey, attempt: int, upto: int | None = None
) -> common.Trajectory:
    """An answer of the data as a trajectory; of one in steps, those `upto` a number."""
    content, form = dataset.prompt(item), dataset.given
    steps, labels = steps_of(item) if form is not None and form.kind == STEPS else ([], [])
    ends = steps if upto is None else steps[:upto]
    turns = form.turns(item) if form is not None else [None]
    given = GivenAnswer(
        steps=ends,
        labels=labels[: len(ends)],
        turn=turns[key.sample_index] if key.sample_index < len(turns) else None,
        chat=content.chat if item.question else None,
        text=content.text if item.question else "",
        prefill=content.prefill,
        arguments=dict(content.arguments),
        answer=answer,
        images=[digest_bytes(image) for image in content.images],
    )
    message = common.Trajectory(
        sample=key,
        attempt=attempt,
        branches=[common.Branch(given_json=given.model_dump_json(exclude_defaults=True))],
        finish_reason=common.FINISH_REASON_EOS,
        producer=DATA,
        completion_text=answer,
    )
    message.body_digest = trajectory_digest(message)
    return message


def answers_for(context: RunContext, published: Published, timer: StepTimer) -> Generation | GivenAnswers:
    """What fills the slots of a run's steps."""
    made = GivenAnswers if context.spec.has_given_answers else Generation
    return made(context, published, timer)
