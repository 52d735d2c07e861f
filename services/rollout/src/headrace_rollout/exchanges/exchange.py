"""One trajectory in which a second policy replies to the first one: whose turn it is and what was said.

Knows no engine and no stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_rollout.engines.samples import (
    GIVEN,
    Distribution,
    Finish,
    Group,
    Prefix,
    Sample,
    SlotKey,
    TrajectoryUpdate,
)

SEED_BYTES = 8


@dataclass(frozen=True)
class Rules:
    """How an exchange goes: `before` and `after` are the ids around each of `turns` replies."""

    turns: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    distribution: Distribution
    max_new_tokens: int
    stop: tuple[str, ...]
    context_limit: int
    last_alone: bool = False


def seed_of(text: str) -> int:
    """A seed for what a text names."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=SEED_BYTES).digest()) >> 1


@dataclass(frozen=True)
class Turn:
    """The `index`-th answer, or the reply to it."""

    index: int
    reply: bool

    def seed(self, seed: int) -> int:
        """The seed of the turn's tokens: the first answer has the run's own, so that no two turns draw alike."""
        if self == FIRST:
            return seed
        return seed_of(f"{seed}/{self.index}/{self.reply}")


FIRST = Turn(0, reply=False)


@dataclass(eq=False)
class Exchange:
    """A sample under way. `tokens` are all those behind the prompt."""

    rules: Rules
    prompt_ids: Sequence[int]
    key: SlotKey
    sample: Sample
    turn: Turn = FIRST
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    last_answer: int = 0
    """Where the newest answer begins in `tokens`."""

    def take(self, output: TrajectoryUpdate) -> Finish | None:
        """Adds what the present turn made; returns how the exchange ended, or None where `turn` is the next one."""
        assert output.whole is not None
        if self.turn.reply:
            return self._replied(output.whole.token_ids)
        self.last_answer = len(self.tokens)
        self.tokens += output.whole.token_ids
        self.log_probs += output.whole.log_probs
        self.spans += output.whole.spans
        if self.turn.index == self.rules.turns:
            return output.finish
        return self._give(self.rules.before, Turn(self.turn.index, reply=True))

    def group(self) -> Group:
        """What the present turn asks of an engine: the exchange so far is its prompt."""
        sample = Sample(
            self.key.sample_index, self.sample.attempt, greedy=self.sample.greedy and not self.turn.reply
        )
        return Group(self.key.prompt_ordinal, [*self.prompt_ids, *self.tokens], [sample])

    def output(self, policy_number: int, *, finish: Finish | None = None) -> TrajectoryUpdate:
        """The exchange for the stream's caller: ended, or stopped without tokens, as it begins anew elsewhere."""
        done = finish is not None
        whole = Prefix(self.tokens, self.log_probs, self.spans) if done else Prefix([], [], [])
        return TrajectoryUpdate(
            key=self.key,
            attempt=self.sample.attempt,
            offset=0,
            token_ids=whole.token_ids,
            log_probs=whole.log_probs,
            policy_number=policy_number,
            prompt_ids=self.prompt_ids,
            finish=finish,
            stopped=not done,
            whole=whole,
            greedy=self.sample.greedy,
            text_from=self.last_answer if self.rules.last_alone else 0,
        )

    def _replied(self, ids: Sequence[int]) -> Finish | None:
        return self._give((*ids, *self.rules.after), Turn(self.turn.index + 1, reply=False))

    def _give(self, ids: Sequence[int], turn: Turn) -> Finish | None:
        """Adds ids that carry no loss. An exchange that the context has no room for ends with its last answer."""
        ahead = len(self.prompt_ids) + len(self.tokens) + len(ids)
        if ahead >= self.rules.context_limit - len(self.rules.after) - 1:
            self._cut_to_answer()
            return Finish.LENGTH
        if ids:
            self.tokens += ids
            self.log_probs += [0.0] * len(ids)
            self.spans.append((GIVEN, len(ids)))
        self.turn = turn
        return None

    def _cut_to_answer(self) -> None:
        """Drops the given tokens behind the last answer, which no answer follows."""
        while self.spans and self.spans[-1][0] == GIVEN:
            _, count = self.spans.pop()
            del self.tokens[-count:], self.log_probs[-count:]
