"""Answers to the reward instances and back: shared out, asked again where an instance is lost, named nowhere twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace_coordinator.fleet.deaths import Deaths
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.run.step.scoring import scoring, streams
from headrace_coordinator.run.step.scoring.scoring import SCORER_RETRIES, Scoring, score_all
from headrace_coordinator.run.step.scoring.streams import ScoreStreams
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.waits import Waits


@dataclass(eq=False)
class Judge:
    """A reward member that answers what it is asked, until it is told otherwise."""

    incarnation: str
    asked: list[tuple[int, int]] = field(default_factory=list)
    streams: int = 0
    open_streams: int = 0
    dies_after: int = 1 << 30
    silent: bool = False
    dies_idle: bool = False
    draining: bool = False
    late_reads: list = field(default_factory=list)
    broken: Counter = field(default_factory=Counter)
    away: Counter = field(default_factory=Counter)
    devices: tuple = ()

    @property
    def instance(self):
        return SimpleNamespace(kind="reward", instance=self.incarnation, incarnation=self.incarnation)

    async def score(self, batches, timeout):
        self.streams += 1
        self.open_streams += 1
        reader = aiter(batches)
        try:
            async for items in reader:
                for item in items:
                    await asyncio.sleep(0)
                    key = (item.sample.prompt_ordinal, item.sample.sample_index)
                    self.asked.append(key)
                    if len(self.asked) > self.dies_after:
                        raise InstanceDown(self.incarnation, "gone")
                    if not self.silent:
                        yield reward.ScoreResponse(results=[self.result(item, key)])
                if self.dies_idle:
                    raise InstanceDown(self.incarnation, "gone")
            if self.silent:
                await asyncio.Event().wait()
        finally:
            self.open_streams -= 1
            # gRPC's reader is a task of its own: it looks for requests once more after the stream's end.
            self.late_reads.append(asyncio.ensure_future(anext(reader, None)))

    def result(self, item, key):
        status = reward.SCORE_STATUS_OK
        if self.broken[key] > 0:
            self.broken[key] -= 1
            status = reward.SCORE_STATUS_SCORER_BROKEN
        if self.away[key] > 0:
            self.away[key] -= 1
            status = reward.SCORE_STATUS_UNAVAILABLE
        return reward.ScoreResult(
            sample=item.sample, attempt=1, status=status, reward=float(key[1]), detail="nobody at the judge"
        )


class Staffing:
    """Reward instances that are staffed again from a bench."""

    def __init__(self, *judges: Judge, bench: tuple[Judge, ...] = ()) -> None:
        self.rewards = list(judges)
        self.bench = list(bench)
        self.score_streams = ScoreStreams()
        self.workers = self
        self.dead: set[str] = set()
        self.judges = [*judges, *bench]
        self.spec = SimpleNamespace(
            reward=SimpleNamespace(timeout_s=0.01), limits=SimpleNamespace(step_timeout_s=60.0)
        )
        self.fleet = SimpleNamespace(
            alive=lambda incarnation: incarnation not in self.dead,
            fate=self.fate,
            any_draining=lambda members: any(m.draining for m in members),
            event_log=SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time(), wake=lambda: None),
        )
        self.fleet.deaths = Deaths(self.fleet.event_log, None)
        self.fleet.waits = Waits(lambda: 0.0)
        self.run = "a"
        self.notes: list[str] = []
        self.noted = asyncio.Event()

    def note(self, text):
        self.notes.append(text)
        self.noted.set()

    async def fate(self, incarnation):
        return True

    async def lease_scorers(self):
        """They hold no devices."""

    def check_scorers_deaths(self):
        return

    async def staff_rewards(self):
        if not self.rewards:
            self.rewards.append(self.bench.pop(0))


def items(count):
    return [
        reward.ScoreItem(sample=common.SlotKey(prompt_ordinal=n // 4, sample_index=n % 4), attempt=1)
        for n in range(count)
    ]


async def scored(workers, count):
    async with asyncio.timeout(20):
        results = await score_all(workers, items(count))
    assert sorted((r.sample.prompt_ordinal, r.sample.sample_index) for r in results) == [
        divmod(n, 4) for n in range(count)
    ]
    for late in [late for judge in workers.judges for late in judge.late_reads]:
        assert await asyncio.wait_for(late, 5) is None, "a dead stream's reader took questions"
    return results


async def test_every_instance_gets_a_share_and_every_answer_one_result():
    first, second = Judge("a"), Judge("b")
    await scored(Staffing(first, second), 101)
    assert min(len(first.asked), len(second.asked)) >= 25


async def test_a_lost_instances_questions_go_to_another():
    dying, other = Judge("a", dies_after=5), Judge("b")
    await scored(Staffing(dying, bench=(other,)), 40)
    assert len(other.asked) >= 35


async def test_an_instance_that_has_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(scoring, "LOOK_S", 0.05)
    hung, other = Judge("a", silent=True), Judge("b")
    workers = Staffing(hung, bench=(other,))
    workers.dead.add("a")
    await scored(workers, 8)
    assert hung.open_streams == 0 and workers.rewards == [other]


async def test_an_instance_that_keeps_silent_loses_its_questions(monkeypatch):
    monkeypatch.setattr(scoring, "LOOK_S", 0.05)
    monkeypatch.setattr(scoring, "GRACE_S", 0.2)
    await scored(Staffing(Judge("a", silent=True), bench=(Judge("b"),)), 8)


async def test_a_broken_scorer_is_asked_again_and_then_believed():
    judge = Judge("a", broken=Counter({(0, 1): SCORER_RETRIES, (0, 2): SCORER_RETRIES + 1}))
    results = {r.sample.sample_index: r.status for r in await scored(Staffing(judge), 4)}
    assert results[1] == reward.SCORE_STATUS_OK
    assert results[2] == reward.SCORE_STATUS_SCORER_BROKEN


async def test_a_stream_without_questions_ends_and_the_next_answer_opens_another(monkeypatch):
    monkeypatch.setattr(streams, "IDLE_S", 0.05)
    monkeypatch.setattr(scoring, "LOOK_S", 0.05)
    judge, results = Judge("a"), []
    workers = Staffing(judge)
    timer = StepTimer(workers.fleet.event_log.monotonic)
    work = Scoring(workers, timer, results.extend)
    running = asyncio.create_task(work.run())
    first, second = items(2)
    work.put(first)
    await until(lambda: results and not judge.open_streams)
    work.put(second)
    await until(lambda: len(results) == 2)
    work.close()
    await asyncio.wait_for(running, 5)
    assert judge.streams == 2 and "score" in timer.stages()


async def test_the_reader_of_a_dead_stream_takes_no_new_question():
    dead, other, results = Judge("a", dies_idle=True), Judge("b"), []
    workers = Staffing(dead, bench=(other,))
    work = Scoring(workers, StepTimer(workers.fleet.event_log.monotonic), results.extend)
    running = asyncio.create_task(work.run())
    first, second = items(2)
    work.put(first)
    await until(lambda: dead.late_reads)
    work.put(second)
    await until(lambda: len(results) == 2)
    work.close()
    await asyncio.wait_for(running, 5)
    assert other.asked == [(0, 1)] and await dead.late_reads[0] is None


async def test_the_next_step_asks_over_the_same_stream():
    judge = Judge("a")
    workers = Staffing(judge)
    for _ in range(3):
        await scored(workers, 8)
    assert (judge.streams, len(judge.asked)) == (1, 24)
    await workers.score_streams.end()
    assert judge.open_streams == 0 and not workers.score_streams.all


async def test_a_stream_that_is_old_or_to_a_draining_instance_ends_before_the_next_step():
    judge = Judge("a")
    workers = Staffing(judge)
    await scored(workers, 8)
    workers.spec.limits.step_timeout_s = 0.0
    await scored(workers, 8)
    workers.spec.limits.step_timeout_s, judge.draining = 60.0, True
    await scored(workers, 8)
    await until(lambda: judge.open_streams == 1)
    assert judge.streams == 3
    await workers.score_streams.end()


async def test_a_step_that_is_stopped_leaves_no_stream_and_no_result_to_the_next():
    hung, results = Judge("a", silent=True), []
    workers = Staffing(hung)
    work = Scoring(workers, StepTimer(workers.fleet.event_log.monotonic), results.extend)
    running = asyncio.create_task(work.run())
    work.put(items(1)[0])
    await until(lambda: hung.asked)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert hung.open_streams == 0 and not workers.score_streams.all
    hung.silent = False
    await scored(workers, 2)


async def test_a_refusal_is_the_callers():
    class Refusing(Judge):
        async def score(self, batches, timeout):
            raise ValueError("NOT_OPEN")
            yield

    with pytest.raises(ValueError, match="NOT_OPEN"):
        await scored(Staffing(Refusing("a")), 3)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a fake sets no event
            await asyncio.sleep(0.01)


async def test_an_answer_whose_scorer_cannot_be_asked_is_kept_and_asked_about_again(monkeypatch):
    """However often; a broken scorer would have cost its group. The run says what it waits for, once."""
    monkeypatch.setattr(scoring, "UNAVAILABLE_S", 0.05)
    judge = Judge("a")
    judge.away[(0, 1)] = judge.away[(1, 2)] = 3 * SCORER_RETRIES
    staffing = Staffing(judge)
    scoring_task = asyncio.ensure_future(score_all(staffing, items(8)))
    await staffing.noted.wait()
    assert staffing.fleet.waits.of("a") == ["a scorer: nobody at the judge"]
    results = await scoring_task
    assert [each.status for each in results] == [reward.SCORE_STATUS_OK] * 8
    assert judge.asked.count((0, 1)) == 3 * SCORER_RETRIES + 1
    (note,) = staffing.notes
    assert "nobody at the judge" in note
    assert staffing.fleet.waits.of("a") == []


async def test_a_scorer_that_stays_away_for_the_steps_time_is_broken(monkeypatch):
    """An evaluation, which no step's limit ends, ends so too."""
    monkeypatch.setattr(scoring, "UNAVAILABLE_S", 0.01)
    judge = Judge("a")
    judge.away[(0, 1)] = 1 << 30
    staffing = Staffing(judge)
    staffing.spec.limits.step_timeout_s = 0.1
    async with asyncio.timeout(20):
        results = await score_all(staffing, items(4))
    (broken,) = [each for each in results if each.status == reward.SCORE_STATUS_SCORER_BROKEN]
    assert broken.sample.sample_index == 1 and broken.detail == "nobody at the judge" and len(results) == 4
