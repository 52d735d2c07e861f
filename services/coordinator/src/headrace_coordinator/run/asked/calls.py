"""The loop of a session run, while it holds a grant: executes calls in their order, and has samples made.

A call is executed at most once for its caller. After a rewind those behind the checkpoint are executed again, from the
journal, and their results stay what they were.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.sessions import (
    Failure,
    Forward,
    ForwardBackward,
    ForwardResult,
    Load,
    LoadResult,
    OptimStep,
    OptimStepResult,
    Publish,
    PublishResult,
    Refuse,
    Result,
    Save,
    SaveResult,
)

from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.instance_client import USER_ERRORS, CallRefused
from headrace_coordinator.run.asked.sampling import FOREVER_S, Sampling
from headrace_coordinator.run.asked.step import AskedStep, computed, counted, loss_request, problem_of
from headrace_coordinator.run.checkpointing import Checkpointer, listed
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.step import RunFailed
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.sessions.journal import Unknown, saved_by_name
from headrace_coordinator.waits import WaitTimeout

IDLE = "idle"
"""Begins the reason of a session that pauses because nobody calls: the next call resumes it."""
LOST = "ATTEMPT_LOST"
UNREADABLE = frozenset({"NOT_FOUND", "CHECKPOINT_DAMAGED", "CHECKPOINT_MISMATCH", "INVALID"})


class Calls:
    """Executes what a session's loop asks for."""

    def __init__(self, context: RunContext, checkpointer: Checkpointer, timer: StepTimer) -> None:
        self._context, self._checkpointer, self._timer = context, checkpointer, timer
        self._desk = context.fleet.desks.of(context.run_id, context.state.directory)
        self._journal = self._desk.journal
        self._sampling = Sampling(context, self._desk)
        self._devices = asyncio.Lock()
        self._learns: bool | None = None
        """Which side has the devices, where sides take turns; None: not known."""
        self._published: Published
        self._position = 0
        """The last call that was executed and is part of the head or of the open step."""
        self._step: AskedStep | None = None
        self._ended = False
        self.idle = ""
        """Why the run pauses, where nobody has called for too long."""
        self.done = 0
        """Steps made and samples asked for since the run was admitted."""

    async def begin(self, published: Published) -> None:
        """The trainer holds the ledger's head, nothing is open."""
        ledger = self._context.state.ledger
        terminal = ledger.next_prompt - ledger.first_prompt
        self._position = await asyncio.to_thread(self._journal.position, terminal)
        self._published, self._step, self._learns, self.idle = published, None, None, ""
        self._sampling.begin(published)
        if self._position and self._position not in self._journal.outcomes:
            await self._desk.settle(
                self._position, self._stepped({})
            )  # The coordinator ended before it was told.

    async def work(self, over: Callable[[], bool]) -> Published:
        """Until the run is at a boundary, closed, or idle."""
        self._ended = False
        await gather_all(self._operate(over), self._sample())
        return self._published

    async def _operate(self, over: Callable[[], bool]) -> None:
        context, desk, log = self._context, self._desk, self._context.event_log

        def called() -> bool:
            return self._journal.end > self._position

        def closing() -> bool:
            return self._journal.closed and not called() and not desk.busy

        try:
            while not over():
                if called():
                    async with self._side(learns=True):
                        await self._execute(self._position + 1)
                    self._position += 1
                elif closing():
                    context.closed = True
                    return
                else:
                    what, idle_s = "a call of its loop", self._idle_s
                    with context.fleet.waits.named(context.run_id, what):
                        try:
                            await log.wait_until(lambda: called() or closing() or over(), idle_s, what)
                        except WaitTimeout:
                            if not desk.busy and not called():
                                self.idle = (
                                    f"{IDLE} for {idle_s:g} s (session.idle_s); the next call resumes it"
                                )
                                return
        finally:
            self._ended = True
            log.wake()

    @property
    def _idle_s(self) -> float:
        section = self._context.spec.session
        assert section is not None
        return section.idle_s

    async def _sample(self) -> None:
        desk, log = self._desk, self._context.event_log
        while True:
            await log.wait_until(lambda: bool(desk.waiting) or self._ended, FOREVER_S, "samples to make")
            if self._ended:
                return
            async with self._side(learns=False):
                await self._sampling.make(self._may_take_more)
            self.done += 1

    def _may_take_more(self) -> bool:
        """Whether the rollouts may go on with samples that came since."""
        waits = self._context.workers.placement.turns and self._journal.end > self._position
        return not self._ended and not waits

    @asynccontextmanager
    async def _side(self, *, learns: bool) -> AsyncIterator[None]:
        """Where sides take turns, the devices are this one's within."""
        if not self._context.workers.placement.turns:
            yield
            return
        async with self._devices:
            if learns and self._learns is not True:
                with self._timer.stage("switch"):
                    await self._context.devices.hand_devices_to_trainers()
            self._learns = learns
            yield

    # --- calls

    async def _execute(self, seq: int) -> None:
        operation, known = await asyncio.to_thread(
            lambda: (self._journal.call(seq), self._journal.result(seq))
        )
        again = known is not None
        if again and (isinstance(known, Failure) or isinstance(operation, Forward | Save)):
            if isinstance(operation, OptimStep) and self._step is not None:
                await self._drop("NONFINITE")
            return
        try:
            result = problem_of(operation) or await self._done(seq, operation)
        except CallRefused as refused:
            if refused.reason not in USER_ERRORS:
                raise
            result = Failure(category="user", message=refused.message, key=refused.key)
        if not again:
            await self._desk.settle(seq, result)
        elif isinstance(result, Failure):
            raise RunFailed(f"call {seq} was executed again after a rewind and failed: {result.message}")

    async def _done(self, seq: int, operation: Any) -> Result:
        match operation:
            case Forward():
                response = await computed(self._context, self._timer, loss_request(operation))
                return _told(operation, response)
            case ForwardBackward():
                return await self._learned(seq, operation)
            case OptimStep():
                return await self._applied(operation)
            case Save():
                return await self._saved(operation)
            case Refuse():
                return Failure(category="user", message=operation.message, key=operation.key)
            case Load():
                return await self._loaded(operation)
            case Publish():
                head = self._context.state.lineage.head
                self._sampling.publish(await self._context.workers.leader.publish(head))
                return PublishResult(version=head)
        raise AssertionError(operation)

    async def _learned(self, seq: int, call: ForwardBackward) -> Result:
        if self._step is None:
            step = AskedStep(self._context, self._published, self._timer)
            await step.begin()
            self._step = step
        while True:
            try:
                response = await self._step.learn(seq, call)
                break
            except CallRefused as refused:
                if refused.reason != LOST:
                    raise
                await self._learn_again()
        if response.finite:
            return _told(call, response)
        await self._learn_again()
        what = f"the {call.loss} of call {seq} is not finite; its gradient was left out"
        return Failure(category="user", message=what, key="data")

    async def _learn_again(self) -> None:
        """The attempt was lost, or has what must not be in it: another one gets the gradients before."""
        assert self._step is not None
        for made in await self._step.again():
            call = await asyncio.to_thread(self._journal.call, made.seq)
            assert isinstance(call, ForwardBackward)
            await self._step.learn(made.seq, call)

    async def _applied(self, adam: OptimStep) -> Result:
        step = self._step
        if step is None or not step.gradients:
            what = "no gradient is accumulated: call forward_backward before optim_step"
            return Failure(category="user", message=what, key="optim_step")
        response, published = await step.apply(adam)
        self._step = None
        if published is None:
            what = "the gradient is not finite: it was dropped, and the weights stay as they were"
            return Failure(category="user", message=what, key="optim_step")
        self._published = published
        self.done += 1
        if self._checkpointer.due():
            with self._timer.stage("checkpoint"):
                await self._checkpointer.save(wait=False)
            await self._prune()
        return self._stepped(dict(response.figures))

    def _stepped(self, figures: dict[str, float]) -> OptimStepResult:
        run = self._context.state
        return OptimStepResult(version=run.lineage.head, step=run.ledger.step, metrics=figures)

    async def _drop(self, why: str) -> None:
        """The gradients of the open step are not applied."""
        if self._step is not None and self._step.gradients:
            await self._step.drop(why)
        self._step = None

    async def _saved(self, save: Save) -> Result:
        context, head, name = self._context, self._context.state.lineage.head, save.name
        there = self._journal.named.get(name)
        if there is not None and not save.overwrite and there["version"] != head:
            what = f"there is a checkpoint {name} of version {there['version']}: take another name, or overwrite it"
            return Failure(category="user", message=what, key="name")
        known = {each.version.number: each for each in (await listed(context)).checkpoints}
        if head not in known:
            await self._checkpointer.save(wait=True)
            known = {each.version.number: each for each in (await listed(context)).checkpoints}
        if (found := known.get(head)) is None:
            why = self._checkpointer.last_failure or "the trainer lists no checkpoint of it"
            return Failure(category="server", message=f"version {head} could not be saved: {why}", key="save")
        entry = {
            "checkpoint": found.name,
            "step": context.state.ledger.step,
            "version": head,
            "size_bytes": found.size_bytes,
            "created": time.time(),
        }
        await asyncio.to_thread(self._journal.name, name, entry)
        return SaveResult(checkpoint=f"{context.run_id}/{name}", version=head)

    async def _loaded(self, load: Load) -> Result:
        context, run = self._context, self._context.state
        own = Path(run.directory)
        try:
            directory, saved = await asyncio.to_thread(saved_by_name, own, self._journal, load.checkpoint)
        except Unknown as unknown:
            return Failure(category="user", message=str(unknown), key="checkpoint")
        await self._drop("LOADED")
        number, log = run.lineage.last_number + 1, context.event_log
        await log.commit(ev.NumberBurnt(run=run.id, number=number))
        source = "" if directory == own else str(directory)
        leader, before = context.workers.leader, run.lineage.head
        try:
            response = await leader.restore(
                saved["checkpoint"],
                number,
                log.state.store_id,
                source,
                weights_only=not load.optimizer,
            )
        except CallRefused as refused:
            if refused.reason not in UNREADABLE:
                raise
            return Failure(category="user", message=refused.message, key="checkpoint")
        await log.commit(
            ev.VersionRestored(
                at=log.now(),
                run=run.id,
                number=number,
                parent=before,
                ordinal=response.version.ordinal,
                digest=response.version.digest,
                checkpoint=saved["checkpoint"],
                frontier_step=max(run.ledger.step, response.version.ordinal),
                frontier_prompt=run.ledger.next_prompt,
                warmup_steps=0,
                layout=response.layout,
                kept=await log.history.kept(run.id, run.ledger.step),
            )
        )
        self._published = await leader.publish(number)
        return LoadResult(version=number)

    async def _prune(self) -> None:
        """Deletes calls that no checkpoint lacks: those before the oldest that a rewind may go back to."""
        checkpoints = self._context.state.checkpoints
        if not checkpoints:
            return
        oldest = min(number for _, number in checkpoints)

        def prune() -> None:
            for seq in sorted(self._journal.outcomes, reverse=True):
                if self._journal.kinds[seq] != "optim_step" or not self._journal.outcomes[seq]:
                    continue
                result = self._journal.result(seq)
                if isinstance(result, OptimStepResult) and result.version <= oldest:
                    return self._journal.prune(seq)

        await asyncio.to_thread(prune)


def _told(call: Forward | ForwardBackward, response: trainer.ComputeLossResponse) -> ForwardResult:
    tokens = counted(call) if isinstance(call, ForwardBackward) else counted(_learning(call))
    return ForwardResult(
        kind=call.kind,
        log_probs=[list(each.values) for each in response.sequences],
        metrics={"loss:sum": response.loss, "tokens:sum": float(tokens)},
    )


def _learning(call: Forward) -> ForwardBackward:
    return ForwardBackward(data=call.data, loss=call.loss, options=call.options)
