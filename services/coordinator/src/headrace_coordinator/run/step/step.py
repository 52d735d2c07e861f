"""One step: attempts, each from open slots to groups that are accumulated or dropped, until one succeeds; then the
commit, the record and its checks.
"""

from __future__ import annotations

import asyncio

from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.resources.views import StepView
from headrace_schema.sections.generating import quantized
from headrace_servicekit.causes import cause_first
from headrace_servicekit.rpc.digests import set_digest

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import Drops, compact_drops
from headrace_coordinator.domain.ledger.slot_index import ACCUMULATED, DROPPED, Slot
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.step.certificate import certify, settled_lines, step_view
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.given import GivenAnswers
from headrace_coordinator.run.step.learning import (
    AttemptLost,
    Learning,
    MessagesLost,
    identities,
    under_lease,
)
from headrace_coordinator.run.step.loans import Borrowing, Helping, Sharing
from headrace_coordinator.run.step.state import Learns
from headrace_coordinator.run.workers.clients import Published

STEP_ATTEMPTS = 3
PROJECT_AFTER_S = 0.001
"""So that both calls are on their way before the views are made."""
MISMATCH_BOUND = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |engine − trainer| log-prob that rounding explains, by the type of the forward pass."""
QUANTISED_BOUND = 0.3
"""The same where the engine computes with fewer bits than the trainer."""
FIRST_KL_BOUND = {"float32": 1e-5, "bfloat16": 1e-2}
"""Mean KL between two computations of one model that rounding explains."""


class RunFailed(Exception):
    """The run cannot go on; the message is for its user."""


class Attempt:
    """Generates and learns, at once or one after the other, as the placement says."""

    def __init__(self, generation: Generation | GivenAnswers, *, may_help: bool) -> None:
        """`may_help`: helpers may learn a part of it."""
        self._context = context = generation.context
        self._ledger = context.state.ledger
        self._timer = generation.timer
        self._clock = context.event_log.monotonic
        self._generation = generation
        self._state = generation.begin()
        self._learning = Learning(self._state)
        self._helping = Helping(self._state, wanted=may_help and not context.waits_for_batch)
        self._borrowing = Borrowing(self._state)
        self._sharing = Sharing(self._state)

    async def run(self) -> None:
        """Works until every group is accumulated or dropped. Raises `MessagesLost` or `AttemptLost`.

        1. Rollouts generate, reward instances score, and whole groups settle.
        2. The trainer group learns groups as they settle, or all of them once it has the devices; helpers learn beside.
        3. The helpers' gradients are added, and the trainer group learns what is left.
        """
        tail, helping, borrowing = self._context.tail, self._helping, self._borrowing
        if helping.wanted or borrowing.wanted:
            tail.begin(self._clock())
        if self._state.streams:
            await gather_all(self._generate(), self._learn(), helping.run())
        else:
            await gather_all(self._generate(), helping.run(), self._sharing.run(), borrowing.run())
            began = self._clock()
            await self._switch_to_trainers()
            tail.switched.add(self._clock() - began)
            await self._begin()
        tail.end(moved=helping.moved or borrowing.moved)
        await helping.contribute()
        if self._state.groups.collect() or not self._state.streams:
            await self._learning.run()
        devices = self._context.workers.learning_devices
        tail.learned(self._learning.seconds, self._learning.tokens, len(devices))
        await self._context.event_log.flush()
        if unsettled := self._ledger.unsettled():
            raise CallRefused("coordinator", "INTERNAL", f"groups {unsettled} were lost in the step")

    async def _generate(self) -> None:
        await self._generation.fill()
        self._state.complete()
        self._context.event_log.wake()  # No turn on shared devices ends any more.
        groups, joins = self._state.groups, self._state.learns is Learns.JOINING
        if joins and await self._generation.spent() and (groups.backlog or self._context.waits_for_batch):
            await self._switch_to_trainers()
        groups.go_on()

    async def _learn(self) -> None:
        await self._borrowing.run()
        await self._begin()
        await self._learning.run()

    async def _switch_to_trainers(self) -> None:
        index = self._ledger.index
        # Rollouts that make answers of the next steps keep their devices.
        idle = not (self._state.ahead and (index.waiting or index.assigned))
        with self._timer.stage("switch"):
            await self._context.devices.hand_devices_to_trainers(complete=idle)

    async def _begin(self) -> None:
        """Opens the attempt at the trainer group, once what it begins with is durable."""
        ledger, lineage = self._ledger, self._context.state.lineage
        await self._context.event_log.flush()
        await self._context.snapshot_taken()
        leader = self._context.workers.leader
        await under_lease(
            self._context,
            lambda: leader.begin(ledger.step, ledger.attempt, lineage.head, lineage.last_number),
        )


class Step:
    """One step of the run, over all its attempts."""

    def __init__(self, generation: Generation | GivenAnswers) -> None:
        self._generation = generation
        self._context = context = generation.context
        self._event_log = context.event_log
        self._ledger = context.state.ledger
        self._published = generation.published
        self._timer = generation.timer
        self._trajectories = generation.trajectories
        self._nonfinite = 0
        self.observed: list[ev.Observed] = []
        """Pass rates of the step's items, for a curriculum; set when the step ends."""
        self.view: StepView | None = None
        """The committed step as people see it; none for one that was skipped."""
        self.learned_after_s = 0.0
        """The seconds of learning after the last answer was made."""

    async def run(self) -> Published:
        """Until the step is committed and recorded, or skipped; returns the version that the next one begins with.

        Raises the faults that the run loop recovers from. The timer restarts for the next step.
        """
        while True:
            opened = self._open()
            try:
                await Attempt(self._generation, may_help=not self._nonfinite).run()
            except (MessagesLost, AttemptLost) as lost:
                await self._again(str(lost))
                continue
            if not self._ledger.members(ACCUMULATED):
                return await self._skip("every group was dropped")
            response, published = await under_lease(self._context, lambda: self._decision(opened))  # noqa: B023
            if published is not None:
                return published
            self._context.recording.fails(trainer.CommitResult.Name(response.result))
            self._nonfinite += response.result == trainer.COMMIT_RESULT_NONFINITE
            await self._again(trainer.CommitResult.Name(response.result))
            if self._nonfinite >= STEP_ATTEMPTS:
                return await self._skip("NONFINITE")

    async def _decision(self, opened: ev.StepOpened) -> tuple[trainer.CommitStepResponse, Published | None]:
        decision = asyncio.ensure_future(self._decide(opened))
        self._context.decision = decision
        return await asyncio.shield(decision)

    async def _decide(self, opened: ev.StepOpened) -> tuple[trainer.CommitStepResponse, Published | None]:
        """Commits and records: whoever stops the step waits for this to end, so that no update is thrown away."""
        response = await self._commit(opened)
        if response.result == trainer.COMMIT_RESULT_COMMITTED:
            return response, await self.record(opened, response)
        return response, None

    def _open(self) -> ev.StepOpened:
        """Posts StepOpened, which the attempt's first assignment and its BeginStep wait to be durable."""
        lineage = self._context.state.lineage
        opened = ev.StepOpened(
            run=self._context.run_id,
            step=self._ledger.step,
            attempt=self._ledger.attempt + 1,
            base=lineage.head,
            number=lineage.last_number + 1,
            goes_on=self._generation.goes_on,
        )
        self._event_log.post(opened)
        return opened

    async def _commit(self, opened: ev.StepOpened) -> trainer.CommitStepResponse:
        leader, limit = self._context.workers.leader, self._context.spec.limits.step_timeout_s
        digest = set_digest(identities(self._ledger.members(ACCUMULATED)))
        dropped = compact_drops((s.prompt, s.sample, s.reason) for s in self._ledger.members(DROPPED))
        manifest = ev.encode(self._skipped(dropped))
        with self._timer.stage("learn", leader.devices):
            return await leader.commit(
                opened.step, opened.attempt, opened.base, opened.number, digest, manifest, limit
            )

    def _skipped(self, dropped: Drops) -> ev.StepSkipped:
        return ev.StepSkipped(
            at=self._event_log.now(),
            run=self._context.run_id,
            step=self._ledger.step,
            dropped=dropped,
            refilled=self._ledger.refilled,
            observed=self.observed,
        )

    async def record(self, opened: ev.StepOpened, response: trainer.CommitStepResponse) -> Published:
        """Appends version, trained slots and certificate as one event; only then may the trainer publish and go on."""
        context, slots = self._context, self._ledger.step_slots
        self._generation.count_time()
        certificate = certify(context, opened, response, slots, self._trajectories)
        self.observed = context.observed(slots)
        self._same_counts(response, slots)
        self._first_step_agrees(certificate)
        self._mismatch_is_bounded(certificate)
        self._first_kl_is_zero(certificate.ordinal, response.figures.get("reference_kl"))
        view = step_view(context, certificate, response, slots, self._timer, self._trajectories)
        self.view = view
        self._trajectories.rate(response.rated)
        self.learned_after_s = self._timer.after("learn", "generate")
        context.keep_time("step", certificate.ordinal, self._timer)
        await self._event_log.commit(
            ev.StepCommitted(
                run=context.run_id,
                certificate=certificate,
                view=view.model_dump(mode="json"),
                observed=self.observed,
            )
        )
        leader = context.workers.leader

        async def recorded() -> Published:
            with self._timer.stage("sync", leader.devices):
                return await leader.recorded(opened.step, opened.attempt, opened.number)

        async def project() -> None:
            try:
                await asyncio.sleep(PROJECT_AFTER_S)
            finally:  # Where the calls fail, the step is recorded all the same.
                context.projection.step(view)
                lines = settled_lines(context, certificate, slots, self._trajectories)
                prompts = {line.prompt_ordinal for line in lines} if context.modality.images else ()
                context.projection.trajectories(lines, {each: context.item(each).images for each in prompts})

        # While the trainer works, retention ends and the files are written.
        published: Published
        published, _, _ = await gather_all(recorded(), self._end_retention(slots), project())
        self._generation.step_ended(slots)
        self._warn(view)
        self._check_drop_rate()
        return published

    def _warn(self, view: StepView) -> None:
        """Tells the run's user what makes the run learn nothing, where that has changed."""
        found = self._context.warnings.of(view)
        if found is not None and found.keys() != self._context.state.warnings.keys():
            self._event_log.post(ev.Warned(run=self._context.run_id, warnings=found))

    def _same_counts(self, response: trainer.CommitStepResponse, slots: list[Slot]) -> None:
        ours = sum(slot.state == ACCUMULATED for slot in slots)
        if response.sequence_count != ours:
            raise RunFailed(
                f"the trainer counts {response.sequence_count} sequences in step {self._ledger.step + 1}, "
                f"the ledger {ours}: the certificate cannot attest both"
            )

    def _first_step_agrees(self, certificate: ev.Certificate) -> None:
        """Engine and trainer hold the same weights at a start and at each resume, so their log-probs must agree.

        A step in which nothing was compared, or older weights sampled too, leaves the check to the next one.
        """
        found = certificate.log_prob_mismatch_mean
        if not self._context.agreement_due or found is None or certificate.max_staleness:
            return
        spec = self._context.spec
        what = quantized(spec.rollout.engine_options)
        bound = QUANTISED_BOUND if what else MISMATCH_BOUND[spec.model.dtype]
        if not found <= bound:
            raise RunFailed(
                f"engine and trainer disagree: mean |log-prob difference| is {found:.3g} over "
                f"{certificate.log_prob_compared_tokens} tokens of step {certificate.ordinal}, the first since the "
                f"start or resume, above {bound} for {what or spec.model.dtype}; they do not compute the "
                "same model"
            )
        self._context.agreement_due = False
        self._context.note(
            f"engine and trainer agree: mean |log-prob difference| {found:.2g} over "
            f"{certificate.log_prob_compared_tokens} tokens, bound {bound}"
            f"{f', the engine with {what}' if what else ''}",
            plain=True,
        )

    def _mismatch_is_bounded(self, certificate: ev.Certificate) -> None:
        """Finds an engine that samples from other weights than it says, or computes another model; at every step.

        Tokens of older versions differ by what was learned since: a step with some of them is not judged.
        """
        found, bound = certificate.log_prob_mismatch_kl, self._context.spec.limits.max_mismatch_kl
        if certificate.max_staleness or found is None or bound is None or found <= bound:
            return
        raise RunFailed(
            cause_first(
                "the engine's weights are not those it names, or it computes another model",
                f"in step {certificate.ordinal} the KL of its distribution to the trainer's is {found:.3g} nats a "
                f"token over {certificate.log_prob_compared_tokens} tokens, above {bound:g}. The step is not recorded: "
                "repair the engine and go on with from_checkpoint, or set a higher bound",
                "limits.max_mismatch_kl",
            )
        )

    def _first_kl_is_zero(self, ordinal: int, found: float | None) -> None:
        """A run's first step begins at its reference, unless that is another model or the run is a fork."""
        spec = self._context.spec
        if ordinal != 1 or found is None or spec.trainer.reference or spec.from_checkpoint:
            return
        bound = FIRST_KL_BOUND[spec.model.dtype]
        if not found <= bound:
            raise RunFailed(
                f"the KL to the reference is {found:.3g} in the first step, above {bound} for {spec.model.dtype}: the "
                "reference is not the run's initial policy"
            )
        self._context.note(f"the policy begins at its reference: KL {found:.2g}, bound {bound}", plain=True)

    async def _end_retention(self, slots: list[Slot]) -> None:
        keys = [slot.key for slot in slots]
        for worker in self._context.workers.producers:
            try:
                await worker.end_retention(keys)
            except (InstanceDown, CallRefused) as fault:
                # Retention ends with the process too; it must not undo a recorded step.
                self._context.note(f"retention at {worker.instance.instance} was not ended: {fault}")

    def _check_drop_rate(self) -> None:
        ledger, spec = self._context.state.ledger, self._context.spec
        # Judged over at least ten steps' worth of slots, so that one bad group at the start fails nothing.
        judged = max(ledger.terminal_total, 10 * spec.slots_per_step)
        if ledger.dropped_total > spec.limits.max_drop_rate * judged:
            raise RunFailed(
                cause_first(
                    ledger.last_drop,
                    f"{ledger.dropped_total} of {ledger.terminal_total} slots were dropped, the last of them so, more "
                    f"than {spec.limits.max_drop_rate:.0%}: see /certificates for all reasons",
                    "limits.max_drop_rate",
                )
            )

    async def _again(self, reason: str) -> None:
        await self._generation.stop()
        await self._abort(reason)
        with self._timer.stage("switch"):
            await self._context.devices.hand_devices_to_rollouts(self._published)

    async def _abort(self, reason: str) -> None:
        opened = (self._ledger.step, self._ledger.attempt)
        await self._context.record_abort(reason)
        await self._context.workers.leader.abort(*opened)

    async def _skip(self, why: str) -> Published:
        slots = self._ledger.step_slots
        dropped = compact_drops((slot.prompt, slot.sample, slot.reason or why) for slot in slots)
        self.observed = self._context.observed(slots)
        if self._ledger.open:
            await self._abort(why)
        await self._event_log.commit(self._skipped(dropped))
        await self._end_retention(slots)
        self._generation.step_ended(slots)
        self._check_drop_rate()
        self._generation.count_time()
        self._context.keep_time("skipped", self._ledger.step, self._timer)
        return self._published
