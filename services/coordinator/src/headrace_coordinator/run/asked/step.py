"""One step of a session: opened by its first gradient, committed by the call that asks for the optimizer's step.

The gradients of a step are its groups, of one slot each. A step that is attempted again computes them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.sessions import LOSS_OPTIONS, Failure, Forward, ForwardBackward, Operation, OptimStep
from headrace_servicekit.rpc.digests import digest_bytes
from typing_extensions import override

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import compact_drops
from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.learning import under_lease
from headrace_coordinator.run.step.step import Step
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Trajectories
from headrace_coordinator.run.workers.clients import Published

LOOP = "loop"
"""Holder of the slots, in place of a rollout."""


class NothingGenerated:
    """Stands in `Generation`'s place: the loop brings what is learned from."""

    goes_on = False

    def __init__(self, context: RunContext, published: Published, timer: StepTimer) -> None:
        self.context, self.published, self.timer = context, published, timer
        self.trajectories = Trajectories(0)

    def count_time(self) -> None:
        """No stream is open."""

    def step_ended(self, slots: Iterable[Slot]) -> None:
        """Nothing is kept of slots."""


@dataclass(frozen=True)
class Gradient:
    """A call whose gradient is in the open attempt."""

    seq: int
    prompt: int
    attempt: int
    digest: str
    tokens: int


class AskedStep(Step):
    """A step from its first gradient to its commit."""

    def __init__(self, context: RunContext, published: Published, timer: StepTimer) -> None:
        super().__init__(cast(Generation, NothingGenerated(context, published, timer)))
        self._opened: ev.StepOpened | None = None
        self._adam = OptimStep()
        self.gradients: list[Gradient] = []

    async def begin(self) -> None:
        """Opens an attempt."""
        opened, leader = self._open(), self._context.workers.leader
        await self._event_log.flush()
        await self._context.snapshot_taken()
        await under_lease(
            self._context, lambda: leader.begin(opened.step, opened.attempt, opened.base, opened.number)
        )
        self._opened, self.gradients = opened, []

    async def learn(self, seq: int, call: ForwardBackward) -> trainer.ComputeLossResponse:
        """Adds a call's gradient, if that is finite. Raises CallRefused, also where the attempt is over."""
        opened = self._opened
        assert opened is not None
        place = len(self.gradients)
        digest = digest_bytes(call.model_dump_json().encode())
        made = Gradient(
            seq,
            self._ledger.next_prompt + place,
            self._ledger.last_attempt + 1 + place,
            digest,
            counted(call),
        )
        request = loss_request(call)
        request.step, request.attempt, request.learn = opened.step, opened.attempt, True
        request.prompt_ordinal, request.slot_attempt, request.digest = made.prompt, made.attempt, digest
        response = await computed(self._context, self._timer, request)
        if response.finite:
            self.gradients.append(made)
        return response

    async def again(self) -> list[Gradient]:
        """Ends the attempt and opens the next one; returns what that lacks."""
        lacking = self.gradients
        await self._abort("its gradients are computed again")
        await self.begin()
        return lacking

    async def apply(self, adam: OptimStep) -> tuple[trainer.CommitStepResponse, Published | None]:
        """Commits and records; None for the version where the gradient is not finite, and the step is skipped."""
        opened = self._opened
        assert opened is not None
        self._adam = adam
        self._account(opened)
        response, published = await under_lease(self._context, lambda: self._decision(opened))
        if published is None:
            await self.drop(trainer.CommitResult.Name(response.result))
        return response, published

    async def drop(self, why: str) -> None:
        """Ends the step without a version: its gradients are dropped."""
        opened = self._opened
        assert opened is not None
        self._account(opened)
        await self._abort(why)
        dropped = compact_drops((slot.prompt, slot.sample, why) for slot in self._ledger.step_slots)
        await self._event_log.commit(self._skipped(dropped))

    def _account(self, opened: ev.StepOpened) -> None:
        """The ledger gets the step's slots, all of them at once."""
        ledger, log, run = self._ledger, self._event_log, self._context.run_id
        made = self.gradients
        if (more := len(made) - 1 - ledger.refilled) > 0:
            log.post(ev.StepRefilled(run=run, step=opened.step, groups=more))
        slots = [(each.prompt, 0, each.attempt) for each in made]
        prompts = [each.prompt for each in made]
        if ledger.unsettled():
            log.post(
                ev.SlotsAssigned(run=run, slots=[(*slot, LOOP) for slot in slots]),
                ev.SlotsFinished(
                    run=run,
                    slots=[(*slot, each.digest, each.tokens) for slot, each in zip(slots, made, strict=True)],
                ),
                ev.GroupsSettled(run=run, groups=[(prompt, [0.0]) for prompt in prompts]),
                ev.GroupsAccumulated(run=run, step=opened.step, attempt=opened.attempt, prompts=prompts),
            )

    @override
    async def _commit(self, opened: ev.StepOpened) -> trainer.CommitStepResponse:
        self._context.workers.leader.adam = trainer.AdamParams(**self._adam.model_dump(exclude={"kind"}))
        try:
            return await super()._commit(opened)
        finally:
            self._context.workers.leader.adam = None


def problem_of(operation: Operation) -> Failure | None:
    """Why a call cannot be executed, whatever the model; None where its parts fit. Its number is used up anyway."""
    if not isinstance(operation, Forward | ForwardBackward):
        return None
    for key, reason, fix in _problems(operation):
        return Failure(category="user", message=f"{reason}; {fix}", key=key)
    return None


def _problems(call: Forward | ForwardBackward) -> Iterator[tuple[str, str, str]]:
    known = LOSS_OPTIONS[call.loss]
    for name in sorted(call.options.keys() - known.keys()):
        fix = f"use {', '.join(known)}" if known else "leave it out"
        yield f"options.{name}", f"{call.loss} has no such option", fix
    needed = () if call.loss == "cross_entropy" else ("advantages", "log_probs")
    for place, each in enumerate(call.data):
        where, count = f"data[{place}]", len(each.targets)
        if not count or count % len(each.tokens):
            reason = f"{count} targets of {len(each.tokens)} tokens"
            yield f"{where}.targets", reason, "give one, or as many, for each token"
        for name in ("weights", "advantages", "log_probs"):
            values = getattr(each, name)
            if values and len(values) != count:
                yield (
                    f"{where}.{name}",
                    f"{len(values)} values of {count} targets",
                    "give one for each target",
                )
            if not values and name in needed:
                yield f"{where}.{name}", f"{call.loss} needs them", "give one for each target"


def counted(call: ForwardBackward) -> int:
    """Targets that count."""
    return sum(
        sum(weight != 0 for weight in each.weights) if each.weights else len(each.targets)
        for each in call.data
    )


def loss_request(call: Forward | ForwardBackward) -> trainer.ComputeLossRequest:
    """A call as the trainer reads it."""
    return trainer.ComputeLossRequest(
        sequences=[
            trainer.LossSequence(
                token_ids=each.tokens,
                targets=each.targets,
                weights=each.weights,
                advantages=each.advantages,
                log_probs=each.log_probs,
            )
            for each in call.data
        ],
        loss=call.loss,
        options=call.options,
    )


async def computed(
    context: RunContext, timer: StepTimer, request: trainer.ComputeLossRequest
) -> trainer.ComputeLossResponse:
    """What the trainer group's leader answers."""
    leader, limit = context.workers.leader, context.spec.limits.step_timeout_s
    with timer.stage("learn", leader.devices):
        return await under_lease(context, lambda: leader.compute_loss(request, limit))
