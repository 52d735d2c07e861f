"""Makes the samples that the loop of a session asks for, with the weights that each names.

Samples of the same weights are made together, and requests that differ in their prompts alone by one stream.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_schema.sessions import Failure, Result, Sample, SampledSequence, SampleResult

from headrace_coordinator.fleet.instance_client import SLOW_S, USER_ERRORS, CallRefused, InstanceDown
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.sessions.desk import AskedSample, Desk
from headrace_coordinator.sessions.journal import Unknown, saved_by_name
from headrace_coordinator.waits import WaitTimeout

ATTEMPTS = 5
FOREVER_S = 1e9
KEPT = 4
"""Published versions that are remembered."""
BASE, LATEST = "base", "latest"
FILES_FROM = 1 << 40
"""Numbers of weights that are read from files: no run makes so many versions."""
WHY_ENDED = {common.FINISH_REASON_EOS: "stop", common.FINISH_REASON_STOP: "stop"}


class Sampling:
    """Of one session, while its run holds a grant."""

    def __init__(self, context: RunContext, desk: Desk) -> None:
        self._context, self._desk = context, desk
        self._versions: dict[int, Published] = {}
        self._lost_below = 0
        """Versions below this one were published before the run began to work here: their weights are gone."""

    def begin(self, published: Published) -> None:
        """`published` is what the run goes on from."""
        self._versions = {published.version.number: published}
        self._lost_below = published.version.number
        if self._desk.published == 0:
            self._desk.published = published.version.number

    def publish(self, published: Published) -> None:
        """`latest` is this version from now on."""
        self._versions[published.version.number] = published
        for number in sorted(self._versions)[:-KEPT]:
            del self._versions[number]
        self._desk.published = published.version.number

    async def make(self, more: Callable[[], bool]) -> None:
        """Makes what waits, and as long as `more` holds what is asked of the same weights meanwhile."""
        desk = self._desk
        weights = desk.waiting[0].request.weights
        first = [each for each in desk.waiting if each.request.weights == weights]
        try:
            published = self._of(weights)
        except Unknown as unknown:
            self._take(first)
            for each in first:
                self._settle(each, Failure(category="user", message=str(unknown), key="weights"))
            return
        await self._install(published)
        log, tasks = self._context.event_log, set[asyncio.Task[None]]()

        def asked() -> list[AskedSample]:
            return [each for each in desk.waiting if each.request.weights == weights]

        news: asyncio.Task[None] | None = None
        try:
            while True:
                if not tasks or more():
                    self._take(mine := asked())
                    streams = max(1, len(self._usable()))
                    tasks |= {
                        asyncio.create_task(self._all(published, some)) for some in alike(mine, streams)
                    }
                if not tasks:
                    return
                if news is None or news.done():
                    waits = log.wait_until(lambda: more() and bool(asked()), FOREVER_S, "samples to make")
                    news = asyncio.create_task(waits)
                await asyncio.wait({*tasks, news}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
        finally:
            left = {*tasks, news} if news is not None else tasks
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _take(self, asked: list[AskedSample]) -> None:
        for each in asked:
            self._desk.waiting.remove(each)

    def _settle(self, asked: AskedSample, result: Result) -> None:
        asked.result = result
        self._desk.wake()

    def _of(self, weights: str) -> Published:
        """Raises Unknown."""
        newest = max(self._versions)
        if weights == LATEST:
            return self._versions[newest]
        if weights == BASE:
            return _from_files(FILES_FROM, "")
        if weights.isdigit():
            number = int(weights)
            if (found := self._versions.get(number)) is not None:
                return found
            if number < self._lost_below:
                return self._versions[min(self._versions)]
            known = ", ".join(map(str, sorted(self._versions)))
            raise Unknown(
                f"version {number} is not published any more, {known} are; save it by name to keep it"
            )
        return self._named(weights)

    def _named(self, weights: str) -> Published:
        directory, found = saved_by_name(Path(self._context.state.directory), self._desk.journal, weights)
        name = f"{directory.name}/{weights.rpartition('/')[2]}"
        number = FILES_FROM + 1 + zlib.crc32(f"{name}/{found['version']}".encode())
        return _from_files(number, str(directory / "checkpoints" / found["checkpoint"]))

    async def _install(self, published: Published) -> None:
        """The rollouts hold their devices with these weights."""
        context = self._context
        await context.staffing.staff_rollouts()
        context.leases.assign()
        await context.devices.hand_devices_to_rollouts(published)

    def _usable(self) -> list[RolloutClient]:
        workers = self._context.workers
        return [each for each in workers.decoding if workers.usable(each)]

    async def _all(self, published: Published, asked: list[AskedSample]) -> None:
        """Raises WaitTimeout where rollouts are lost again and again."""
        count, left = len(asked), asked
        self._desk.at_work += count
        try:
            for _ in range(ATTEMPTS):
                await self._tried(published, left)
                left = [each for each in asked if each.result is None]
                if not left:
                    return
            raise WaitTimeout(
                f"samples were not made: {self._context.last_loss or 'rollout instances failed'}"
            )
        except BaseException:
            left = [each for each in asked if each.result is None]
            self._desk.waiting.extendleft(reversed(left))  # The run recovers, and makes them then.
            raise
        finally:
            self._desk.at_work -= count

    async def _tried(self, published: Published, asked: list[AskedSample]) -> None:
        """Settles requests by their samples, or by what is wrong with them; not those over which a rollout is lost."""
        context = self._context
        usable = self._usable()
        if not usable:
            await context.devices.add_rollout(published)
            usable = context.workers.decoding
        worker = random.choice(usable)
        try:
            await self._made(worker, published.version.number, asked)
        except InstanceDown as fault:
            await context.lost(worker, str(fault))
        except CallRefused as refused:
            if refused.reason not in USER_ERRORS:
                await context.lost(worker, str(refused))
            elif len(asked) > 1:  # which of them is wrong each tells by itself
                for each in [each for each in asked if each.result is None]:
                    await self._tried(published, [each])
            else:
                failure = Failure(category="user", message=refused.message, key=refused.key)
                self._settle(asked[0], failure)

    async def _made(self, worker: RolloutClient, number: int, asked: list[AskedSample]) -> None:
        context, request = self._context, asked[0].request
        opening = rollout.GenerateOpen(
            policy_number=number,
            distribution=common.SamplingDistribution(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                repetition_penalty=1.0,
                log_prob_kind=common.LOG_PROB_KIND_PROCESSED,
            ),
            max_new_tokens=request.max_tokens,
            stop=request.stop,
            seed=random.getrandbits(62) if request.seed is None else request.seed,
            evaluation=True,  # nothing is retained
        )
        groups = [
            rollout.GroupAssignment(
                prompt_ordinal=place,
                prompt=rollout.Prompt(token_ids=rollout.TokenIds(values=each.request.prompt)),
                samples=[
                    rollout.SampleAssignment(sample_index=index, attempt=1)
                    for index in range(each.request.samples)
                ],
            )
            for place, each in enumerate(asked)
        ]

        async def assignments() -> AsyncIterator[rollout.AssignGroups]:
            yield rollout.AssignGroups(groups=groups)

        found: list[dict[int, common.Trajectory]] = [{} for _ in asked]
        read: list[tuple[AskedSample, SampleResult]] = []
        async for response in worker.generate(opening, assignments(), context.spec.limits.step_timeout_s):
            for chunk in response.chunks:
                if not chunk.HasField("finished"):
                    continue
                slot = chunk.finished.sample
                each, own = asked[slot.prompt_ordinal], found[slot.prompt_ordinal]
                own[slot.sample_index] = chunk.finished
                if len(own) == each.request.samples and (result := _result(own, each.request, number)):
                    if isinstance(result, SampleResult) and _reads_prompt(request):
                        read.append((each, result))
                    else:
                        self._settle(each, result)
            if response.revoked:
                worker.lost_lease()
        if read:
            told = await _prompt_log_probs(worker, [each.request for each, _ in read])
            for (each, result), about in zip(read, told, strict=True):
                self._settle(each, result.model_copy(update=about))


def alike(asked: list[AskedSample], streams: int) -> list[list[AskedSample]]:
    """Requests that one stream can make, divided over as many `streams`; one with a seed, which fixes its place, is
    alone.
    """
    groups: dict[str, list[AskedSample]] = {}
    for each in asked:
        same = each.request.model_copy(update={"prompt": [], "samples": 0})
        key = each.key if each.request.seed is not None else same.model_dump_json()
        groups.setdefault(key, []).append(each)
    return [part for group in groups.values() for place in range(streams) if (part := group[place::streams])]


def _result(
    found: dict[int, common.Trajectory], request: Sample, number: int
) -> SampleResult | Failure | None:
    """Of all samples of a request; None where the engine failed."""
    reasons = {each.finish_reason for each in found.values()}
    if common.FINISH_REASON_PROMPT_TOO_LONG in reasons:
        reason = f"a prompt of {len(request.prompt)} tokens leaves no room within model.max_context; cut it"
        return Failure(category="user", message=reason, key="prompt")
    if common.FINISH_REASON_ERROR in reasons:
        return None
    sequences = [_sequence(found[index], request) for index in range(request.samples)]
    return SampleResult(version=0 if number >= FILES_FROM else number, sequences=sequences)


def _sequence(trajectory: common.Trajectory, request: Sample) -> SampledSequence:
    tokens, log_probs = list[int](), list[float]()
    for segment in trajectory.branches[0].segments:
        if segment.policy_number:
            tokens += segment.tokens.token_ids
            log_probs += segment.tokens.log_probs
    reason = WHY_ENDED.get(trajectory.finish_reason, "length")
    for place, token in enumerate(tokens):
        if token in (request.stop_ids or ()):
            tokens, log_probs, reason = tokens[: place + 1], log_probs[: place + 1], "stop"
            break
    return SampledSequence(tokens=tokens, log_probs=log_probs, stop_reason=reason)  # type: ignore[arg-type]


def _reads_prompt(request: Sample) -> bool:
    return request.prompt_log_probs or request.top_prompt_log_probs > 0


async def _prompt_log_probs(worker: RolloutClient, requests: list[Sample]) -> list[dict[str, Any]]:
    """What is told of each request's prompt."""
    top = requests[0].top_prompt_log_probs
    asked = rollout.ScoreRequest(
        sequences=[
            rollout.ScoreSequence(token_ids=each.prompt, start=1) for each in requests if len(each.prompt) > 1
        ],
        distribution=common.SamplingDistribution(
            temperature=1.0, top_p=1.0, repetition_penalty=1.0, log_prob_kind=common.LOG_PROB_KIND_RAW
        ),
        top=top,
    )
    response = await worker.call("Score", asked, SLOW_S) if asked.sequences else rollout.ScoreResponse()
    scored = iter(response.sequences)
    told = list[dict[str, Any]]()
    for each in requests:
        own = next(scored) if len(each.prompt) > 1 else rollout.ScoredSequence()
        about: dict[str, Any] = {"prompt_log_probs": [None, *own.log_probs]}
        if top:
            likeliest = (list(zip(one.token_ids, one.log_probs, strict=True)) for one in own.top)
            about["top_prompt_log_probs"] = [None, *likeliest]
        told.append(about)
    return told


def _from_files(number: int, checkpoint: str) -> Published:
    files = rollout.PolicyFiles(checkpoint=checkpoint)
    return Published(common.PolicyVersion(number=number), files=files)
