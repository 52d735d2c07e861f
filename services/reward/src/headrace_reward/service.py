"""gRPC ⇄ runs: translates messages and errors, decides nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_schema.sections.scoring import RewardSection
from headrace_servicekit.config import parse_config
from headrace_servicekit.instance import Instance, host_memory
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.rpc.episodes import MAX_EPISODE_BYTES
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_at_least, check_enum, check_name, check_page, json_object
from headrace_servicekit.rpc.streams import unordered, until
from headrace_servicekit.rpc.tensors import decode_tensor
from headrace_servicekit.rpc.trajectories import turn_roles
from headrace_servicekit.stores.files import localized
from headrace_servicekit.stores.problems import StoreProblem

from headrace_reward.pool import OpenFault, PoolClosed
from headrace_reward.runs import Conflict, Item, Run, Runs, Status, Verdict

Context = grpc.aio.ServicerContext[Any, Any]
_IN_FLIGHT = 2048
_LINGER_S = 0.002
_PAGE = 50
SCORER_AWAY = "SCORER_AWAY"
"""Reason of a refusal to open a run one of whose scorers cannot be asked now."""
_STATUS = {
    Status.OK: reward_pb2.SCORE_STATUS_OK,
    Status.ANSWER_FAILED: reward_pb2.SCORE_STATUS_ANSWER_FAILED,
    Status.SCORER_BROKEN: reward_pb2.SCORE_STATUS_SCORER_BROKEN,
    Status.UNAVAILABLE: reward_pb2.SCORE_STATUS_UNAVAILABLE,
}


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves RewardService. `catalogue` lists the registered scorers."""

    def __init__(self, instance: Instance, runs: Runs, catalogue: list[dict[str, Any]]) -> None:
        self._instance, self._runs = instance, runs
        self._blobs = BlobReader(instance.config.shm_dir, instance.token)
        self._catalogue = [
            reward_pb2.Scorer(
                name=entry["name"],
                description=entry["description"],
                options_schema_json=json.dumps(entry["options_schema"]),
            )
            for entry in catalogue
        ]

    async def on_grant(self, lease: common_pb2.Lease) -> None:
        """The scorers of the lease's run compute on its devices."""
        self._runs.lease(
            lease.epoch, lease.run, lease.devices, lambda: self._instance.fence.holds(lease.epoch)
        )

    async def on_revoke(self, epoch: int, notice_s: float, keep: bool = False) -> Memory:
        """Ends what is computed under a lease, by force after the notice; the run stays open."""
        await self._runs.settle(epoch, notice_s)
        # This process uses no GPU, and the children that did have ended: what it measures is the host's memory.
        return Memory(free_bytes=host_memory().free_bytes)

    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: Context
    ) -> reward_pb2.ListScorersResponse:
        """A page of the catalogue; the token is the position of the next entry."""
        begin = check_page(request.page_size, request.page_token)
        end = begin + (request.page_size or _PAGE)
        more = str(end) if end < len(self._catalogue) else ""
        return reward_pb2.ListScorersResponse(scorers=self._catalogue[begin:end], next_page_token=more)

    async def OpenRun(
        self, request: reward_pb2.OpenRunRequest, context: Context
    ) -> reward_pb2.OpenRunResponse:
        """Opens a run."""
        self._instance.fence.check(request.header, lease=False, opening=False)
        name = check_name("header.run", request.header.run)
        section = parse_config(RewardSection, request.config_json, "reward")
        try:
            run: Run = await self._instance.open_run(
                request.header,
                (section, request.leased),
                lambda: self._open(name, section, leased=request.leased),
                lambda: self._runs.close(name),
            )
        except OpenFault as fault:
            key = f"reward.{fault.scorer_set}[{fault.index}].{fault.field}"
            if fault.away:
                code, message = grpc.StatusCode.FAILED_PRECONDITION, f"{key}: {fault.message}"
                raise ServiceError(code, SCORER_AWAY, message, key=key) from fault
            raise invalid(f"{key}: {fault.message}", key=key) from fault
        return reward_pb2.OpenRunResponse(scorer_digest=run.digest)

    async def _open(self, name: str, section: RewardSection, *, leased: bool) -> Run:
        if not section.scorers:  # a spec of given answers has such a section, and asks nobody
            raise invalid("reward.scorers: no scorer judges an answer; name one, such as exact")
        try:
            section = await asyncio.to_thread(localized, section, "reward")
        except StoreProblem as problem:
            raise invalid(str(problem)) from problem
        return await self._runs.open(name, section, leased=leased)

    async def CloseRun(
        self, request: reward_pb2.CloseRunRequest, context: Context
    ) -> reward_pb2.CloseRunResponse:
        """Closes a run."""
        await self._instance.close_run(request.header)
        return reward_pb2.CloseRunResponse()

    async def _with_pictures(
        self, requests: AsyncIterator[reward_pb2.ScoreRequest]
    ) -> AsyncIterator[reward_pb2.ScoreRequest]:
        """The requests; pictures that stay with their producers are fetched from there, as the trainer does."""
        async for request in requests:
            for item in request.items:
                for field in (item.pictures, item.last_picture):
                    for tensor in field.values():
                        if tensor.WhichOneof("body") == "blob":
                            try:
                                body = await self._blobs.read(tensor.blob)
                            except ServiceError:  # its producer is lost: the episode is made again
                                item.ClearField("pictures")
                                item.ClearField("last_picture")
                                break
                            tensor.data = bytes(body)
            yield request

    async def Score(
        self, request_iterator: AsyncIterator[reward_pb2.ScoreRequest], context: Context
    ) -> AsyncIterator[reward_pb2.ScoreResponse]:
        """Scores what the stream asks; the first message names the run and the authority."""
        run: Run | None = None
        begin, count = time.monotonic(), 0
        closed, stack = asyncio.Event(), ExitStack()

        def expand(request: reward_pb2.ScoreRequest) -> Iterator[asyncio.Future[Verdict]]:
            nonlocal run
            if run is None:
                run = self._admit(request.header)
                stack.enter_context(self._instance.open_runs.until_closed(request.header.run, closed.set))
            items = [_item(each, run.section.pictures) for each in request.items]
            for item in items:
                _check_stage(item.stage, run)
            return map(run.score, items)

        try:
            with stack:
                requests = until(closed, self._with_pictures(request_iterator))
                async for verdicts in unordered(requests, expand, _IN_FLIGHT, _LINGER_S):
                    count += len(verdicts)
                    yield reward_pb2.ScoreResponse(results=map(_result, verdicts))
        except Conflict as conflict:
            raise ServiceError(grpc.StatusCode.ALREADY_EXISTS, "CONFLICT", str(conflict)) from conflict
        except PoolClosed as error:
            raise _not_open("the run was closed while the answer was scored; it") from error
        self._report(time.monotonic() - begin, count)

    def _admit(self, header: common_pb2.CommandHeader) -> Run:
        self._instance.fence.check(header, lease=False)
        run = self._runs.get(header.run)
        if run is None:
            raise _not_open(header.run or "the run of the empty header")
        self._instance.open_runs.applied(header)
        return run

    def _report(self, wall_s: float, count: int) -> None:
        metrics = common_pb2.StageMetrics(stage="score", items=count)
        metrics.wall_time.FromNanoseconds(int(wall_s * 1e9))
        self._instance.report(metrics)


def _item(message: reward_pb2.ScoreItem, pictures: int) -> Item:
    check_at_least("items.sample.prompt_ordinal", message.sample.prompt_ordinal, 0)
    check_at_least("items.sample.sample_index", message.sample.sample_index, 0)
    check_at_least("items.token_count", message.token_count, 0)
    check_enum("items.finish_reason", common_pb2.FinishReason, message.finish_reason)
    answer: dict[str, Any] = {
        "prompt": message.prompt,
        "completion": message.completion,
        "reference": message.reference,
        "metadata": json_object("items.metadata_json", message.metadata_json),
        "token_count": message.token_count,
        "messages": list(map(_turn, message.messages)),
        "finish_reason": common_pb2.FinishReason.Name(message.finish_reason)
        .removeprefix("FINISH_REASON_")
        .lower(),
    }
    if message.prompt_ids:
        answer |= {
            "raw_prompt": message.raw_prompt,
            "raw_completion": message.raw_completion,
            "prompt_ids": list(message.prompt_ids),
            "completion_ids": list(message.completion_ids),
        }
    if message.pictures:
        answer["pictures"] = {
            camera: _chosen(camera, message, pictures) for camera in sorted(message.pictures)
        }
    if message.group:
        answer["group"] = list(message.group)
    if message.HasField("conversation"):
        answer |= _of_conversation(message.conversation)
    return Item(
        prompt_ordinal=message.sample.prompt_ordinal,
        sample_index=message.sample.sample_index,
        attempt=message.attempt,
        evaluation=message.evaluation,
        cut_by_length=message.finish_reason == common_pb2.FINISH_REASON_LENGTH,
        answer=answer,
        stage=message.stage,
    )


def _chosen(camera: str, message: reward_pb2.ScoreItem, count: int) -> dict[str, Any]:
    """The last of an episode's pictures and others evenly before it, as `judge.answer_of` reads them."""
    frames = decode_tensor(message.pictures[camera], max_bytes=MAX_EPISODE_BYTES)
    if camera in message.last_picture:
        last = decode_tensor(message.last_picture[camera], max_bytes=MAX_EPISODE_BYTES)
        frames = np.concatenate([frames, last[None]])
    places = np.linspace(len(frames) - 1, 0, count).round().astype(int)[::-1]
    kept = frames[np.unique(places)]
    if kept.dtype != np.uint8 or kept.ndim != 4:
        raise invalid(
            f"items.pictures: {camera!r} is {kept.dtype} of shape {list(kept.shape)}, and no pictures"
        )
    return {"shape": list(kept.shape), "data": base64.b64encode(kept.tobytes()).decode()}


def _of_conversation(conversation: common_pb2.Conversation) -> dict[str, Any]:
    rewards = [turn.reward for turn in conversation.turns]
    episode: dict[str, Any] = {
        "return": sum(rewards),
        "success": conversation.success,
        "steps": len(rewards),
        "rewards": rewards,
    }
    if roles := turn_roles(conversation):
        episode["roles"] = roles
    return {"messages": list(map(_turn, conversation.messages)), "episode": episode}


def _turn(message: common_pb2.ChatMessage) -> dict[str, Any]:
    """A message with all its keys; its content is a text, whatever they say."""
    party = {"party": message.party} if message.party else {}
    keys = json_object("items.messages.keys_json", message.keys_json)
    return {**keys, "role": message.role, "content": message.content, **party}


def _check_stage(stage: str, run: Run) -> None:
    if stage and stage not in run.section.stages:
        known = ", ".join(run.section.stages) or "none"
        raise invalid(
            f"items.stage: the run has no scorers for a stage {stage!r}; stages: {known}", key="items.stage"
        )


def _result(verdict: Verdict) -> reward_pb2.ScoreResult:
    key = verdict.key
    result = reward_pb2.ScoreResult(
        sample=common_pb2.SlotKey(prompt_ordinal=key.prompt_ordinal, sample_index=key.sample_index),
        attempt=key.attempt,
        status=_STATUS[verdict.status],
        reward=verdict.reward,
        parts=verdict.parts,
        detail=verdict.detail,
        evaluation=key.evaluation,
        stage=key.stage,
        turns=verdict.turns,
    )
    result.wall_time.FromNanoseconds(int(verdict.wall_s * 1e9))
    return result


def invalid(message: str, **metadata: str) -> ServiceError:
    """A caller's mistake."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message, **metadata)


def _not_open(what: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION, "NOT_OPEN", f"{what} is not open here; call OpenRun first"
    )
