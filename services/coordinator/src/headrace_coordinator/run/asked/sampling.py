"""Makes the samples that the loop of a session asks for, with the weights that each names.

Samples of the same weights are made together; a request is a stream of its own, so that it has its own distribution.
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
from headrace_coordinator.sessions.journal import FOLDER, NAMED, Journal
from headrace_coordinator.waits import WaitTimeout

ATTEMPTS = 5
KEPT = 4
"""Published versions that are remembered."""
BASE, LATEST = "base", "latest"
FILES_FROM = 1 << 40
"""Numbers of weights that are read from files: no run makes so many versions."""
WHY_ENDED = {common.FINISH_REASON_EOS: "stop", common.FINISH_REASON_STOP: "stop"}


class Unknown(Exception):
    """Weights that there are not; the message says what there is."""


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
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                if not tasks or more():
                    mine = [each for each in desk.waiting if each.request.weights == weights]
                    self._take(mine)
                    tasks |= {asyncio.create_task(self._one(published, each)) for each in mine}
                if not tasks:
                    return
                done, tasks = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        session, _, name = weights.rpartition("/")
        directory = Path(self._context.state.directory)
        if session not in ("", self._context.run_id):
            directory = directory.parent / session
        named = self._desk.journal.named if directory.name == self._context.run_id else {}
        if not named and (directory / FOLDER / NAMED).exists():
            named = Journal(directory).named
        if (found := named.get(name)) is None:
            has = f"it has {', '.join(sorted(named))}" if named else "it has none"
            raise Unknown(f"session {directory.name} has no checkpoint {name!r}; {has}")
        number = FILES_FROM + 1 + zlib.crc32(f"{directory.name}/{name}/{found['version']}".encode())
        return _from_files(number, str(directory / "checkpoints" / found["checkpoint"]))

    async def _install(self, published: Published) -> None:
        """The rollouts hold their devices with these weights."""
        context = self._context
        await context.staffing.staff_rollouts()
        context.leases.assign()
        await context.devices.hand_devices_to_rollouts(published)

    async def _one(self, published: Published, asked: AskedSample) -> None:
        """Raises WaitTimeout where rollouts are lost again and again."""
        self._desk.at_work += 1
        try:
            for _ in range(ATTEMPTS):
                result = await self._tried(published, asked.request)
                if result is not None:
                    return self._settle(asked, result)
            raise WaitTimeout(
                f"samples were not made: {self._context.last_loss or 'rollout instances failed'}"
            )
        except BaseException:
            self._desk.waiting.appendleft(asked)  # The run recovers, and makes it then.
            raise
        finally:
            self._desk.at_work -= 1

    async def _tried(self, published: Published, request: Sample) -> Result | None:
        """The samples, what is wrong with the request, or None where a rollout was lost over it."""
        context = self._context
        usable = [each for each in context.workers.decoding if context.workers.usable(each)]
        if not usable:
            await context.devices.add_rollout(published)
            usable = context.workers.decoding
        worker = random.choice(usable)
        try:
            return await _made(context, worker, published.version.number, request)
        except InstanceDown as fault:
            await context.lost(worker, str(fault))
        except CallRefused as refused:
            if refused.reason in USER_ERRORS:
                return Failure(category="user", message=refused.message, key=refused.key)
            await context.lost(worker, str(refused))
        return None


async def _made(
    context: RunContext, worker: RolloutClient, number: int, request: Sample
) -> SampleResult | Failure | None:
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

    async def assignments() -> AsyncIterator[rollout.AssignGroups]:
        samples = [
            rollout.SampleAssignment(sample_index=index, attempt=1) for index in range(request.samples)
        ]
        prompt = rollout.Prompt(token_ids=rollout.TokenIds(values=request.prompt))
        yield rollout.AssignGroups(groups=[rollout.GroupAssignment(prompt=prompt, samples=samples)])

    found: dict[int, common.Trajectory] = {}
    async for response in worker.generate(opening, assignments(), context.spec.limits.step_timeout_s):
        for chunk in response.chunks:
            if chunk.HasField("finished"):
                found[chunk.finished.sample.sample_index] = chunk.finished
        if response.revoked:
            worker.lost_lease()
    if len(found) < request.samples:
        return None
    if any(each.finish_reason == common.FINISH_REASON_PROMPT_TOO_LONG for each in found.values()):
        reason = f"a prompt of {len(request.prompt)} tokens leaves no room within model.max_context; cut it"
        return Failure(category="user", message=reason, key="prompt")
    if any(each.finish_reason == common.FINISH_REASON_ERROR for each in found.values()):
        return None
    sequences = [_sequence(found[index], request) for index in range(request.samples)]
    told = await _prompt_log_probs(worker, request) if _reads_prompt(request) else {}
    version = 0 if number >= FILES_FROM else number
    return SampleResult(version=version, sequences=sequences, **told)


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


async def _prompt_log_probs(worker: RolloutClient, request: Sample) -> dict[str, Any]:
    if len(request.prompt) < 2:
        nothing: dict[str, Any] = {"prompt_log_probs": [None]}
        return {**nothing, "top_prompt_log_probs": [None]} if request.top_prompt_log_probs else nothing
    asked = rollout.ScoreRequest(
        sequences=[rollout.ScoreSequence(token_ids=request.prompt, start=1)],
        distribution=common.SamplingDistribution(
            temperature=1.0, top_p=1.0, repetition_penalty=1.0, log_prob_kind=common.LOG_PROB_KIND_RAW
        ),
        top=request.top_prompt_log_probs,
    )
    response: rollout.ScoreResponse = await worker.call("Score", asked, SLOW_S)
    [scored] = response.sequences
    told: dict[str, Any] = {"prompt_log_probs": [None, *scored.log_probs]}
    if request.top_prompt_log_probs:
        told["top_prompt_log_probs"] = [
            None,
            *(list(zip(each.token_ids, each.log_probs, strict=True)) for each in scored.top),
        ]
    return told


def _from_files(number: int, checkpoint: str) -> Published:
    return Published(
        common.PolicyVersion(number=number),
        common.WeightManifest(),
        common.WeightSource(),
        rollout.PolicyFiles(checkpoint=checkpoint),
    )
