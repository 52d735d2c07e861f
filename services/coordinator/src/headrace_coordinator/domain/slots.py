"""The slot ledger of one run as a pure reducer: every slot below the frontier is terminal exactly once (G1).

Holds the open step's slots only; what lies below the frontier is in the certificates.
"""

from __future__ import annotations

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.compact import expand_drops

PENDING, ASSIGNED, FINISHED, SETTLED, ACCUMULATED, DROPPED = (
    "PENDING",
    "ASSIGNED",
    "FINISHED",
    "SETTLED",
    "ACCUMULATED",
    "DROPPED",
)

PROGRESS_EVENTS = (ev.SlotsFinished, ev.GroupsSettled, ev.GroupsAccumulated, ev.GroupDropped)


class Slot(msgspec.Struct):
    """One sample of one prompt within the open step."""

    prompt: int
    sample: int
    state: str = PENDING
    attempt: int = 0
    holder: str = ""
    digest: str = ""
    tokens: int = 0
    reward: float = 0.0
    reason: str = ""


class SlotLedger(msgspec.Struct):
    """Slots of the open step, and the step itself. `step` counts batches: slots below step × B are terminal."""

    group_size: int
    prompts_per_step: int
    step: int = 0
    attempt: int = 0
    open: bool = False
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

    @property
    def frontier(self) -> int:
        """Slots below this ordinal are terminal."""
        return self.step * self.group_size * self.prompts_per_step

    def ordinal(self, prompt: int, sample: int) -> int:
        """Position of a slot in the run's order."""
        return prompt * self.group_size + sample

    def slot(self, prompt: int, sample: int) -> Slot | None:
        """A slot of the open step."""
        return self.slots.get(self.ordinal(prompt, sample))

    def group(self, prompt: int) -> list[Slot]:
        """All slots of a prompt, by sample index."""
        first = self.ordinal(prompt, 0)
        return [self.slots[first + index] for index in range(self.group_size) if first + index in self.slots]

    @property
    def prompts(self) -> range:
        """Prompt ordinals of the open step."""
        return range(self.step * self.prompts_per_step, (self.step + 1) * self.prompts_per_step)

    def apply(self, event: ev.Event) -> None:
        """Folds one event; events of other parts are ignored."""
        if isinstance(event, PROGRESS_EVENTS):
            self.progress += 1
        match event:
            case ev.StepOpened():
                self._open(event)
            case ev.SlotsAssigned(slots=slots):
                for prompt, sample, attempt, incarnation in slots:
                    self._assign(prompt, sample, attempt, incarnation)
            case ev.SlotsFinished(slots=slots):
                for prompt, sample, attempt, digest, tokens in slots:
                    self._finish(prompt, sample, attempt, digest, tokens)
            case ev.GroupsSettled(groups=groups):
                for prompt, rewards in groups:
                    for slot, reward in zip(self.group(prompt), rewards, strict=True):
                        slot.state, slot.reward = SETTLED, reward
            case ev.GroupsAccumulated(prompts=prompts):
                for prompt in prompts:
                    for slot in self.group(prompt):
                        slot.state = ACCUMULATED
            case ev.GroupDropped():
                for slot in self.group(event.prompt):
                    slot.state, slot.reason = DROPPED, event.reason
                self.last_drop = f"{event.reason}: {event.detail}"
            case ev.StepAborted():
                self.open = False
            case ev.StepCommitted():
                self._close()
            case ev.StepSkipped(dropped=dropped):
                self.last_drop = self.last_drop or ", ".join(
                    {reason for _, _, reason in expand_drops(dropped)}
                )
                self._close()
            case ev.VersionRestored(frontier_step=frontier_step):
                self.step, self.attempt, self.open, self.slots = frontier_step, 0, False, {}
                if event.source_run:
                    self.first_step = frontier_step
            case ev.CoordinatorStarted(leap=leap):
                self.last_attempt += leap if self.last_attempt else 0

    def _open(self, event: ev.StepOpened) -> None:
        self.attempt, self.open = event.attempt, True
        if not self.slots:
            self.slots = {
                self.ordinal(prompt, sample): Slot(prompt, sample)
                for prompt in self.prompts
                for sample in range(self.group_size)
            }
        for slot in self.slots.values():
            # A quarantined culprit stays out of the replay; everything else may be used again.
            if slot.state in (SETTLED, ACCUMULATED):
                slot.state = FINISHED
            elif slot.state == ASSIGNED:
                slot.state = PENDING

    def _assign(self, prompt: int, sample: int, attempt: int, incarnation: str) -> None:
        self.last_attempt = max(self.last_attempt, attempt)
        if slot := self.slot(prompt, sample):
            slot.state, slot.attempt, slot.holder, slot.digest = ASSIGNED, attempt, incarnation, ""

    def _finish(self, prompt: int, sample: int, attempt: int, digest: str, tokens: int) -> None:
        slot = self.slot(prompt, sample)
        if slot is not None and slot.attempt == attempt:
            slot.state, slot.digest, slot.tokens = FINISHED, digest, tokens

    def _close(self) -> None:
        self.dropped_total += sum(slot.state == DROPPED for slot in self.slots.values())
        self.terminal_total += len(self.slots)
        self.step, self.attempt, self.open, self.slots = self.step + 1, 0, False, {}

    def unsettled(self) -> list[int]:
        """Prompt ordinals of the open step that are neither accumulated nor dropped."""
        return [
            prompt
            for prompt in self.prompts
            if any(slot.state not in (ACCUMULATED, DROPPED) for slot in self.group(prompt))
        ]

    def members(self, state: str) -> list[Slot]:
        """Slots of the open step in one state, in order."""
        return [slot for _, slot in sorted(self.slots.items()) if slot.state == state]


def plan_assign(ledger: SlotLedger, run: str, slots: list[Slot], holder: str, now: float) -> ev.SlotsAssigned:
    """Gives each of `slots` a fresh attempt number, higher than any ever used in the run."""
    return ev.SlotsAssigned(
        at=now,
        run=run,
        slots=[
            (slot.prompt, slot.sample, ledger.last_attempt + 1 + index, holder)
            for index, slot in enumerate(slots)
        ],
    )


class Offer(msgspec.Struct, frozen=True):
    """A finished attempt that a producer offers."""

    prompt: int
    sample: int
    attempt: int
    digest: str
    tokens: int


def accepts(ledger: SlotLedger, offer: Offer) -> str:
    """Empty when the offer may fill its slot, else why not. A repeated offer with the same digest is fine."""
    slot = ledger.slot(offer.prompt, offer.sample)
    if slot is None:
        return "not a slot of the open step"
    if slot.attempt != offer.attempt:
        return f"attempt {offer.attempt} is not the assigned attempt {slot.attempt}"
    if slot.state == DROPPED:
        return "the slot is dropped"
    if slot.digest and slot.digest != offer.digest:
        return f"attempt {offer.attempt} was already offered with digest {slot.digest}"
    return ""
