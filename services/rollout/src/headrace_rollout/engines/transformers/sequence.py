"""One sample on its way: what it began with, where it goes, and what it has become. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from torch import Tensor

from headrace_rollout.engines.base import (
    Distribution,
    Finish,
    Group,
    Output,
    Policy,
    Prefix,
    Sample,
    SampleKey,
    Stream,
)
from headrace_rollout.engines.transformers.cache import PromptKeys
from headrace_rollout.engines.transformers.stopping import StopMatcher


@dataclass(eq=False)
class Sequence:
    """A sample of a stream; `limit` bounds its sampled tokens, the prefix included."""

    stream: Stream
    key: SampleKey
    attempt: int
    prompt_ids: Ids[int]
    prefix: Prefix
    limit: int
    matcher: StopMatcher | None
    greedy: bool = False

    @property
    def distribution(self) -> Distribution:
        """What its tokens are sampled from."""
        return self.stream.distribution.greedy if self.greedy else self.stream.distribution

    def context_ids(self) -> list[int]:
        """Ids that a prefill computes: prompt and prefix."""
        return [*self.prompt_ids, *self.prefix.token_ids]

    def output(
        self,
        tokens: Ids[int],
        log_probs: Ids[float],
        sent: int,
        policy: Policy,
        *,
        finish: Finish | None = None,
        stopped: bool = False,
    ) -> Output:
        """The event that sends `tokens[sent:]`; an end or a stop carries the whole answer too."""
        ended = finish is not None or stopped
        sent = min(sent, len(tokens))
        return Output(
            key=self.key,
            attempt=self.attempt,
            offset=sent,
            token_ids=tokens[sent:],
            log_probs=log_probs[sent:],
            policy_number=policy.number,
            prompt_ids=self.prompt_ids,
            finish=finish,
            stopped=stopped,
            whole=Prefix(tokens, log_probs, self._spans(len(tokens), policy)) if ended else None,
            greedy=self.greedy,
        )

    def untouched(self, policy: Policy, *, finish: Finish | None = None) -> Output:
        """The event of a sample that no token was sampled for here."""
        prefix = self.prefix
        return self.output(
            prefix.token_ids,
            prefix.log_probs,
            len(prefix.token_ids),
            policy,
            finish=finish,
            stopped=finish is None,
        )

    def _spans(self, count: int, policy: Policy) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        left = count
        # A stop string may cut into the prefix, and with it into its spans.
        for number, tokens in [*self.prefix.spans, (policy.number, count)]:
            taken = min(tokens, left)
            left -= taken
            if taken and spans and spans[-1][0] == number:
                spans[-1] = (number, spans[-1][1] + taken)
            elif taken:
                spans.append((number, taken))
        return spans


@dataclass(eq=False)
class Waiting:
    """Samples that share one context; `keys` and `hidden_D` are there once it was prefilled."""

    context_ids: list[int]
    members: list[Sequence]
    keys: PromptKeys | None = None
    hidden_D: Tensor | None = None
    wave: int = 0


@dataclass(eq=False)
class Arrivals:
    """Turns groups into waiting contexts: one for a group's fresh members, one for each with a prefix."""

    context_limit: int
    vocabulary_size: int
    eos_ids: frozenset[int]
    finished: list[tuple[Sequence, Finish]] = field(default_factory=list)

    def accept(self, stream: Stream, group: Group, matcher: StopMatcher | None, wave: int) -> list[Waiting]:
        """Contexts to compute; members that are at their end already go to `finished`."""
        fresh: list[Sequence] = []
        waiting: list[Waiting] = []
        for sample in group.samples:
            sequence = self._sequence(stream, group, sample, matcher)
            if finish := self._ended(sequence):
                self.finished.append((sequence, finish))
            elif sequence.prefix.token_ids:
                waiting.append(Waiting(sequence.context_ids(), [sequence], wave=wave))
            else:
                fresh.append(sequence)
        if fresh:
            waiting.insert(0, Waiting(list(group.prompt_ids), fresh, wave=wave))
        return waiting

    def _sequence(
        self, stream: Stream, group: Group, sample: Sample, matcher: StopMatcher | None
    ) -> Sequence:
        # Another batch composition would round the prefix's keys differently: start at token 0.
        prefix = None if stream.deterministic else sample.prefix
        room = self.context_limit - len(group.prompt_ids)
        return Sequence(
            stream,
            SampleKey(group.prompt_ordinal, sample.sample_index),
            sample.attempt,
            group.prompt_ids,
            prefix or Prefix([], [], []),
            min(stream.max_new_tokens, room),
            matcher,
            sample.greedy,
        )

    def _ended(self, sequence: Sequence) -> Finish | None:
        tokens = sequence.prefix.token_ids
        ids = sequence.context_ids()
        if not sequence.prompt_ids or min(ids) < 0 or max(ids) >= self.vocabulary_size:
            return Finish.ERROR
        if len(sequence.prompt_ids) > self.context_limit - 1:
            return Finish.PROMPT_TOO_LONG
        if tokens and tokens[-1] in self.eos_ids:
            return Finish.EOS
        return Finish.LENGTH if len(tokens) >= sequence.limit else None
