"""A running sample: the tokens that have come, what was sent of them, and where it ends. Knows no backend."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.hosted.backend import Request, Tokens
from headrace_rollout.engines.samples import Finish, TrajectoryUpdate
from headrace_rollout.engines.trajectory import RunningTrajectory


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

    def __post_init__(self) -> None:
        prefix = self.trajectory.prefix
        self._tokens, self._log_probs = list(prefix.token_ids), list(prefix.log_probs)
        self._sent = self.trajectory.sent

    def take(self, new: Tokens, policy: Policy, eos_ids: frozenset[int]) -> list[TrajectoryUpdate]:
        """What new tokens send: full chunks, and the end if they reach it; what lies behind the end is dropped."""
        number = policy.number if new.policy_number is None else new.policy_number
        made = Policy(number, policy.digest)
        outputs: list[TrajectoryUpdate] = []
        for token, log_prob in zip(new.token_ids, new.log_probs, strict=True):
            matcher = self.trajectory.matcher
            held_back = matcher.held_back if matcher else 0
            if self._spans and self._spans[-1][0] != number:
                outputs += self._chunk(Policy(self._spans[-1][0], ""), len(self._tokens) - held_back)
            self._add(token, log_prob, number)
            if finish := self._finish(token, eos_ids):
                self.ended = True
                return [*outputs, self._end(made, finish)]
            size = self.trajectory.stream.chunk_tokens
            free = len(self._tokens) - held_back
            if size and free - self._sent >= size:
                outputs += self._chunk(made, free)
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

    def _add(self, token: int, log_prob: float, number: int) -> None:
        self._tokens.append(token)
        self._log_probs.append(log_prob)
        if self._spans and self._spans[-1][0] == number:
            self._spans[-1] = (number, self._spans[-1][1] + 1)
        else:
            self._spans.append((number, 1))

    def _finish(self, token: int, eos_ids: frozenset[int]) -> Finish | None:
        if token in eos_ids:
            return Finish.EOS
        matcher = self.trajectory.matcher
        if matcher is not None and matcher.hit(self._tokens[-matcher.window :]):
            kept = matcher.kept(self._tokens)
            if kept is not None:
                del self._tokens[kept:], self._log_probs[kept:]
                return Finish.STOP
        return Finish.LENGTH if len(self._tokens) >= self.trajectory.limit else None

    def _chunk(self, made: Policy, end: int) -> list[TrajectoryUpdate]:
        if not self.trajectory.stream.chunk_tokens or end <= self._sent:
            return []
        output = self.trajectory.output(self._tokens[:end], self._log_probs[:end], self._sent, made)
        self._sent = end
        return [output]

    def _end(self, made: Policy, finish: Finish) -> TrajectoryUpdate:
        return self.trajectory.output(
            self._tokens, self._log_probs, self._sent, made, finish=finish, made=self._spans
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
