"""The three processes of `chunk_stream.py`: `python _chunk_services.py producer|consumer|coordinator SETTINGS`.

Producer and consumer serve the contracts of a rollout and a trainer over servicekit's server, but neither generates
nor trains. The coordinator's process has its own event log, store, dispatch and streams, a step at a time.
Nothing here measures but `Watched`, which notes when an acknowledgement is durable.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_servicekit.memory.allocator import reuse_freed_memory
from headrace_servicekit.memory.blobs import BlobReader, BlobStore
from headrace_servicekit.rpc.digests import digest_and_size, set_digest, trajectory_digest
from headrace_servicekit.rpc.episodes import bodies_of
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.store import WeightStore

MESSAGE, INLINE, REFERENCE, ANSWER = "message", "inline", "reference", "answer"
ONE, PIPELINED = "one", "pipelined"
SMALL, LARGE = 1024, 1024 * 1024
PART = 256 * 1024  # the largest tensor that a relayed message may hold
RESPONSE_BYTES = 1024 * 1024  # of a rollout's stream
PROMPT, TOKENS = 24, 131  # a message of just over 1 KB, of which most is ids and log-probs
ANSWER_TOKENS, WORD = 192, " word"  # of an answer with its text, as a rollout sends it
GO = b"g"
RUN = "bench"
TOKEN = "benchmark"
SAMPLED_FROM = common_pb2.SamplingDistribution(
    temperature=1.0, top_p=1.0, repetition_penalty=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED
)


class Producer(rollout_pb2_grpc.RolloutServiceServicer):
    """Sends a body of the asked kind for each sample that it is assigned, and keeps it until it is released."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._weights = WeightStore(
            Path(settings["shm"]), "rollout"
        )  # the incarnation that it is registered as
        self._blobs = BlobStore(self._weights.directory)
        self._kept: dict[tuple[int, int], common_pb2.Trajectory] = {}
        self._kind, self._pattern = MESSAGE, ONE
        self._data = os.urandom(LARGE)

    async def OpenRun(self, request: rollout_pb2.OpenRunRequest, context: Any) -> rollout_pb2.OpenRunResponse:
        """The model's path says what bodies to make and how to send them."""
        config = json.loads(request.config_json)
        self._kind, self._pattern = config["model"]["path"].split("-")
        return rollout_pb2.OpenRunResponse(max_concurrency=config["rollout"]["max_concurrency"])

    async def Generate(
        self, request_iterator: AsyncIterator[rollout_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Answers assignments in order."""
        assigned: asyncio.Queue[tuple[int, int, int] | None] = asyncio.Queue()
        reader = asyncio.create_task(_read(request_iterator, assigned))
        go, writer = await asyncio.open_unix_connection(self._settings["go"])
        while (slot := await assigned.get()) is not None:
            if self._pattern == ONE:
                await go.readexactly(1)
            response, size = rollout_pb2.GenerateResponse(), 0
            while slot is not None:
                size += self._add(response, slot)
                room = size < RESPONSE_BYTES and self._pattern == PIPELINED
                slot = assigned.get_nowait() if room and not assigned.empty() else None
                if slot is None and not room:
                    break
            yield response
        writer.close()
        await reader

    def _add(self, response: rollout_pb2.GenerateResponse, slot: tuple[int, int, int]) -> int:
        started = time.monotonic()
        key = common_pb2.SlotKey(prompt_ordinal=slot[0], sample_index=slot[1])
        # Filled where it stands, as the rollout service does: no second copy for retention.
        body = response.chunks.add(sample=key, attempt=slot[2], policy_number=1).finished
        body.sample.CopyFrom(key)
        body.attempt = slot[2]
        body.finish_reason = common_pb2.FINISH_REASON_EOS
        body.producer = "producer"
        body.completion_text = repr(started)  # outside the digest; when this message began
        self._fill(body)
        body.body_digest, size = digest_and_size(body)
        if self._kind == ANSWER:
            body.completion_text += WORD * ANSWER_TOKENS
        self._kept[slot[0], slot[1]] = body
        return size

    def _fill(self, trajectory: common_pb2.Trajectory) -> None:
        body = trajectory.branches.add()
        if self._kind == ANSWER:
            body.segments.add(tokens=common_pb2.TokenSegment(token_ids=range(30_000, 30_000 + PROMPT)))
            sampled = common_pb2.TokenSegment(
                token_ids=range(40_000, 40_000 + ANSWER_TOKENS),
                log_probs=[-1.5] * ANSWER_TOKENS,
                distribution=SAMPLED_FROM,
                text_bytes=[len(WORD)] * ANSWER_TOKENS,
            )
            body.segments.add(policy_number=1, tokens=sampled)
            return
        if self._kind == MESSAGE:
            body.segments.add(tokens=common_pb2.TokenSegment(token_ids=range(30_000, 30_000 + PROMPT)))
            sampled = common_pb2.TokenSegment(
                token_ids=range(40_000, 40_000 + TOKENS), log_probs=[-1.5] * TOKENS, distribution=SAMPLED_FROM
            )
            body.segments.add(policy_number=1, tokens=sampled)
            return
        actions = body.segments.add(policy_number=1).actions
        if self._kind == REFERENCE:
            tensor = common_pb2.Tensor(data_type=common_pb2.DATA_TYPE_UINT8, shape=[LARGE])
            tensor.blob.CopyFrom(self._blobs.put(self._data))
            actions.observation["image"].CopyFrom(tensor)
            return
        for part in range(LARGE // PART):
            tensor = actions.observation[f"camera{part}"]
            tensor.data_type = common_pb2.DATA_TYPE_UINT8
            tensor.shape.append(PART)
            tensor.data = self._data[part * PART : (part + 1) * PART]

    async def ReleaseTrajectories(
        self, request: rollout_pb2.ReleaseTrajectoriesRequest, context: Any
    ) -> rollout_pb2.ReleaseTrajectoriesResponse:
        """Ends retention of bodies and what they refer to."""
        for sample in request.samples:
            body = self._kept.pop((sample.prompt_ordinal, sample.sample_index), None)
            for reference in bodies_of(body) if body is not None else ():
                self._blobs.release(reference)
        return rollout_pb2.ReleaseTrajectoriesResponse()

    async def close(self) -> None:
        """Removes the shared files."""
        self._weights.close()


async def _read(
    requests: AsyncIterator[rollout_pb2.GenerateRequest],
    assigned: asyncio.Queue[tuple[int, int, int] | None],
) -> None:
    async for request in requests:
        for group in request.assign.groups:
            for sample in group.samples:
                assigned.put_nowait((group.prompt_ordinal, sample.sample_index, sample.attempt))
    assigned.put_nowait(None)


class Consumer(trainer_pb2_grpc.TrainerServiceServicer):
    """Acknowledges groups once each member is whole: its digest is right, and what it refers to is read."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._blobs = BlobReader(Path(settings["shm"]), TOKEN)

    async def OpenRun(self, request: trainer_pb2.OpenRunRequest, context: Any) -> trainer_pb2.OpenRunResponse:
        """Groups may come one by one."""
        return trainer_pb2.OpenRunResponse(barrier=trainer_pb2.BARRIER_GROUP)

    async def Learn(
        self, request_iterator: AsyncIterator[trainer_pb2.LearnRequest], context: Any
    ) -> AsyncIterator[trainer_pb2.LearnResponse]:
        """One response a message."""
        async for request in request_iterator:
            response = trainer_pb2.LearnResponse()
            for group in request.groups:
                keys = [await self._take(member.trajectory) for member in group.members]
                response.outcomes.add(
                    prompt_ordinal=group.prompt_ordinal,
                    disposition=trainer_pb2.GROUP_DISPOSITION_ACCUMULATED,
                    digest=set_digest(keys),
                )
            yield response

    async def _take(self, body: common_pb2.Trajectory) -> tuple[int, int, int, str]:
        if trajectory_digest(body) != body.body_digest:
            raise ValueError("a body arrived changed")
        for reference in bodies_of(body):
            if len(await self._blobs.read(reference)) != LARGE:
                raise ValueError("a body by reference is not whole")
        return body.sample.prompt_ordinal, body.sample.sample_index, body.attempt, body.body_digest

    async def close(self) -> None:
        """Closes what it opened."""
        await self._blobs.close()


async def serve(kind: str, settings: dict[str, Any]) -> None:
    """One service until SIGTERM; its address goes to standard output."""
    servicer = Producer(settings) if kind == "producer" else Consumer(settings)
    server = GrpcServer("127.0.0.1:0", token=TOKEN, instance=kind)
    if isinstance(servicer, Producer):
        add: Any = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    else:
        add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server.add_service(add, servicer, f"benchmark.{kind}")
    print(await server.start(), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.drain(0)
    await servicer.close()


def main() -> None:
    """Command line."""
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    reuse_freed_memory()  # as the services' own entry points do
    if kind == "coordinator":
        from _chunk_coordinator import coordinate

        asyncio.run(coordinate(settings))
    else:
        asyncio.run(serve(kind, settings))


if __name__ == "__main__":
    main()
