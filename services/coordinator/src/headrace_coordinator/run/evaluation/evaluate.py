"""Answers to items under the installed policy, and the evaluation of held-out items. None of them is trained.

An answer that an environment, an engine or a scorer failed at says nothing about the policy: it is counted, and left
out of every figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import msgspec
from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_schema.resources.evaluations import EvaluationView
from headrace_servicekit.causes import cause_first
from headrace_servicekit.tracing import trace

from headrace_coordinator.data.dataset import HELDOUT, Dataset
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.episode_figures import (
    OUTCOME,
    figures_of,
    measured,
    settle_successes,
    told_of,
)
from headrace_coordinator.domain.estimates import interval, pass_at
from headrace_coordinator.fleet.instance_client import USER_ERRORS, CallRefused, InstanceDown
from headrace_coordinator.projections.thumbnails import with_thumbnails
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.evaluation.reading import read_heldout
from headrace_coordinator.run.modality import Asked, Sampling, distribution_of
from headrace_coordinator.run.step.dispatch import by_size
from headrace_coordinator.run.step.scoring.scoring import score_all, score_item
from headrace_coordinator.run.step.step import RunFailed
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import failure_of, said, sampled, told
from headrace_coordinator.run.workers.clients import Published, slot_key
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.waits import WaitTimeout

ATTEMPTS = 5
EXAMPLES = 5
SEEDS = 2**63
"""How many seeds there are: what `seed` of the spec and of GenerateOpen can be."""
UNMADE = {
    common.FINISH_REASON_ERROR: "the engine failed",
    common.FINISH_REASON_ABORTED: "the engine stopped it",
    common.FINISH_REASON_PROMPT_TOO_LONG: "the prompt does not fit model.max_context",
}
"""How a trajectory ends that is no answer, in words."""
Answers = dict[tuple[int, int], common.Trajectory]
"""Finished trajectories by (index of the item, sample)."""


@dataclass(frozen=True)
class Questions:
    """What is asked: items, how often, and how answers are sampled. `prefill` stands in for data.prompt.prefill."""

    items: Sequence[DataItem]
    samples: int
    sampling: Sampling
    prefill: str | None = None
    recorded: Collection[int] = ()
    """Items whose episodes are to be recorded."""
    dataset: Dataset | None = None
    """Renders their prompts; None: the run's own."""
    videos: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Theirs, by (index of the item, sample), as they come."""

    def asked(self, index: int) -> Asked:
        """How one item is asked."""
        return Asked(self.prefill, index in self.recorded, self.dataset)


async def answer(
    context: RunContext, published: Published, questions: Questions, wanted: Sequence[int], done: Answers
) -> None:
    """Adds the answers to the `wanted` items to `done`; fewer when ATTEMPTS rollouts in a row are lost.

    Raises CallRefused where a rollout says that the spec is wrong.
    """
    for _ in range(ATTEMPTS):
        rollouts = [r for r in context.workers.decoding if context.workers.usable(r)]
        missing = [i for i in wanted if any((i, s) not in done for s in range(questions.samples))]
        if not missing:
            return
        if not rollouts:
            await context.devices.add_rollout(published)
            rollouts = context.workers.decoding
        await gather_all(
            *(
                _drive(context, published, worker, questions, missing[index :: len(rollouts)], done)
                for index, worker in enumerate(rollouts)
            )
        )


async def _drive(
    context: RunContext,
    published: Published,
    worker: RolloutClient,
    questions: Questions,
    mine: Sequence[int],
    done: Answers,
) -> None:
    modality = context.modality
    await modality.prepare(worker)
    opening = modality.opening(worker, questions.sampling)
    assignments, limit = _assignments(context, questions, mine, done), context.spec.limits.step_timeout_s
    try:
        async for response in worker.generate(opening, assignments, limit):
            for chunk in response.chunks:
                if chunk.HasField("finished"):
                    done[slot_key(chunk.finished.sample)] = chunk.finished
            if response.revoked:
                worker.lost_lease()
            modality.takes_losses(worker, response)
            if isinstance(response, rollout.RunEpisodesResponse):
                questions.videos.update({slot_key(video.sample): video.content for video in response.videos})
        modality.ended(worker, well=True)
        await modality.recover(worker)
    except InstanceDown as fault:
        await context.lost(worker, str(fault))
    except CallRefused as refused:
        if refused.reason in USER_ERRORS:
            raise
        await context.lost(worker, str(refused))
    finally:
        modality.ended(worker, well=False)


async def _assignments(
    context: RunContext, questions: Questions, mine: Sequence[int], done: Answers
) -> AsyncIterator[rollout.AssignGroups]:
    groups = [
        rollout.GroupAssignment(
            prompt_ordinal=index,
            prompt=context.modality.prompt(questions.items[index], questions.asked(index)),
            samples=[
                rollout.SampleAssignment(sample_index=sample, attempt=1, shown=sample == 0)
                for sample in range(questions.samples)
                if (index, sample) not in done
            ],
        )
        for index in mine
    ]
    for message in by_size(rollout.AssignGroups(groups=groups)):
        yield message


class TooFewAnswers(Exception):
    """More answers of an evaluation are missing than its spec allows; the message is for its user."""

    def __init__(self, missing: int, asked: int, allowed: float, why: str, key: str) -> None:
        super().__init__(
            cause_first(
                why,
                f"{missing} of {asked} answers were not made or not scored, and {allowed:.0%} may be missing: mend "
                "that, or allow more",
                key,
            )
        )


async def judge(
    context: RunContext, items: Sequence[DataItem], answers: Iterable[common.Trajectory]
) -> dict[tuple[int, int], reward.ScoreResult]:
    """The score of each answer by (index of the item, sample); one that was not made has ANSWER_FAILED and says why."""
    found, made = list[reward.ScoreResult](), list[reward.ScoreItem]()
    for each in answers:
        if why := why_unmade(each):
            status = reward.SCORE_STATUS_ANSWER_FAILED
            found.append(reward.ScoreResult(sample=each.sample, status=status, detail=why))
        else:
            item = items[each.sample.prompt_ordinal]
            made.append(score_item(item, each, sampled(each)[0], evaluation=True))
    if "group" in context.spec.reward.give:
        groups = defaultdict[int, list[str]](list)
        for asked in sorted(made, key=lambda asked: slot_key(asked.sample)):
            groups[asked.sample.prompt_ordinal].append(asked.completion)
        for asked in made:
            asked.group.extend(groups[asked.sample.prompt_ordinal])
    if context.spec.reward.measure == OUTCOME:
        for asked, text in zip(made, settle_successes([each.completion for each in made]), strict=True):
            asked.completion = text
    found += await score_all(context.staffing, made)
    return {slot_key(score.sample): score for score in found}


def why_unmade(answer: common.Trajectory) -> str:
    """Why a trajectory is no answer of the policy's; empty where it is one."""
    why = UNMADE.get(answer.finish_reason, "")
    return failure_of(answer) or why if why else ""


async def evaluate_if_due(context: RunContext, published: Published, timer: StepTimer) -> None:
    """Between two steps: the evaluations that the spec asks of the held version, each of them once.

    Raises RunFailed where too few answers come before anything was trained.
    """
    ordinal, prefill = published.version.ordinal, context.spec.evaluation.baseline_prefill
    if not context.evaluation_due():
        return
    kinds: list[tuple[str, str | None]] = [(kind, None) for kind in context.dataset.evaluated]
    if ordinal == 0 and prefill is not None:
        kinds.insert(0, ("baseline_prefill", prefill))
    for kind, prefill in kinds:
        if not context.unevaluated(kind):
            continue
        # Of answers that the data gives, the trainer reads held-out ones; other prompts are answered.
        given, workers = context.spec.has_given_answers and kind == HELDOUT, context.workers
        if context.spec.has_given_answers and context.spec.generates:
            with timer.stage("switch"):
                await _hand_devices(context, None if given else published)
        devices = {d for each in (workers.trainers if given else workers.rollouts) for d in each.devices}
        try:
            named = trace(f"evaluate {kind} at step {ordinal}", run=context.run_id, step=ordinal)
            with named, timer.stage("evaluate", sorted(devices)):
                asked = (
                    read_heldout(context, published) if given else evaluate(context, published, kind, prefill)
                )
                view = await asked
        except TooFewAnswers as missing:
            if not ordinal:  # Nothing was trained yet.
                raise RunFailed(str(missing)) from missing
            context.note(cause_first(str(missing), f"no evaluation ({kind}) at step {ordinal}"))
            context.without_figure.add((kind, published.version.number))
            continue
        log, figures = context.event_log, view.model_dump(mode="json")
        await log.commit(ev.Evaluated(run=context.run_id, view=figures))
        context.projection.evaluation(view)
        context.keep_time("evaluation", ordinal, timer)


async def _hand_devices(context: RunContext, published: Published | None) -> None:
    """Of a run whose steps need no rollout: to the rollouts, which answer with a version, or to the trainers."""
    if published is None:
        await context.devices.hand_devices_to_trainers()
        return
    await context.staffing.staff_rollouts()
    context.leases.assign()
    await context.devices.hand_devices_to_rollouts(published)


async def evaluate(
    context: RunContext, published: Published, kind: str, prefill: str | None
) -> EvaluationView:
    """Generates and scores every item of a kind with the installed version.

    Raises TooFewAnswers, or WaitTimeout if answers are missing because rollouts were lost.
    """
    dataset, items = context.dataset.of_kind(kind)
    sampling = _sampling(context, published)
    questions = Questions(items, context.spec.evaluation.samples, sampling, prefill, dataset=dataset)
    done: Answers = {}
    await answer(context, published, questions, range(len(items)), done)
    answers = [done[key] for key in sorted(done)]
    scores = await judge(context, items, answers)
    counted, failures = list[common.Trajectory](), list[str]()
    for each in answers:
        score = scores[slot_key(each.sample)]
        if score.status == reward.SCORE_STATUS_OK:
            counted.append(each)
        else:
            failures.append(score.detail or "a scorer failed")
    asked, allowed = len(items) * questions.samples, context.spec.evaluation.max_unanswered
    unanswered = asked - len(counted)
    lost_to = context.last_loss or "rollout instances failed"
    failure = [*failures, lost_to][0] if unanswered else ""
    if unanswered > allowed * asked or not counted:
        if lost := asked - len(done):  # That is the fleet's fault: the run recovers, and asks again.
            raise WaitTimeout(cause_first(lost_to, f"{lost} of {asked} held-out answers were not made"))
        raise TooFewAnswers(unanswered, asked, allowed, failure, "evaluation.max_unanswered")
    view = _view(context, published, kind, items, counted, scores)
    view.unanswered, view.failure = unanswered, failure
    return view


def evaluation_seed(seed: int, ordinal: int) -> int:
    """A stream of its own for a version's answers, which so share no randomness with training; below 2^63."""
    return (seed + 1_000_003 * (ordinal + 1)) % SEEDS


def _sampling(context: RunContext, published: Published) -> Sampling:
    spec, section = context.spec, context.spec.evaluation
    return Sampling(
        policy_number=published.version.number,
        seed=evaluation_seed(spec.seed, published.version.ordinal),
        distribution=distribution_of(spec.sampling, 0.0 if section.greedy else section.temperature),
        max_new_tokens=section.max_new_tokens or spec.sampling.max_new_tokens,
        stop=spec.sampling.stop,
        greedy=section.greedy,
        evaluation=True,
        until_success=spec.reward.judges_success_alone,
    )


def _messages(
    context: RunContext, answer: common.Trajectory, score: reward.ScoreResult
) -> dict[str, list[dict[str, Any]]]:
    """What was said in a conversation, as `MessageView`s; empty of an answer."""
    rewards = score.turns or [turn.reward for turn in answer.conversation.turns]
    found = told(context.spec.tool_calls, said(answer), rewards)
    return {"messages": msgspec.to_builtins(with_thumbnails(found))} if found else {}


def _view(
    context: RunContext,
    published: Published,
    kind: str,
    items: Sequence[DataItem],
    answers: Sequence[common.Trajectory],
    by_slot: Mapping[tuple[int, int], reward.ScoreResult],
) -> EvaluationView:
    scores = [by_slot[slot_key(answer.sample)] for answer in answers]
    parts: dict[str, list[float]] = defaultdict(list)
    examples: list[dict[str, Any]] = []
    for answer in answers:
        score = by_slot[slot_key(answer.sample)]
        for name, value in score.parts.items():
            parts[name].append(value)
        if answer.sample.sample_index == 0 and len(examples) < EXAMPLES:
            item = items[answer.sample.prompt_ordinal]
            examples.append(
                {
                    "prompt": item.question,
                    "completion": answer.completion_text,
                    "reference": item.answer,
                    "reward": score.reward,
                    **_messages(context, answer, score),
                }
            )
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for score in scores:
        by_prompt[score.sample.prompt_ordinal].append(score.reward)
    low, high = interval([*by_prompt.values()]) or (None, None)
    section = context.spec.evaluation
    whole = [each for each in by_prompt.values() if len(each) == section.samples]
    passed = pass_at(whole, section.pass_reward)
    episodes = [told for answer in answers if (told := told_of(answer.completion_text)) is not None]
    unjudged = {score.detail for score in scores if score.status == reward.SCORE_STATUS_ANSWER_FAILED}
    judged = any(score.status == reward.SCORE_STATUS_OK for score in scores)
    measure, note = measured(context.spec.reward.measure if episodes else "", episodes)
    return EvaluationView(
        kind=kind,
        step=published.version.ordinal,
        version=published.version.number,
        score=fmean(score.reward for score in scores),
        parts={name: fmean(each) for name, each in parts.items()},  # of the answers that it judged
        answers=len(answers),
        score_low=low,
        score_high=high,
        measure=measure,
        episodes=figures_of(episodes),
        note=note if judged or not unjudged else f"no answer has a verdict: {min(unjudged)}",
        # No return is one that passes.
        pass_at={str(k): share for k, share in passed.items() if measure not in ("return", "steps")},
        examples=examples,
    )
