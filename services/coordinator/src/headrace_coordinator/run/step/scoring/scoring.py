"""Asks the reward instances of a run for scores, and asks again where an instance is lost or a scorer broken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace_servicekit.causes import cause_first
from headrace_servicekit.rpc.episodes import IMAGE
from headrace_servicekit.rpc.trajectories import chat_message, segments_of

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.run.staffing import Staffing
from headrace_coordinator.run.step.scoring.streams import Question, ScoreStream, now
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.workers.clients import slot_key

SCORER_RETRIES = 2
UNAVAILABLE_S = 2.0
"""How long an answer waits until it is asked about again, after what its scorer stands on was not there."""
BATCH = 512
GRACE_S = 60.0
"""Beyond reward.timeout_s for each open question: what an instance may take for everything else."""
LOOK_S = 5.0
SHOWN_S = 2.0
"""After so long without a moment in which all was scored, the run is shown to wait for its scorers."""


def score_item(
    item: DataItem, message: common.Trajectory, tokens: int, *, evaluation: bool
) -> reward.ScoreItem:
    """What a reward instance needs of a trajectory, of which a policy sampled `tokens`.

    The texts with special tokens are taken out of the trajectory: nobody else reads them. Of a conversation the
    policy's last turn is judged as its answer, beside all that was said.
    """
    completion = message.completion_text
    conversation = message.conversation if message.HasField("conversation") else None
    if conversation is not None:
        turns = [each.content for each in conversation.messages if each.role == "assistant"]
        completion = turns[-1] if turns else ""
    asked = reward.ScoreItem(
        sample=message.sample,
        attempt=message.attempt,
        prompt=item.question,
        completion=completion,
        conversation=conversation,
        reference=item.answer,
        metadata_json=item.metadata_json,
        finish_reason=message.finish_reason,
        token_count=tokens,
        evaluation=evaluation,
        messages=[chat_message(turn) for turn in item.messages],
    )
    if message.raw_prompt_text or message.raw_completion_text:
        prompt, *rest = (segment.tokens.token_ids for segment in segments_of(message))
        asked.prompt_ids.extend(prompt)
        for ids in rest:
            asked.completion_ids.extend(ids)
        asked.raw_prompt, asked.raw_completion = message.raw_prompt_text, message.raw_completion_text
        message.ClearField("raw_prompt_text")
        message.ClearField("raw_completion_text")
    return asked


def add_pictures(item: reward.ScoreItem, message: common.Trajectory) -> None:
    """Adds what an episode's cameras showed: references, where the bodies stay with its producer."""
    for segment in segments_of(message):
        for found, target in (
            (segment.actions.observation, item.pictures),
            (segment.actions.final_observation, item.last_picture),
        ):
            for name, tensor in found.items():
                if name.startswith(IMAGE):
                    target[name.removeprefix(IMAGE)].CopyFrom(tensor)


class Scoring:
    """Scores items on every reward instance of the run, until `close`.

    `main_stage`: the stage of items that name none.
    """

    def __init__(
        self,
        staffing: Staffing,
        timer: StepTimer,
        deliver: Callable[[list[reward.ScoreResult]], None],
        main_stage: str = "score",
    ) -> None:
        self._staffing = staffing
        self._workers = staffing.workers
        self._timer = timer
        self._deliver = deliver
        self._waiting: list[reward.ScoreItem] = []
        self._streams = staffing.score_streams
        self._broken: Counter[Question] = Counter()
        self._resting = 0
        """Items that are put again after UNAVAILABLE_S."""
        self._outages: dict[str, tuple[float, ExitStack]] = {}
        """Stages with a scorer that cannot be asked now: since when, and what shows that scoring waits for it."""
        self._told: set[str] = set()
        """Stages of which the user was told so: one that comes and goes fills no log."""
        self._closed = False
        self._main_stage = main_stage
        self._open: Counter[str] = Counter()
        """Open questions by stage; when a stage's first one was asked is in `_busy_since`."""
        self._busy_since: dict[str, float] = {}

    def put(self, item: reward.ScoreItem) -> None:
        """Adds an item, which is asked soon, together with all others that wait."""
        self._waiting.append(item)
        self._streams.news.beat()

    def close(self) -> None:
        """No more items will come."""
        self._closed = True
        self._streams.news.beat()

    @property
    def _finished(self) -> bool:
        left = self._waiting or self._resting or any(stream.asked for stream in self._streams.all)
        return self._closed and not left

    @property
    def _limit_s(self) -> float:
        return self._workers.spec.limits.step_timeout_s

    async def run(self) -> None:
        """Works until it is closed and every item has its result. A lost instance's items go to another one."""
        draining = self._workers.fleet.any_draining
        staying = [worker for worker in self._workers.rewards if not draining([worker])]
        self._streams.begin(self, staying, self._limit_s)
        try:
            while not self._finished:
                news = self._streams.news.next()
                self._streams.retire(self._limit_s)
                if self._waiting:
                    await self._open_streams()
                futures: set[asyncio.Future[None]] = {news, *(stream.task for stream in self._streams.all)}
                await asyncio.wait(futures, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for stream in list(self._streams.all):
                    await self._remove_ended(stream)
        finally:
            for stage in list(self._outages):
                self._back(stage)
            if self._finished:
                self._streams.rest()
            else:
                for stream in self._streams.all:
                    self._stopped(stream)
                await self._streams.end()  # Nobody needs the results any more.

    async def _open_streams(self) -> None:
        open_to = {stream.worker.incarnation for stream in self._streams.live}
        if not open_to:
            await self._staffing.staff_rewards()
        await self._staffing.lease_scorers()
        for worker in self._workers.rewards:
            if worker.incarnation not in open_to:
                self._streams.open(worker, self._limit_s)

    async def _remove_ended(self, stream: ScoreStream) -> None:
        """Ends a stream whose instance is gone or silent; asks the items of one that has ended elsewhere."""
        patience = self._workers.spec.reward.timeout_s * len(stream.asked) + GRACE_S
        silent = bool(stream.asked) and now() - stream.heard_at > patience
        if silent or not self._workers.fleet.alive(stream.worker.incarnation):
            stream.task.cancel()
        elif not stream.task.done():
            return
        stream.over = True
        await asyncio.wait({stream.task})
        self._streams.all.remove(stream)
        self._stopped(stream)
        error = None if stream.task.cancelled() else stream.task.exception()
        if error is not None and not isinstance(error, InstanceDown):
            raise error
        if stream.asked or error is not None or stream.task.cancelled():
            self._waiting[:0] = stream.asked.values()
            for stage, count in Counter(item.stage for item in stream.asked.values()).items():
                self._count(stage, -count)
            if stream.worker in self._workers.rewards:
                self._workers.rewards.remove(stream.worker)
            await self._workers.fleet.fate(stream.worker.incarnation)
            self._staffing.check_scorers_deaths()

    # --- one stream

    def share(self, stream: ScoreStream) -> list[reward.ScoreItem]:
        """Items that wait, up to this stream's fair part of all that have no result."""
        deaths, run = self._workers.fleet.deaths, self._workers.run
        if not deaths.may_begin(run, stream.worker.instance) or (deaths.suspected(run) and stream.asked):
            return []
        everything = len(self._waiting) + sum(len(each.asked) for each in self._streams.all)
        fair = -(-everything // len(self._streams.live))
        count = max(0, min(BATCH, fair - len(stream.asked)))
        items, self._waiting = self._waiting[:count], self._waiting[count:]
        if items and not stream.asked:
            stream.heard_at = now()
            stream.use = deaths.begin(run, stream.worker.instance)
            what = f"the scorers at {stream.worker.instance.instance} to score answers"
            stream.shown.enter_context(self._workers.fleet.waits.named(run, what, after=SHOWN_S))
        stream.asked.update((_question(item), item) for item in items)
        for stage, count in Counter(item.stage for item in items).items():
            self._count(stage, count)
        return items

    def _stopped(self, stream: ScoreStream) -> None:
        """A stream was cut with questions in hand: its instance may have died of them."""
        stream.shown.close()
        if stream.use is not None:
            self._workers.fleet.deaths.broke(stream.use)
            stream.use = None

    def _count(self, stage: str, change: int) -> None:
        """Counts the open questions of a stage; its time is that in which there are some."""
        clock = self._workers.fleet.event_log.monotonic
        if not self._open[stage]:
            self._busy_since[stage] = clock()
        self._open[stage] += change
        if not self._open[stage]:
            since = max(self._busy_since.pop(stage), self._timer.started)  # A step may have ended meanwhile.
            devices = tuple(device for worker in self._workers.rewards for device in worker.devices)
            self._timer.add(stage or self._main_stage, (since, clock()), devices)

    def take(self, stream: ScoreStream, results: Iterable[reward.ScoreResult]) -> None:
        """Delivers final results; a broken scorer is asked again."""
        final: list[reward.ScoreResult] = []
        ended = Counter[str]()
        for result in results:
            question = _question(result)
            item = stream.asked.pop(question, None)
            if item is None:
                continue
            ended[item.stage] += 1
            if result.status == reward.SCORE_STATUS_UNAVAILABLE:
                if now() - self._away_since(item.stage, result.detail) < self._limit_s:
                    self._put_later(item)
                    continue
                # An evaluation has no other end, and a step has run into the same limit.
                result.status = reward.SCORE_STATUS_SCORER_BROKEN
                final.append(result)
                continue
            self._back(item.stage)
            if result.status == reward.SCORE_STATUS_SCORER_BROKEN and self._broken[question] < SCORER_RETRIES:
                self._broken[question] += 1
                self._waiting.append(item)
            else:
                final.append(result)
        for stage, count in ended.items():
            self._count(stage, -count)
        if not stream.asked:
            stream.shown.close()
        if stream.use is not None and not stream.asked:
            self._workers.fleet.deaths.end(stream.use)
            self._workers.fleet.deaths.clear(self._workers.run)
            stream.use = None
        if final:
            self._deliver(final)
        self._streams.news.beat()

    def _away_since(self, stage: str, why: str) -> float:
        """When a stage's scorer could not be asked for the first time since it was last there."""
        if stage not in self._outages:
            shown = ExitStack()
            shown.enter_context(self._workers.fleet.waits.named(self._workers.run, f"a scorer: {why}"))
            self._outages[stage] = now(), shown
            if stage not in self._told:
                self._told.add(stage)
                self._workers.note(cause_first(f"a scorer: {why}", "answers are kept, and it is asked again"))
        return self._outages[stage][0]

    def _back(self, stage: str) -> None:
        if stage in self._outages:
            self._outages.pop(stage)[1].close()

    def _put_later(self, item: reward.ScoreItem) -> None:
        """An answer that its scorer cannot judge now is kept: the step waits, as long as its time limit allows."""
        self._resting += 1

        def put() -> None:
            self._resting -= 1
            self.put(item)

        asyncio.get_running_loop().call_later(UNAVAILABLE_S, put)


def _question(message: reward.ScoreItem | reward.ScoreResult) -> Question:
    return *slot_key(message.sample), message.stage


async def score_all(staffing: Staffing, items: Iterable[reward.ScoreItem]) -> list[reward.ScoreResult]:
    """A result for each item, in any order."""
    results: list[reward.ScoreResult] = []
    scoring = Scoring(staffing, StepTimer(staffing.workers.fleet.event_log.monotonic), results.extend)
    for item in items:
        scoring.put(item)
    scoring.close()
    await scoring.run()
    return results
