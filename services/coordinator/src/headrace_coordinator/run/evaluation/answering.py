"""Answers to items under the installed policy, for evaluations. Nothing here is trained or kept retained."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.fleet.instance_client import USER_ERRORS, CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import Opening, RolloutClient

ATTEMPTS = 5
Answers = dict[tuple[int, int], common.Trajectory]
"""Finished trajectories by (index of the item, sample)."""


@dataclass(frozen=True)
class Questions:
    """What is asked: items, how often, and how answers are sampled. `prefill` stands in for data.prompt.prefill."""

    items: Sequence[DataItem]
    samples: int
    opening: Opening
    prefill: str | None = None
    recorded: Collection[int] = ()
    """Items whose episodes are to be recorded."""
    videos: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Theirs, by (index of the item, sample), as they come."""


async def answer(
    context: RunContext, published: Published, questions: Questions, wanted: Sequence[int], done: Answers
) -> None:
    """Adds the answers to the `wanted` items to `done`; fewer when ATTEMPTS rollouts in a row are lost.

    Raises CallRefused where a rollout says that the spec is wrong.
    """
    for _ in range(ATTEMPTS):
        members = [m for m in context.workers.rollouts if context.workers.usable(m)]
        missing = [i for i in wanted if any((i, s) not in done for s in range(questions.samples))]
        if not missing:
            return
        if not members:
            await context.placement.add_rollout(published)
            members = list(context.workers.rollouts)
        await gather_all(
            *(
                _drive(context, published, member, questions, missing[index :: len(members)], done)
                for index, member in enumerate(members)
            )
        )


async def _drive(
    context: RunContext,
    published: Published,
    member: RolloutClient,
    questions: Questions,
    mine: Sequence[int],
    done: Answers,
) -> None:
    opening, placement = deepcopy(questions.opening), context.placement
    await placement.simulators.staff(member)
    await placement.repliers.staff(published)
    if isinstance(opening, rollout.GenerateOpen):
        opening.repliers.extend(placement.repliers.openings())
    elif context.workers.pools is not None:
        opening.pools.extend(context.workers.pools.of(member.incarnation))
    try:
        async for response in member.generate(
            opening, _assignments(context, questions, mine, done), context.spec.limits.step_timeout_s
        ):
            for chunk in response.chunks:
                if chunk.HasField("finished"):
                    body = chunk.finished
                    done[body.sample.prompt_ordinal, body.sample.sample_index] = body
            if response.revoked:
                member.lost_lease()
            if isinstance(response, rollout.RunEpisodesResponse):
                member.lost_pools += response.lost_pools
                for video in response.videos:
                    key = video.sample.prompt_ordinal, video.sample.sample_index
                    questions.videos[key] = video.content
            else:
                member.lost_repliers += response.lost_repliers
        for said in await placement.repliers.lost(member):
            context.note(said)
        await context.workers.lost_pools(member)
    except InstanceDown as fault:
        await context.lost(member, str(fault))
    except CallRefused as refused:
        if refused.reason in USER_ERRORS:
            raise
        await context.lost(member, str(refused))


async def _assignments(
    context: RunContext, questions: Questions, mine: Sequence[int], done: Answers
) -> AsyncIterator[rollout.AssignGroups]:
    groups = [
        rollout.GroupAssignment(
            prompt_ordinal=index,
            prompt=context.prompt_of(
                questions.items[index], questions.prefill, record=index in questions.recorded
            ),
            samples=[
                rollout.SampleAssignment(sample_index=sample, attempt=1)
                for sample in range(questions.samples)
                if (index, sample) not in done
            ],
        )
        for index in mine
    ]
    yield rollout.AssignGroups(groups=groups)
