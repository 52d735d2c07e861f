"""The slot ledger of one run as a pure reducer: every slot below the frontier is terminal exactly once (G1).

Holds the slots of open steps only; what lies below the frontier is in the certificates. `SlotIndex` answers what is
asked often, without a walk over the slots.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import expand_drops
from headrace_coordinator.domain.ledger.slot_index import (
    ACCUMULATED,
    ASSIGNED,
    DROPPED,
    FILTERED,
    FINISHED,
    OPEN,
    PENDING,
    SETTLED,
    Slot,
    SlotIndex,
)
from headrace_coordinator.domain.totals import Shape

PROGRESS_EVENTS = (ev.SlotsFinished, ev.GroupsSettled, ev.GroupsAccumulated, ev.GroupDropped)


class OpenStep(msgspec.Struct):
    """A step whose slots may start."""

    refilled: int = 0
    """Groups that it took in place of dropped ones."""


class SlotLedger(msgspec.Struct, dict=True):
    """Slots of the open steps. `step` is the one that is learned: slots below its first, the `frontier`, are terminal.

    A step has `prompts_per_step` groups, and some more: one for each that was dropped before it settled, up to a
    limit. Those are the next ones, so what a step takes begins the steps behind it later. All groups of all steps have
    successive prompt ordinals, and the groups that a step keeps are the first ones in that order.
    """

    group_size: int
    prompts_per_step: int
    step: int = 0
    attempt: int = 0
    open: bool = False
    """Whether an attempt at `step` is open."""
    steps: dict[int, OpenStep] = {}
    """The open steps, in order: `step`, and those whose answers are made ahead of it."""
    slots: dict[int, Slot] = {}
    last_attempt: int = 0
    dropped_total: int = 0
    terminal_total: int = 0
    first_step: int = 0
    """Step that the run began with: above 0 for a fork, whose origin did the earlier ones."""
    last_drop: str = ""
    """Why the newest dropped slots were dropped, in words for the run's user."""
    progress: int = 0
    """Rises with every event that brings the step forward."""
    next_prompt: int = 0
    """Prompt ordinal that `step` begins with."""
    first_prompt: int = 0
    """Prompt ordinal that the run began with: above 0 for a fork."""
    unsettled_drops: list[int] = []
    """Prompts of open steps whose group was dropped before it settled."""
    helped: dict[str, list[int]] = {}
    """In the open attempt: name of a helper → groups whose gradient it contributed; the owners learned all others."""

    @property
    def frontier(self) -> int:
        """Slots below this ordinal are terminal."""
        return self.next_prompt * self.group_size

    @property
    def shape(self) -> Shape:
        """Where the run's slots begin, and how many there are to a step and a group."""
        size = self.group_size
        return Shape(self.first_prompt * size, self.prompts_per_step * size, size)

    def ordinal(self, prompt: int, sample: int) -> int:
        """Position of a slot in the run's order."""
        return prompt * self.group_size + sample

    @cached_property
    def index(self) -> SlotIndex:
        """Where the slots of open steps stand; not part of a snapshot."""
        return SlotIndex(self.slots.values())

    def slot(self, prompt: int, sample: int) -> Slot | None:
        """A slot of an open step."""
        return self.slots.get(self.ordinal(prompt, sample))

    def group(self, prompt: int) -> list[Slot]:
        """All slots of a prompt, by sample index."""
        first = self.ordinal(prompt, 0)
        places = range(first, first + self.group_size)
        return [slot for place in places if (slot := self.slots.get(place)) is not None]

    @property
    def refilled(self) -> int:
        """Groups that `step` took in place of dropped ones."""
        return self._taken(self.step)

    def _taken(self, step: int) -> int:
        return self.steps[step].refilled if step in self.steps else 0

    @property
    def prompts(self) -> range:
        """Prompt ordinals of `step`."""
        return self.prompts_of(self.step)

    def prompts_of(self, step: int) -> range:
        """Prompt ordinals of an open step, or of the one behind the last of them."""
        first = self.next_prompt + sum(
            self.prompts_per_step + self._taken(before) for before in range(self.step, step)
        )
        return range(first, first + self.prompts_per_step + self._taken(step))

    def step_of(self, prompt: int) -> int:
        """The step that a prompt of an open step belongs to now; a group dropped before it may bring it forward."""
        step = self.step
        while prompt >= self.prompts_of(step).stop:
            step += 1
        return step

    def lacking(self, step: int) -> int:
        """Groups of a step that were dropped before they settled, and have no other in their place yet."""
        return self._dropped_early(self.prompts_of(step)) - self._taken(step)

    def _dropped_early(self, prompts: range) -> int:
        return sum(prompt in prompts for prompt in self.unsettled_drops)

    @property
    def complete(self) -> bool:
        """Whether every group of `step` is settled or dropped."""
        return not self.index.any_open(self.prompts)

    @property
    def settled(self) -> list[int]:
        """Prompts of `step` whose group is settled, and not yet accumulated or dropped."""
        prompts = self.prompts
        return sorted(prompt for prompt in self.index.settled if prompt in prompts)

    @property
    def step_slots(self) -> list[Slot]:
        """Slots of `step`, in order."""
        return [slot for prompt in self.prompts for slot in self.group(prompt)]

    def apply(self, event: ev.Event) -> None:
        """Folds one event; events of other parts are ignored."""
        if isinstance(event, PROGRESS_EVENTS):
            self.progress += 1
        match event:
            case ev.StepOpened():
                self._open(event)
            case ev.SlotsOpened(step=step):
                self._open_slots(step)
            case ev.SlotsAssigned(slots=slots):
                for prompt, sample, attempt, incarnation in slots:
                    self._assign(prompt, sample, attempt, incarnation)
            case ev.SlotsFinished(slots=slots):
                for prompt, sample, attempt, digest, tokens in slots:
                    self._finish(prompt, sample, attempt, digest, tokens)
            case ev.SlotsReturned(slots=slots, failed=failed):
                for prompt, sample, attempt in slots:
                    self._return(prompt, sample, attempt, failed)
            case ev.GroupsSettled(groups=groups):
                for prompt, rewards in groups:
                    for slot, reward in zip(self._move_group(prompt, SETTLED), rewards, strict=True):
                        slot.reward = reward
            case ev.GroupsAccumulated(prompts=prompts):
                for prompt in prompts:
                    self._move_group(prompt, ACCUMULATED)
                if event.helper:
                    self.helped.setdefault(event.helper, []).extend(prompts)
            case ev.GroupDropped():
                self._drop(event)
            case ev.StepRefilled(step=step, groups=groups):
                self._refill(step, groups)
            case ev.StepAborted():
                self.open = False
            case ev.StepCommitted(certificate=certificate):
                self._close(certificate.refilled)
            case ev.StepSkipped(dropped=dropped):
                self.last_drop = self.last_drop or ", ".join(
                    {reason for _, _, reason in expand_drops(dropped)}
                )
                self._close(event.refilled)
            case ev.VersionRestored(frontier_step=step, frontier_prompt=prompt):
                self._go_to(step, step * self.prompts_per_step if prompt is None else prompt)
                if event.source_run:
                    self.first_step, self.first_prompt = step, self.next_prompt
            case ev.CoordinatorStarted(leap=leap):
                self.last_attempt += leap if self.last_attempt else 0

    def _open(self, event: ev.StepOpened) -> None:
        self.attempt, self.open, self.helped = event.attempt, True, {}
        if event.step not in self.steps:
            self._open_slots(event.step)
        if event.goes_on:
            return
        for slot in self.slots.values():
            slot.failures = 0
            # Slots that were dropped stay dropped; everything else may be used again.
            if slot.state in (SETTLED, ACCUMULATED):
                slot.state = FINISHED
            elif slot.state == ASSIGNED:
                slot.state, slot.holder = PENDING, ""
        self._index_anew()

    def _open_slots(self, step: int) -> None:
        self.steps[step] = OpenStep()
        self._add(self.prompts_of(step))

    def _add(self, prompts: range) -> None:
        index = self.index  # Before the slots are there: one that is made with them would count them twice.
        for prompt in prompts:
            for sample in range(self.group_size):
                slot = self.slots[self.ordinal(prompt, sample)] = Slot(prompt, sample)
                index.enter(slot)

    def _drop(self, event: ev.GroupDropped) -> None:
        unsettled = event.prompt in self.index.open
        for slot in self._move_group(event.prompt, DROPPED):
            slot.reason, slot.reward = event.reason, event.reward
        if unsettled:
            self.unsettled_drops.append(event.prompt)
        if event.reason != FILTERED or not self.last_drop:
            self.last_drop = f"{event.detail} ({event.reason})"

    def _refill(self, step: int, groups: int) -> None:
        last = max(self.steps)
        end = self.prompts_of(last).stop
        self.steps[step].refilled += groups
        for behind in range(step + 1, last + 1):
            self._trim(behind)
        self._add(range(end, self.prompts_of(last).stop))

    def _trim(self, step: int) -> None:
        """Groups that a step took in place of dropped ones which the step before it has by now are not its own."""
        first, size, opened = self.prompts_of(step).start, self.prompts_per_step, self.steps[step]
        for fewer in range(opened.refilled):
            if self._dropped_early(range(first, first + size + fewer)) <= fewer:
                opened.refilled = fewer
                return

    def _move(self, slot: Slot, state: str, attempt: int, holder: str) -> None:
        """The one place where a single slot changes its state."""
        self.index.leave(slot)
        slot.state, slot.attempt, slot.holder = state, attempt, holder
        self.index.enter(slot)

    def _move_group(self, prompt: int, state: str) -> list[Slot]:
        """The one place where a whole group changes its state; its slots."""
        group, index = self.group(prompt), self.index
        index.close(prompt)
        for slot in group:
            index.leave(slot)
            slot.state = state
            index.enter(slot)
        return group

    def _assign(self, prompt: int, sample: int, attempt: int, incarnation: str) -> None:
        self.last_attempt = max(self.last_attempt, attempt)
        if slot := self.slot(prompt, sample):
            self._move(slot, ASSIGNED, attempt, incarnation)
            slot.digest = ""

    def _finish(self, prompt: int, sample: int, attempt: int, digest: str, tokens: int) -> None:
        slot = self.slot(prompt, sample)
        if slot is not None and slot.attempt == attempt and slot.state in OPEN:
            self._move(slot, FINISHED, attempt, slot.holder)
            slot.digest, slot.tokens = digest, tokens

    def _return(self, prompt: int, sample: int, attempt: int, failed: bool) -> None:
        slot = self.slot(prompt, sample)
        if slot is not None and slot.attempt == attempt and slot.state in OPEN:
            self._move(slot, PENDING, attempt, "")
            slot.digest = ""
            slot.failures += failed

    def _close(self, refilled: int) -> None:
        end = self.next_prompt + self.prompts_per_step + refilled
        ended = [slot for prompt in range(self.next_prompt, end) for slot in self.group(prompt)]
        failed = (slot.state == DROPPED and slot.reason != FILTERED for slot in ended)
        self.dropped_total += sum(failed)
        self.terminal_total += len(ended)
        for slot in ended:
            self.index.leave(slot)
            self.index.close(slot.prompt)
            del self.slots[self.ordinal(slot.prompt, slot.sample)]
        self.steps.pop(self.step, None)
        self.unsettled_drops = [prompt for prompt in self.unsettled_drops if prompt >= end]
        self.step, self.next_prompt = self.step + 1, end
        self.attempt, self.open, self.helped = 0, False, {}

    def _go_to(self, step: int, prompt: int) -> None:
        self.step, self.attempt, self.open, self.steps, self.slots = step, 0, False, {}, {}
        self.next_prompt, self.unsettled_drops, self.helped = prompt, [], {}
        self._index_anew()

    def _index_anew(self) -> None:
        self.__dict__.pop("index", None)

    def unsettled(self) -> list[int]:
        """Prompt ordinals of `step` that are neither accumulated nor dropped."""
        return [
            prompt
            for prompt in self.prompts
            if any(slot.state not in (ACCUMULATED, DROPPED) for slot in self.group(prompt))
        ]

    def members(self, state: str) -> list[Slot]:
        """Slots of `step` in one state, in order."""
        return [slot for slot in self.step_slots if slot.state == state]

    def finished(self) -> list[Slot]:
        """Finished slots of all open steps, in order."""
        return [slot for _, slot in sorted(self.slots.items()) if slot.state == FINISHED]
