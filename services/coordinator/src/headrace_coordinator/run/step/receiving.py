"""Takes what streams of work bring: finished trajectories go to the ledger and to scoring, unfinished samples back to
dispatch. The ledger alone keeps the state of a slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_servicekit.causes import cause_first
from headrace_servicekit.rpc.digests import digest_and_size
from headrace_servicekit.rpc.trajectories import segments_of, turn_roles

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.episode_figures import told_of
from headrace_coordinator.domain.ledger.dispatch import accepts
from headrace_coordinator.domain.ledger.slot_index import ASSIGNED, FINISHED, Slot
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.step.dispatch import Dispatch
from headrace_coordinator.run.step.scoring.rewards import Rewards
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.trajectories import Shown, Trajectory, failure_of, is_shown, sampled
from headrace_coordinator.run.workers.clients import SlotKey, slot_key
from headrace_coordinator.run.workers.rollout_client import RolloutClient

log = logging.getLogger(__name__)
SAMPLE_RETRIES = 2
TAKEN_AT_ONCE, TAKEN_BYTES = 64, 1 << 20
"""Trajectories of a large response that are taken together: while the next ones are looked at, these are scored."""
FAILED = (common.FINISH_REASON_ERROR, common.FINISH_REASON_ABORTED)
FEWEST_IN_A_ROW, MOST_IN_A_ROW = 5, 64
"""Bounds of the failed groups in a row, with no good episode between, that end a run; the number is that of its
environments. With fewer, starts that fail at once could outnumber good episodes, which take longer.
"""


class Receiver:
    """Takes what rollouts send."""

    def __init__(self, attempt: AttemptState, dispatch: Dispatch, rewards: Rewards) -> None:
        self._attempt = attempt
        self._context = attempt.context
        self._ledger = attempt.ledger
        self._dispatch = dispatch
        self._rewards = rewards
        self._lags: dict[tuple[int, int], int | None] = {}

    async def adopt_finished(self) -> None:
        """Scores again what was finished before; samples whose message is lost are made again."""
        finished = self._ledger.finished()
        if not finished:
            return
        found = await self._attempt.trajectories.messages(finished, self._context.workers.producers)
        items = self._items(slot.prompt for slot in finished)
        for slot in finished:
            if message := found.get(slot.key):
                trajectory = Trajectory(slot, message, message.ByteSize(), *sampled(message))
                self._score(trajectory, items[slot.prompt])
        lost = [slot for slot in finished if slot.key not in found]
        self._dispatch.take_back(lost)

    def take_partials(self, worker: RolloutClient, partials: Iterable[rollout.PartialSample]) -> None:
        """Samples that were stopped (a drain, a late or revoked lease) go on from their prefix elsewhere."""
        stopped: list[Slot] = []
        for partial in partials:
            key = slot_key(partial.sample)
            slot = self._ledger.slot(*key)
            mine = slot is not None and (slot.holder, slot.attempt) == (worker.incarnation, partial.attempt)
            if slot is None or not mine or slot.state != ASSIGNED:
                self._attempt.refused += 1
                continue
            if partial.state.token_ids:
                self._dispatch.resume_from(key, partial.state)
                self._context.tail.moved(cached=partial.state.HasField("cache"))
            stopped.append(slot)
        self._dispatch.take_back(stopped)

    async def take_finished(self, messages: list[common.Trajectory]) -> None:
        """Finished trajectories of one response."""
        for portion in self._portions(messages):
            items = self._items(trajectory.slot.prompt for trajectory in portion)
            self._post_finished([trajectory for trajectory in portion if self._usable(trajectory)], items)
            for trajectory in portion:
                if trajectory.slot.state == FINISHED:
                    self._score(trajectory, items[trajectory.slot.prompt])
                elif trajectory.slot.state == ASSIGNED:
                    self._refuse(trajectory)
            self._attempt.work.beat()  # There is room for the next group.
            await asyncio.sleep(0)

    def _items(self, prompts: Iterable[int]) -> dict[int, DataItem]:
        """Data items by prompt: each is unpacked once, however many trajectories of its group arrive together."""
        return {prompt: self._context.item(prompt) for prompt in {*prompts}}

    def _portions(self, messages: list[common.Trajectory]) -> Iterator[list[Trajectory]]:
        """What may fill a slot, at most TAKEN_AT_ONCE of about TAKEN_BYTES; each slot once."""
        portion: dict[SlotKey, Trajectory] = {}
        size = 0
        for message in messages:
            trajectory = self._accepted(message)
            if trajectory is None or trajectory.slot.key in portion:
                continue
            portion[trajectory.slot.key] = trajectory
            size += trajectory.size
            if len(portion) == TAKEN_AT_ONCE or size >= TAKEN_BYTES:
                yield list(portion.values())
                portion, size = {}, 0
        if portion:
            yield list(portion.values())

    def _accepted(self, message: common.Trajectory) -> Trajectory | None:
        """The trajectory with its slot; None for a repetition, and for one that the slot refuses."""
        digest, size = digest_and_size(message)
        slot = self._ledger.slot(*slot_key(message.sample))
        if slot is None or digest != message.body_digest or accepts(slot, message.attempt, digest):
            self._attempt.refused += 1
            return None
        return Trajectory(slot, message, size, *sampled(message)) if slot.state == ASSIGNED else None

    def _usable(self, trajectory: Trajectory) -> bool:
        reason = trajectory.received.finish_reason
        ended_well = reason not in (*FAILED, common.FINISH_REASON_PROMPT_TOO_LONG)
        if not ended_well:
            return False
        ahead = self._ledger.step_of(trajectory.slot.prompt) - self._ledger.step
        return not any(self._stale(number, ahead) for number, _ in trajectory.versions)

    def _stale(self, number: int, ahead: int) -> bool:
        """Whether a version is abandoned, or will be too old for a step that is `ahead` of the one that is learned."""
        lineage = self._context.state.lineage
        if (key := (number, lineage.head)) not in self._lags:
            self._lags[key] = lineage.staleness(*key)
        lag = self._lags[key]
        return lag is None or lag + ahead > self._context.spec.algorithm.max_staleness

    def _post_finished(self, good: list[Trajectory], items: Mapping[int, DataItem]) -> None:
        """Appends one SlotsFinished for a portion, before any other event about its slots."""
        if not good:
            return
        context, tail = self._context, self._context.tail
        context.failed_in_a_row, now = 0, context.event_log.monotonic()
        slots = [(*each.slot.key, each.slot.attempt, each.received.body_digest, each.tokens) for each in good]
        context.event_log.post(ev.SlotsFinished(run=context.run_id, slots=slots))
        for each in good:
            context.saw_length(items[each.slot.prompt], each.tokens)
            segment = next(segments_of(each.received), common.Segment())
            prompt = len(segment.tokens.token_ids)
            tail.finished(each.slot.holder, each.tokens, now, prompt)

    def _refuse(self, trajectory: Trajectory) -> None:
        """Has the sample made again, or drops its group."""
        slot, reason = trajectory.slot, trajectory.received.finish_reason
        if reason == common.FINISH_REASON_PROMPT_TOO_LONG:
            longest = self._context.spec.data.prompt.longest
            what = (
                f"data.prompt.longest, {longest} tokens, or model.max_context"
                if longest
                else "model.max_context"
            )
            self._attempt.drop(slot.prompt, "PROMPT_TOO_LONG", f"the prompt does not fit {what}")
        elif reason not in FAILED:
            self._attempt.drop(slot.prompt, "ABANDONED", "a segment is too stale or of an abandoned version")
        elif slot.failures < SAMPLE_RETRIES:
            if why := failure_of(trajectory.received):
                log.warning("run %s: episode %s is made again: %s", self._context.run_id, slot.key, why)
            self._dispatch.take_back([slot], failed=True)
        else:
            why = failure_of(trajectory.received) or f"ended with {common.FinishReason.Name(reason)}"
            text = cause_first(why, f"sample {slot.sample} failed {slot.failures + 1} times")
            self._attempt.drop(slot.prompt, "GROUP_INCOMPLETE", text)
            self._count_failure(text)

    def _count_failure(self, text: str) -> None:
        """Raises CallRefused if the run's environments have failed at enough groups to conclude that none works."""
        context, section = self._context, self._context.spec.environment
        if section is None:
            return
        context.failed_in_a_row += 1
        if context.failed_in_a_row >= max(FEWEST_IN_A_ROW, min(section.count, MOST_IN_A_ROW)):
            what = f"{context.failed_in_a_row} groups failed one after the other, and no episode ended well between"
            raise CallRefused("simulator", "INVALID", cause_first(text, f"{what} them", "environment.tasks"))

    def _score(self, trajectory: Trajectory, item: DataItem) -> None:
        """Keeps a finished trajectory, and asks for its reward."""
        message = trajectory.received
        first = self._attempt.published.version.number
        trajectory.oldest = min((number for number, _ in trajectory.versions), default=first)
        if message.HasField("conversation"):
            trajectory.turn_rewards = [turn.reward for turn in message.conversation.turns]
            trajectory.turn_roles = turn_roles(message.conversation)
            trajectory.figures = dict(message.conversation.figures)
        if (told := told_of(message.completion_text)) is not None:
            trajectory.success = told.success
            if (section := self._context.spec.environment) is not None and section.max_episode_steps:
                cut = message.finish_reason == common.FINISH_REASON_TRUNCATED
                trajectory.cut_early = cut and trajectory.tokens < section.max_episode_steps
        shown = is_shown(self._context, trajectory.slot)
        trajectory.shown = Shown.of(message) if shown else None
        message.ClearField("branch_texts")  # Nobody reads them behind this.
        if trajectory.shown is None:
            trajectory.versions = ()
        self._attempt.trajectories.put(trajectory)
        self._rewards.ask(trajectory, message, item)
