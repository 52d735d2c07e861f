"""What Generate streams bring: finished trajectories to the ledger, the relay and the scorers; partial ones back to
dispatch. Keeps no slot's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_servicekit.rpc.digests import digest_and_size

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.dispatch import accepts
from headrace_coordinator.domain.ledger.slot_index import ASSIGNED, FINISHED, Slot
from headrace_coordinator.projections.trajectories import LOG_PROBS_KEPT, is_kept
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.dispatch import Dispatch
from headrace_coordinator.run.step.scoring.scoring import (
    first_log_probs,
    first_text_bytes,
    sampled,
    score_item,
)
from headrace_coordinator.run.step.state import Batch, Scored, Settle, Shown
from headrace_coordinator.run.step.trajectories import Relay
from headrace_coordinator.run.workers.clients import Published, SlotKey
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.waits import Notifier

SAMPLE_RETRIES = 2
TAKEN_AT_ONCE, TAKEN_BYTES = 64, 1 << 20
"""Bodies of a large response: while the next ones are looked at, these are scored."""
FAILED = (common.FINISH_REASON_ERROR, common.FINISH_REASON_ABORTED)


class Taken(NamedTuple):
    """A finished trajectory that may fill its slot; `versions` are those that sampled it, with their tokens."""

    slot: Slot
    body: common.Trajectory
    size: int
    tokens: int
    versions: list[tuple[int, int]]


class Receive:
    """Takes what the rollouts of one step attempt send."""

    def __init__(
        self,
        context: RunContext,
        relay: Relay,
        published: Published,
        batch: Batch,
        news: Notifier,
        dispatch: Dispatch,
        score: Callable[[reward.ScoreItem], None],
        settle: Settle,
    ) -> None:
        self._context = context
        self._ledger = context.state.ledger
        self._relay = relay
        self._published = published
        self._batch = batch
        self._news = news
        self._dispatch = dispatch
        self._give_to_scoring = score
        self._settle = settle
        self._stale_versions: dict[int, bool] = {}

    async def adopt_finished(self) -> None:
        """After an aborted attempt: finished slots go straight to scoring; those whose body is lost are made again."""
        finished = self._ledger.members(FINISHED)
        found = await self._relay.bodies(finished, self._context.workers.producers) if finished else {}
        for slot in finished:
            if sized := found.get((slot.prompt, slot.sample)):
                self._score(Taken(slot, *sized, *sampled(sized[0])))
        lost = [slot for slot in finished if (slot.prompt, slot.sample) not in found]
        self._dispatch.take_back(lost)

    def take_partials(self, member: RolloutClient, partials: Iterable[rollout.PartialSample]) -> None:
        """Samples that were stopped (a drain, a late or revoked lease) go on from their prefix elsewhere."""
        stopped: list[Slot] = []
        for partial in partials:
            key = (partial.sample.prompt_ordinal, partial.sample.sample_index)
            slot = self._ledger.slot(*key)
            mine = slot is not None and (slot.holder, slot.attempt) == (member.incarnation, partial.attempt)
            if slot is None or not mine or slot.state != ASSIGNED:
                self._batch.refused += 1
                continue
            if partial.state.token_ids:
                self._dispatch.resume_from(key, partial.state)
                self._context.tail.moved(cached=partial.state.HasField("cache"))
            stopped.append(slot)
        self._dispatch.take_back(stopped)

    async def take_bodies(self, bodies: list[common.Trajectory]) -> None:
        """Finished trajectories of one response."""
        for taken in self._portions(bodies):
            good = [each for each in taken if self._usable(each)]
            self._post_finished(good)
            for each in taken:
                if each.slot.state == FINISHED:
                    self._score(each)
                elif each.slot.state == ASSIGNED:
                    self._refuse(each)
            self._news.beat()  # There is room for the next group.
            await asyncio.sleep(0)

    def _portions(self, bodies: list[common.Trajectory]) -> Iterator[list[Taken]]:
        """What may fill a slot, at most TAKEN_AT_ONCE of about TAKEN_BYTES; each slot once."""
        portion: dict[SlotKey, Taken] = {}
        size = 0
        for body in bodies:
            taken = self._accepted(body)
            if taken is None or (taken.slot.prompt, taken.slot.sample) in portion:
                continue
            portion[taken.slot.prompt, taken.slot.sample] = taken
            size += taken.size
            if len(portion) == TAKEN_AT_ONCE or size >= TAKEN_BYTES:
                yield list(portion.values())
                portion, size = {}, 0
        if portion:
            yield list(portion.values())

    def _accepted(self, body: common.Trajectory) -> Taken | None:
        """What it is of its slot; None for a repetition, and for what is refused."""
        digest, size = digest_and_size(body)
        slot = self._ledger.slot(body.sample.prompt_ordinal, body.sample.sample_index)
        if slot is None or digest != body.body_digest or accepts(slot, body.attempt, digest):
            self._batch.refused += 1
            return None
        return Taken(slot, body, size, *sampled(body)) if slot.state == ASSIGNED else None

    def _usable(self, taken: Taken) -> bool:
        ended_well = taken.body.finish_reason not in (*FAILED, common.FINISH_REASON_PROMPT_TOO_LONG)
        return ended_well and not any(self._stale(number) for number, _ in taken.versions)

    def _stale(self, number: int) -> bool:
        """Whether a version is too old to train on, or abandoned: the same for the whole attempt."""
        if (known := self._stale_versions.get(number)) is None:
            staleness = self._context.state.lineage.staleness(number, self._published.version.number)
            known = staleness is None or staleness > self._context.spec.algorithm.max_staleness
            self._stale_versions[number] = known
        return known

    def _post_finished(self, good: list[Taken]) -> None:
        """One event for a portion, before whatever else is said of its slots."""
        if good:
            run, now = self._context.run_id, self._context.event_log.now()
            slots = [
                (
                    taken.slot.prompt,
                    taken.slot.sample,
                    taken.slot.attempt,
                    taken.body.body_digest,
                    taken.tokens,
                )
                for taken in good
            ]
            self._context.event_log.post(ev.SlotsFinished(at=now, run=run, slots=slots))
            for taken in good:
                self._context.saw_length(taken.slot.prompt, taken.tokens)
                prompt = len(taken.body.segments[0].tokens.token_ids) if taken.body.segments else 0
                self._context.tail.finished(
                    taken.slot.holder, taken.tokens, self._context.event_log.monotonic(), prompt
                )

    def _refuse(self, taken: Taken) -> None:
        slot, reason = taken.slot, taken.body.finish_reason
        if reason == common.FINISH_REASON_PROMPT_TOO_LONG:
            self._settle.drop(slot.prompt, "PROMPT_TOO_LONG", "the prompt does not fit model.max_context")
        elif reason not in FAILED:
            self._settle.drop(slot.prompt, "ABANDONED", "a segment is too stale or of an abandoned version")
        elif slot.failures < SAMPLE_RETRIES:
            self._dispatch.take_back([slot], failed=True)
        else:
            why = f"failed {slot.failures + 1} times: ended with {common.FinishReason.Name(reason)}"
            self._settle.drop(slot.prompt, "GROUP_INCOMPLETE", f"sample {slot.sample} {why}")

    def _shown(self, taken: Taken) -> Shown | None:
        """Of a large step's answers only so many are shown; of the others nothing is kept but the reward."""
        ledger, slot, body = self._ledger, taken.slot, taken.body
        place = ledger.ordinal(slot.prompt, slot.sample) - ledger.frontier
        room = self._context.spec.tracking.trajectories_per_step
        if not is_kept(place, ledger.prompts_per_step, ledger.group_size, room):
            return None
        log_probs, lengths = first_log_probs(body, LOG_PROBS_KEPT), first_text_bytes(body, LOG_PROBS_KEPT)
        return Shown(body.completion_text, body.finish_reason, taken.versions, log_probs, lengths)

    def _score(self, taken: Taken) -> None:
        slot, body = taken.slot, taken.body
        oldest = min((number for number, _ in taken.versions), default=self._published.version.number)
        self._batch.scored[slot.prompt, slot.sample] = Scored(oldest, self._shown(taken))
        self._relay.put((slot.prompt, slot.sample), body, taken.size)
        self._give_to_scoring(
            score_item(self._context.item(slot.prompt), body, taken.tokens, evaluation=False)
        )
