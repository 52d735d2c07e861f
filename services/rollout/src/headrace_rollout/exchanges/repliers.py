"""Instances that reply to the exchanges of one Generate stream: a stream there for each turn.

Knows no exchange: turns come as groups for an engine, and go back as an engine's outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of
from typing_extensions import override

from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import Finish, Group, Prefix, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.exchanges.engine import Replies
from headrace_rollout.wire import FINISH_REASONS, distribution_message, invalid

FINISHES = {reason: finish for finish, reason in FINISH_REASONS.items()}
Waiting = tuple[SlotKey, int]
"""A sample that is at a replier, and its attempt."""
Lost = Callable[[rollout_pb2.LostReplier], None]


class Repliers(Replies):
    """Divides turns between the instances.

    One that fails replies no more: `lost` is called once, and the samples that were there come back as stopped.
    """

    def __init__(self, named: Sequence[rollout_pb2.Replier], token: str | None, lost: Lost) -> None:
        check_repliers(named)
        self._repliers = [_Replier(each, token, lost) for each in named]

    @override
    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """Asks for turns, each where the fewest are; Refused NO_REPLIER when nobody replies any more."""
        for group in groups:
            live = [each for each in self._repliers if not each.reason]
            if not live:
                raise Refused("NO_REPLIER", "; ".join(each.reason for each in self._repliers))
            min(live, key=lambda each: each.asked).ask(stream, group)

    @override
    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        """Ends the turns of a stream (None: of all); single samples end there by themselves. Returns how many."""
        if keys is not None:
            return 0
        return sum([each.end(stream) for each in self._repliers])

    async def close(self) -> None:
        """Ends all streams and connections."""
        await asyncio.gather(*(each.close() for each in self._repliers))


def check_repliers(named: Sequence[rollout_pb2.Replier]) -> None:
    """Raises INVALID for an opening that names no replier, one without its address, or one twice."""
    addresses = [each.address for each in named]
    if not all(addresses) or not addresses or len({*addresses}) < len(addresses):
        raise invalid(
            "repliers: give at least one, each once with its address; the run's replies are made there"
        )


class _Replier:
    """One instance. `reason` says why it replies no more; empty while it does."""

    def __init__(self, message: rollout_pb2.Replier, token: str | None, lost: Lost) -> None:
        self.message, self.reason = message, ""
        self.timeout = message.timeout.ToNanoseconds() / 1e9 if message.HasField("timeout") else None
        self._lost = lost
        self._turns: dict[Stream, _Turn] = {}
        self._channel = dial(message.address, token=token)
        self.stub: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)  # type: ignore[no-untyped-call]

    @property
    def asked(self) -> int:
        """Turns that it has not returned."""
        return sum(len(turn.waiting) for turn in self._turns.values())

    def ask(self, stream: Stream, group: Group) -> None:
        """Sends a group of samples."""
        turn = self._turns.get(stream)
        if turn is None:
            turn = self._turns[stream] = _Turn(self, stream)
        turn.ask(group)

    def end(self, stream: Stream | None) -> int:
        """Ends the calls of a stream (None: of all) without updates of their samples; returns how many there were."""
        ended = [each for each in self._turns if stream is None or each is stream]
        return sum([self._turns.pop(each).end() for each in ended])

    def lose(self, reason: str) -> None:
        """Asks for nothing any more; the samples that were there come back as stopped."""
        if self.reason:
            return
        self.reason = f"{self.message.address}: {reason}"
        self._lost(rollout_pb2.LostReplier(address=self.message.address, reason=reason))
        for turn in self._turns.values():
            turn.stop()

    async def close(self) -> None:
        """Ends all calls and the connection."""
        self.reason = self.reason or "its stream ended"
        self.end(None)
        await self._channel.close(None)


class _Turn:
    """One Generate call: all samples of one turn that are at one instance."""

    def __init__(self, replier: _Replier, stream: Stream) -> None:
        self.waiting: dict[Waiting, Group] = {}
        self._replier, self._stream = replier, stream
        self._groups: asyncio.Queue[Group] = asyncio.Queue()
        self._call = asyncio.create_task(self._run(), name=f"replies of {replier.message.address}")

    def ask(self, group: Group) -> None:
        """Sends a group."""
        for sample in group.samples:
            self.waiting[SlotKey(group.prompt_ordinal, sample.sample_index), sample.attempt] = group
        self._groups.put_nowait(group)

    def end(self) -> int:
        """Ends the call; nothing comes back. Returns how many samples were there."""
        count = len(self.waiting)
        self.waiting.clear()
        self._call.cancel()
        return count

    def stop(self) -> None:
        """Ends the call; what was there comes back as stopped."""
        stopped = [self._output(waiting, group, ()) for waiting, group in self.waiting.items()]
        self.end()
        if stopped:
            self._stream.sink(stopped)

    async def _run(self) -> None:
        replier = self._replier
        try:
            async for response in replier.stub.Generate(self._requests(), timeout=replier.timeout):
                self._take(response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._stream.failed(f"{replier.message.address} refuses to reply: {message_of(error)}")
            replier.lose(message_of(error))
        else:
            replier.lose("it ended its stream")

    def _take(self, response: rollout_pb2.GenerateResponse) -> None:
        outputs = []
        for chunk in response.chunks:
            key = SlotKey(chunk.sample.prompt_ordinal, chunk.sample.sample_index)
            group = self.waiting.pop((key, chunk.attempt), None) if chunk.HasField("finished") else None
            if group is not None:
                outputs.append(self._output((key, chunk.attempt), group, _sampled(chunk.finished), chunk))
        if outputs:
            self._stream.sink(outputs)
        if response.partials or response.revoked:
            self._replier.lose("it was stopped")

    def _output(
        self,
        waiting: Waiting,
        group: Group,
        ids: Sequence[int],
        chunk: common_pb2.TrajectoryChunk | None = None,
    ) -> TrajectoryUpdate:
        """A reply that is whole, or one that was stopped; nobody reads its log-probs."""
        key, attempt = waiting
        finish = None if chunk is None else FINISHES.get(chunk.finished.finish_reason, Finish.ERROR)
        number = 0 if chunk is None else chunk.policy_number
        whole = Prefix(ids, [0.0] * len(ids), [(number, len(ids))] if ids else [])
        return TrajectoryUpdate(
            key,
            attempt,
            0,
            ids,
            whole.log_probs,
            number,
            group.prompt_ids,
            finish=finish,
            stopped=chunk is None,
            whole=whole,
        )

    async def _requests(self) -> AsyncIterator[rollout_pb2.GenerateRequest]:
        message, stream = self._replier.message, self._stream
        yield rollout_pb2.GenerateRequest(
            open=rollout_pb2.GenerateOpen(
                header=message.header,
                policy_number=message.policy_number,
                distribution=distribution_message(stream.distribution),
                max_new_tokens=stream.max_new_tokens,
                stop=stream.stop,
                seed=stream.seed,
                evaluation=True,
            )
        )
        while True:
            groups = [await self._groups.get()]
            while not self._groups.empty():
                groups.append(self._groups.get_nowait())
            assign = rollout_pb2.AssignGroups(groups=map(_group_message, groups))
            yield rollout_pb2.GenerateRequest(assign=assign)


def _sampled(trajectory: common_pb2.Trajectory) -> list[int]:
    """Ids behind the prompt, which is the first segment."""
    return [token for segment in trajectory.segments[1:] for token in segment.tokens.token_ids]


def _group_message(group: Group) -> rollout_pb2.GroupAssignment:
    message = rollout_pb2.GroupAssignment(prompt_ordinal=group.prompt_ordinal)
    message.prompt.token_ids.values.extend(group.prompt_ids)
    for sample in group.samples:
        message.samples.add(sample_index=sample.sample_index, attempt=sample.attempt, greedy=sample.greedy)
    return message
