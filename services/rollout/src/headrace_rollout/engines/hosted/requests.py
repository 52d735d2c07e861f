"""The samples of a hosted engine: waiting in order, running as requests, leaving with an end or a partial output.

Runs on the engine's loop alone. Knows no weights and no process.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from headrace_modelkit.devices import says_out_of_memory
from headrace_modelkit.tokenizer import TextCodec

from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.figures import Figures
from headrace_rollout.engines.hosted.backend import Backend, Request, Tokens, within
from headrace_rollout.engines.hosted.process import EngineProcess
from headrace_rollout.engines.hosts import BackendFailed
from headrace_rollout.engines.rows import Rows
from headrace_rollout.engines.samples import Finish, Group, Routes, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.engines.trajectory import Bounds, RunningTrajectory, StopMatchers


@dataclass(eq=False)
class RequestedTrajectory:
    """A trajectory with a request in the engine."""

    trajectory: RunningTrajectory
    request: Request
    task: asyncio.Task[None] | None = None
    ended: bool = False
    _tokens: list[int] = field(default_factory=list)
    _log_probs: list[float] = field(default_factory=list)
    _spans: list[tuple[int, int]] = field(default_factory=list)
    _sent: int = 0
    _routes: Routes | None = None

    def __post_init__(self) -> None:
        prefix = self.trajectory.prefix
        self._tokens, self._log_probs = list(prefix.token_ids), list(prefix.log_probs)
        self._sent = self.trajectory.sent

    def take(self, new: Tokens, policy: Policy, eos_ids: frozenset[int]) -> list[TrajectoryUpdate]:
        """What new tokens send: full chunks, and the end if they reach it; what lies behind the end is dropped."""
        number = policy.number if new.policy_number is None else new.policy_number
        made = Policy(number, policy.digest)
        self._routes = new.routes
        matcher = self.trajectory.matcher
        held_back = matcher.held_back if matcher else 0
        outputs: list[TrajectoryUpdate] = []
        if self._spans and self._spans[-1][0] != number:
            outputs += self._chunk(Policy(self._spans[-1][0], ""), len(self._tokens) - held_back)
        finish = self._add(new, number, eos_ids)
        if finish is not None:
            self.ended = True
            return [*outputs, self._end(made, finish)]
        size = self.trajectory.stream.chunk_tokens
        while size and len(self._tokens) - held_back - self._sent >= size:
            outputs += self._chunk(made, self._sent + size)
        return outputs

    def stop(self, policy: Policy) -> TrajectoryUpdate:
        """The event of a stop from outside, with what has come so far."""
        self.ended = True
        return self.trajectory.output(
            self._tokens, self._log_probs, self._sent, policy, stopped=True, made=self._spans
        )

    def fail(self, policy: Policy) -> TrajectoryUpdate:
        """The event of a request that the engine refused, with what had come."""
        self.ended = True
        return self._end(policy, Finish.ERROR)

    def _add(self, new: Tokens, number: int, eos_ids: frozenset[int]) -> Finish | None:
        """Takes tokens up to the answer's end, if they reach it."""
        before, room = len(self._tokens), self.trajectory.limit - len(self._tokens)
        ids = new.token_ids[:room]
        finish = Finish.LENGTH if len(ids) == room else None
        if not eos_ids.isdisjoint(ids):
            ids = ids[: next(place for place, token in enumerate(ids) if token in eos_ids) + 1]
            finish = Finish.EOS
        self._tokens += ids
        self._log_probs += new.log_probs[: len(ids)]
        if self._spans and self._spans[-1][0] == number:
            self._spans[-1] = (number, self._spans[-1][1] + len(ids))
        else:
            self._spans.append((number, len(ids)))
        kept = self._before_stop(before, len(self._tokens) - (finish is Finish.EOS))
        if kept is None:
            return finish
        del self._tokens[kept:], self._log_probs[kept:]
        return Finish.STOP

    def _before_stop(self, start: int, end: int) -> int | None:
        """Tokens before the first stop string that one of the tokens from `start` to `end` completes."""
        matcher = self.trajectory.matcher
        if matcher is None or not matcher.hit(self._tokens[max(0, start + 1 - matcher.window) : end]):
            return None
        for last in range(start + 1, end + 1):
            if matcher.hit(self._tokens[max(0, last - matcher.window) : last]):
                kept = matcher.kept(self._tokens[:last])
                if kept is not None:
                    return kept
        return None

    def _chunk(self, made: Policy, end: int) -> list[TrajectoryUpdate]:
        if not self.trajectory.stream.chunk_tokens or end <= self._sent:
            return []
        output = self.trajectory.output(self._tokens[:end], self._log_probs[:end], self._sent, made)
        self._sent = end
        return [output]

    def _end(self, made: Policy, finish: Finish) -> TrajectoryUpdate:
        return self.trajectory.output(
            self._tokens,
            self._log_probs,
            self._sent,
            made,
            finish=finish,
            made=self._spans,
            routes=self._routes,
        )


def seed_of(trajectory: RunningTrajectory) -> int:
    """The seed of a sample's request, below 2^31: of the run's seed, the slot and where it goes on."""
    parts = (
        trajectory.stream.seed,
        trajectory.key.prompt_ordinal,
        trajectory.key.sample_index,
        len(trajectory.prefix.token_ids),
    )
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


UPDATE_TOKENS, LOOK_TOKENS = 16, 4
"""Tokens that an engine hands out at a time; the second with stop strings, because it goes on behind one."""


def interval_of(trajectory: RunningTrajectory) -> int:
    """Tokens between two updates of a sample: each update costs the front end as much as a few tokens do."""
    most = UPDATE_TOKENS if trajectory.matcher is None else LOOK_TOKENS
    return min(most, trajectory.stream.chunk_tokens or most)


_log = logging.getLogger(__name__)


class Requests:
    """Waiting and running samples; at most `rows` run."""

    def __init__(
        self,
        process: EngineProcess,
        codec: TextCodec,
        bounds: Bounds,
        rows: Rows,
        figures: Figures,
        policy: Callable[[], Policy | None],
        command_s: float,
    ) -> None:
        self._process = process
        self._backend: Backend = process.backend
        self._bounds = bounds
        self._rows = rows
        self._figures = figures
        self._policy = policy
        self._command_s = command_s
        self._waiting: deque[RunningTrajectory] = deque()
        self._running: dict[str, RequestedTrajectory] = {}
        self._matchers = StopMatchers(codec)
        self._numbers = itertools.count(1)
        self._busy_since = 0.0
        self._unsent: dict[Stream, list[TrajectoryUpdate]] = {}

    @property
    def living(self) -> int:
        """Running and waiting samples."""
        return len(self._running) + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Samples without a request."""
        return len(self._waiting)

    def add(self, stream: Stream, groups: Sequence[Group], policy: Policy, *, accept: bool) -> None:
        """Queues groups; with `accept` false they come back at once as they are."""
        outputs: list[TrajectoryUpdate] = []
        for group in groups:
            for sample in group.samples:
                trajectory = self._bounds.begin(stream, group, sample, self._matchers.of(stream.stop))
                if (finish := self._bounds.ended(trajectory)) is not None:
                    outputs.append(trajectory.untouched(policy, finish=finish))
                elif accept:
                    self._waiting.append(trajectory)
                else:
                    outputs.append(trajectory.untouched(policy))
        if outputs:
            self._send(stream, outputs)
        self._fill()

    async def stop(self, keys: Sequence[SlotKey] | None, stream: Stream | None) -> int:
        """Ends samples (None: all), of one stream or of any; returns when the engine has released them."""
        wanted = None if keys is None else set(keys)
        policy = self._policy()
        if policy is None:
            return 0

        def meant(trajectory: RunningTrajectory) -> bool:
            return (wanted is None or trajectory.key in wanted) and (
                stream is None or trajectory.stream is stream
            )

        gone = [trajectory for trajectory in self._waiting if meant(trajectory)]
        self._waiting = deque(trajectory for trajectory in self._waiting if not meant(trajectory))
        for trajectory in gone:
            self._send(trajectory.stream, [trajectory.untouched(policy)])
        stopped = [s for s in self._running.values() if meant(s.trajectory) and not s.ended]
        for sample in stopped:
            self._send(sample.trajectory.stream, [sample.stop(policy)])
        self._send_all()
        await self._end(stopped)
        return len(gone) + len(stopped)

    def fail(self, reason: str) -> None:
        """The engine is gone: every stream with a living sample fails."""
        if says_out_of_memory(reason):
            reason = self._rows.without_memory(reason)
        streams = {trajectory.stream for trajectory in self._waiting}
        streams |= {s.trajectory.stream for s in self._running.values() if not s.ended}
        for sample in list(self._running.values()):
            sample.ended = True
            if sample.task is not None:
                sample.task.cancel()
        self._waiting.clear()
        self._send_all()
        for stream in streams:
            stream.failed(reason)

    async def _end(self, samples: Sequence[RequestedTrajectory]) -> None:
        tasks = [sample.task for sample in samples if sample.task is not None]
        if not tasks:
            return
        try:
            ids = [sample.request.request_id for sample in samples]
            await within(self._command_s, f"abort of {self._backend.name}", self._backend.abort(ids))
        except BackendFailed as error:
            self._process.died(str(error))
        _, late = await asyncio.wait(tasks, timeout=self._command_s)
        for task in late:
            task.cancel()

    def _fill(self) -> None:
        policy = self._policy()
        while policy is not None and self._waiting and len(self._running) < self._rows.most:
            trajectory = self._waiting.popleft()
            if not trajectory.stream.holds():
                self._send(trajectory.stream, [trajectory.untouched(policy)])
                continue
            sample = RequestedTrajectory(trajectory, self._request(trajectory, policy))
            if not self._running:
                self._busy_since = time.perf_counter()
            self._running[sample.request.request_id] = sample
            sample.task = asyncio.create_task(self._run(sample), name=sample.request.request_id)
            # Not at the end of _run, which a task that is cancelled before its first step never enters.
            sample.task.add_done_callback(partial(self._left, sample))
            self._figures.prefill_tokens += len(sample.request.token_ids)

    def _request(self, trajectory: RunningTrajectory, policy: Policy) -> Request:
        return Request(
            request_id=f"sample-{next(self._numbers)}",
            token_ids=trajectory.context_ids(),
            max_new_tokens=trajectory.limit - len(trajectory.prefix.token_ids),
            distribution=trajectory.distribution,
            seed=seed_of(trajectory),
            eos_ids=sorted(self._bounds.eos_ids),
            cache_salt=policy.digest,
            interval=interval_of(trajectory),
            adapter=trajectory.stream.adapter,
            images=trajectory.images,
        )

    async def _run(self, sample: RequestedTrajectory) -> None:
        self._process.heard(len(self._running))
        try:
            await self._follow(sample)
        except BackendFailed as error:
            if not self._backend.alive:
                self._process.died(str(error))
            elif not sample.ended and (policy := self._policy()) is not None:
                # The engine is of use to the others: this one's group is made again, or dropped with its reason.
                about = {"engine": self._backend.name, "prompt": sample.trajectory.key.prompt_ordinal}
                _log.warning("the engine refused a request: %s", error, extra=about)
                self._send(sample.trajectory.stream, [sample.fail(policy)])

    async def _follow(self, sample: RequestedTrajectory) -> None:
        stream = sample.trajectory.stream
        async with aclosing(self._backend.generate(sample.request)) as tokens:
            async for new in tokens:
                self._process.heard(len(self._running))
                policy = self._policy()
                if sample.ended or policy is None:
                    continue  # stopped from outside: tokens that still come are dropped
                if not stream.holds():
                    break
                self._process.made_progress()
                self._figures.sampled_tokens += len(new.token_ids)
                if outputs := sample.take(new, policy, self._bounds.eos_ids):
                    self._send(stream, outputs)
                if sample.ended:
                    self._figures.samples += 1
                    return
        if not sample.ended and not self._backend.alive:
            raise BackendFailed("its process ended")
        if not sample.ended and (policy := self._policy()) is not None:
            # Its lease is not held any more, or the engine ended it: another one goes on from here.
            self._send(stream, [sample.stop(policy)])

    def _send(self, stream: Stream, outputs: Sequence[TrajectoryUpdate]) -> None:
        """What one turn of the loop has for a stream goes out at its end, in one piece."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.setdefault(stream, []).extend(outputs)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for stream, outputs in unsent.items():
            stream.sink(outputs)

    def _left(self, sample: RequestedTrajectory, _ended: asyncio.Task[None]) -> None:
        del self._running[sample.request.request_id]
        self._process.heard(len(self._running))
        if not self._running:
            self._figures.busy_s += time.perf_counter() - self._busy_since
        self._fill()
