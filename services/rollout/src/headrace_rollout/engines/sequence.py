"""One sample on its way: what it began with, where it goes, and what it has become. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

from headrace_rollout.engines.base import (
    CachedContext,
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
from headrace_rollout.engines.stopping import StopMatcher


@dataclass(frozen=True)
class Bounds:
    """What a model sets: its context and vocabulary, and the ids that end an answer."""

    context_limit: int
    vocabulary_size: int
    eos_ids: frozenset[int]

    def sequence(self, stream: Stream, group: Group, sample: Sample, matcher: StopMatcher | None) -> Sequence:
        """A sample of a group at its beginning."""
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
            len(prefix.token_ids) if prefix else 0,
            sample.cache if prefix else None,
        )

    def ended(self, sequence: Sequence) -> Finish | None:
        """Why a sample is at its end before a token was sampled here."""
        tokens = sequence.prefix.token_ids
        ids = sequence.context_ids()
        if not sequence.prompt_ids or min(ids) < 0 or max(ids) >= self.vocabulary_size:
            return Finish.ERROR
        if len(sequence.prompt_ids) > self.context_limit - 1:
            return Finish.PROMPT_TOO_LONG
        if tokens and tokens[-1] in self.eos_ids:
            return Finish.EOS
        return Finish.LENGTH if len(tokens) >= sequence.limit else None


@dataclass(eq=False)
class Sequence:
    """A sample of a stream; `limit` bounds its sampled tokens, the prefix included, of which `sent` have gone out."""

    stream: Stream
    key: SampleKey
    attempt: int
    prompt_ids: Ids[int]
    prefix: Prefix
    limit: int
    matcher: StopMatcher | None
    greedy: bool = False
    sent: int = 0
    cache: CachedContext | None = None

    @property
    def distribution(self) -> Distribution:
        """What its tokens are sampled from."""
        return self.stream.distribution.greedy if self.greedy else self.stream.distribution

    @property
    def full_length(self) -> int:
        """Tokens of prompt and answer if it runs to its limit."""
        return len(self.prompt_ids) + self.limit

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
        made: Ids[tuple[int, int]] | None = None,
        cache: CachedContext | None = None,
    ) -> Output:
        """The event that sends `tokens[sent:]`; an end or a stop carries the whole answer too.

        `made` says which versions made the tokens behind the prefix; None: `policy` alone.
        """
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
            whole=Prefix(tokens, log_probs, self._spans(len(tokens), made or [(policy.number, len(tokens))]))
            if ended
            else None,
            greedy=self.greedy,
            cache=cache,
        )

    def untouched(self, policy: Policy, *, finish: Finish | None = None) -> Output:
        """The event of a sample that no token was sampled for here."""
        prefix = self.prefix
        return self.output(
            prefix.token_ids,
            prefix.log_probs,
            self.sent,
            policy,
            finish=finish,
            stopped=finish is None,
            cache=self.cache,
        )

    def so_far(self, tokens: Ids[int], log_probs: Ids[float], sent: int, policy: Policy) -> Sequence:
        """The sample with what it has as its prefix; `policy` made what is new."""
        spans = self._spans(len(tokens), [(policy.number, len(tokens))])
        return replace(self, prefix=Prefix(tokens, log_probs, spans), sent=sent, cache=None)

    def _spans(self, count: int, made: Ids[tuple[int, int]]) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        left = count
        # A stop string may cut into the prefix, and with it into its spans.
        for number, tokens in [*self.prefix.spans, *made]:
            taken = min(tokens, left)
            left -= taken
            if taken and spans and spans[-1][0] == number:
                spans[-1] = (number, spans[-1][1] + taken)
            elif taken:
                spans.append((number, taken))
        return spans
