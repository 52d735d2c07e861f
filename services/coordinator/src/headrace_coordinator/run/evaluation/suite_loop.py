"""The loop of a run that evaluates: blocks of items are answered, scored and written, until all have been.

It pauses, yields, recovers and leaves as every run does. Answers that were written are not made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_schema.evaluating import EvaluationSpec
from headrace_servicekit.causes import cause_first

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.episode_figures import told_of
from headrace_coordinator.domain.runs import SuiteEvaluation
from headrace_coordinator.projections.thumbnails import with_thumbnails
from headrace_coordinator.projections.trajectories import SettledTrajectory
from headrace_coordinator.projections.transcripts import Answer, Key, Transcripts, answer_of, read_answers
from headrace_coordinator.projections.videos import Recording, Video, write_recordings
from headrace_coordinator.run.context import RunContext, Unwritable
from headrace_coordinator.run.evaluation.evaluate import Answers, Questions, TooFewAnswers, answer, judge
from headrace_coordinator.run.evaluation.suite_figures import result_of
from headrace_coordinator.run.leaving import Outcome
from headrace_coordinator.run.loop import RunLoop
from headrace_coordinator.run.modality import Sampling, distribution_of
from headrace_coordinator.run.step.step import RunFailed
from headrace_coordinator.run.step.trajectories import read_of, said, sampled, told
from headrace_coordinator.run.step.videos import episode_of
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.suites import open_suite
from headrace_coordinator.waits import WaitTimeout

VERSION = 1
"""Number of the policy that answers: an evaluation has one."""
BLOCKS = 4
"""A block has this many times the answers that the rollouts decode at once, so that few of them idle at its end."""


class SuiteLoop(RunLoop):
    """One evaluation while it holds a grant."""

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._asked = EvaluationSpec.model_validate(self._evaluation.spec)
        self._suite = open_suite(self._asked.suite.name, self._asked.suite.options)
        self._items: list[DataItem] = []
        self._directory = Path(context.state.directory)
        self._answers: dict[Key, Answer] = {}
        self._recorded: frozenset[int] = frozenset()

    @property
    def _evaluation(self) -> SuiteEvaluation:
        evaluation = self.context.state.evaluation
        assert evaluation is not None
        return evaluation

    async def _live(self) -> Outcome:
        """Blocks until the last, or until the run is to pause or yield."""
        await self._prepare()
        while missing := self._missing():
            if boundary := self._at_boundary():
                return boundary
            await self._generate_ready()
            await self._weights_known()
            await self._block(missing[: self._block_items()])
            self._check_answered()
            self._steps += 1
        result = result_of(self._asked, self._suite, self._answers, self._items).model_dump(mode="json")
        await self._event_log.commit(ev.SuiteEvaluated(run=self.context.run_id, result=result))
        unanswered = f", {result['unanswered']} not answered" if result["unanswered"] else ""
        return Outcome(
            run_states.SUCCEEDED, f"{result['answers']} answers to {len(self._items)} items{unanswered}"
        )

    def _check_answered(self) -> None:
        """Raises RunFailed as soon as more answers are missing than may be."""
        missing = [each.failure for each in self._answers.values() if each.failure]
        total, allowed = len(self._items) * self._asked.samples, self._asked.max_unanswered
        if len(missing) > allowed * total or len(missing) == total:
            raise RunFailed(str(TooFewAnswers(len(missing), total, allowed, missing[0], "max_unanswered")))

    async def _prepare(self) -> None:
        """Instances opened, and the items and the answers read that were written before."""
        context, evaluation = self.context, self._evaluation
        if context.state.state == run_states.RUNNING:
            self._move(run_states.RECOVERING, "the coordinator restarted")
        self._items, self._answers = await asyncio.to_thread(self._read)
        self._recorded = self._suite.recorded(self._items)
        self._transcripts = await asyncio.to_thread(Transcripts, self._directory)
        await context.staffing.staff_rewards()
        await context.staffing.staff_rollouts()
        self._published = Published(
            common.PolicyVersion(number=VERSION, digest=evaluation.digest),
            files=rollout.PolicyFiles(checkpoint=evaluation.checkpoint_directory, policy=evaluation.policy),
        )
        if context.state.state in (run_states.PLANNING, run_states.RECOVERING):
            self._move(run_states.RUNNING, "evaluating")

    def _read(self) -> tuple[list[DataItem], dict[Key, Answer]]:
        """The items that are asked, and the answers that were written before."""
        items = self._items or self.context.dataset.asked(self._asked.suite.limit)
        return items, read_answers(self._directory, self._suite.extract)

    def _missing(self) -> list[int]:
        """Items that lack an answer."""
        samples = range(self._asked.samples)
        return [
            index
            for index in range(len(self._items))
            if any((index, sample) not in self._answers for sample in samples)
        ]

    def _block_items(self) -> int:
        together = sum(worker.max_concurrency for worker in self.context.workers.rollouts)
        return max(1, BLOCKS * together // self._asked.samples)

    async def _weights_known(self) -> None:
        """Every rollout has the same weights, those with which the evaluation began."""
        assert self._published is not None
        digests = {worker.digest for worker in self.context.workers.rollouts if worker.installed}
        known = self._published.version.digest
        if len(digests | ({known} if known else set())) > 1:
            raise RunFailed(
                f"model.path: rollout instances read different weights ({', '.join(sorted(digests))}); "
                "give every host the same directory"
            )
        if not known and digests:
            self._published.version.digest = digests.pop()
            await self._progressed()

    async def _progressed(self) -> None:
        assert self._published is not None
        await self._event_log.commit(
            ev.EvaluationProgressed(
                run=self.context.run_id,
                answers=len(self._answers),
                digest=self._published.version.digest,
                versions=self.context.modality.versions,
            )
        )

    async def _block(self, indices: Sequence[int]) -> None:
        """Answers a block, scores it, and writes it; only then it counts."""
        context = self.context
        done: Answers = {}
        questions = Questions(self._items, self._asked.samples, self._sampling(), recorded=self._recorded)
        await self._answered(questions, indices, done)
        made = {key: done[key] for key in sorted(done) if key not in self._answers}
        by_key = await judge(context, self._items, made.values())
        lines = [self._line(answered, by_key[key]) for key, answered in made.items()]
        passed = {
            key: score.status == reward.SCORE_STATUS_OK and score.reward >= self._asked.pass_reward
            for key, score in by_key.items()
        }
        recordings = [
            Recording(
                Video.of(*key, self._items[key[0]], success=_succeeded(done[key], passed[key])),
                content,
                episode_of(done[key]),
            )
            for key, content in questions.videos.items()
            if key in passed
        ]
        try:
            # Videos first: an answer that is written is not made again.
            await asyncio.to_thread(write_recordings, self._directory, recordings)
            await asyncio.to_thread(self._transcripts.append, lines)
        except OSError as error:
            size = sum(len(msgspec.json.encode(line)) for line in lines)
            size += sum(len(each.content) + len(each.episode) for each in recordings)
            raise Unwritable(
                f"{size:,} bytes of transcripts and videos cannot be written below {self._directory}: {error}; "
                "make room and resume"
            ) from error
        for line in lines:
            self._answers[line.prompt_ordinal, line.sample_index] = answer_of(line, self._suite.extract)
        await self._progressed()

    async def _answered(self, questions: Questions, indices: Sequence[int], done: Answers) -> None:
        """Every answer to the items; raises `WaitTimeout` when none comes any more."""
        assert self._published is not None
        wanted = len(indices) * self._asked.samples
        while len(done) < wanted:
            before = len(done)
            await answer(self.context, self._published, questions, indices, done)
            if len(done) == before:
                why = self.context.last_loss or "rollout instances failed"
                raise WaitTimeout(cause_first(why, f"{wanted - before} answers were not made"))

    def _sampling(self) -> Sampling:
        asked, sampling = self._asked, self._asked.sampling
        return Sampling(
            policy_number=VERSION,
            seed=asked.seed,
            distribution=distribution_of(sampling, sampling.temperature),
            max_new_tokens=sampling.max_new_tokens,
            stop=sampling.stop,
            greedy=not sampling.temperature,
            evaluation=True,
        )

    def _line(self, answered: common.Trajectory, score: reward.ScoreResult) -> SettledTrajectory:
        """A transcript; raises `RunFailed` where no scorer could judge the answer."""
        if score.status == reward.SCORE_STATUS_SCORER_BROKEN:
            raise RunFailed(cause_first(f"a scorer is broken: {score.detail}", "", "reward.scorers"))
        tokens, versions = sampled(answered)
        turns = score.turns or [turn.reward for turn in answered.conversation.turns]
        item, failed = self._items[answered.sample.prompt_ordinal], score.status != reward.SCORE_STATUS_OK
        return SettledTrajectory(
            step=0,
            version=VERSION,
            prompt_ordinal=answered.sample.prompt_ordinal,
            sample_index=answered.sample.sample_index,
            attempt=answered.attempt,
            prompt=item.question,
            completion=answered.completion_text,
            reference=item.answer,
            reward=score.reward,
            parts=dict(score.parts),
            finish_reason=common.FinishReason.Name(answered.finish_reason).removeprefix("FINISH_REASON_"),
            tokens=tokens,
            versions=versions,
            detail=(score.detail or "a scorer failed") if failed else "",
            messages=with_thumbnails(told(self.context.spec.tool_calls, said(answered), turns)),
            read=read_of(answered),
        )


def _succeeded(trajectory: common.Trajectory, passed: bool) -> bool:
    """False for an episode whose environment never says so, whatever its return is."""
    told = told_of(trajectory.completion_text)
    return passed and (told is None or told.success is not None)
