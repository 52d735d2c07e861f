"""One sample on its way: what it began with, where it goes, and what it has become. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_modelkit.tokenizer import TextCodec

from headrace_rollout.engines.base import Policy, Refused
from headrace_rollout.engines.samples import (
    CachedContext,
    Distribution,
    Finish,
    Group,
    ImageAt,
    Prefix,
    Routes,
    Sample,
    SlotKey,
    Stream,
    TrajectoryUpdate,
)

# Extra ids looked at before the longest stop string's: a cut multi-byte character needs up to four.
_SLACK = 8


class StopMatcher:
    """Looks for stop strings in the text of sampled ids."""

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._codec = codec
        self._stops = [stop for stop in stops if stop]
        # An id stands for at least one byte, so a stop string spans at most this many ids.
        self.held_back = max((len(stop.encode()) for stop in self._stops), default=0)
        self.window = self.held_back + _SLACK

    def hit(self, tail: Sequence[int]) -> bool:
        """Whether the last `window` ids hold a stop string; cheap enough for every token."""
        text = self._text(tail)
        return any(stop in text for stop in self._stops)

    def kept(self, ids: Sequence[int]) -> int | None:
        """Number of ids before the first stop string, or None while there is none.

        An id whose text reaches into the stop string is cut with it.
        """
        text = self._text(ids)
        starts = [found for stop in self._stops if (found := text.find(stop)) >= 0]
        if not starts:
            return None
        start = min(starts)
        kept = len(ids)
        while kept and len(self._text(ids[:kept])) > start:
            kept -= 1
        return kept

    def _text(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=False)


class StopMatchers:
    """One matcher for each set of stop strings."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._made: dict[tuple[str, ...], StopMatcher] = {}

    def of(self, stops: tuple[str, ...]) -> StopMatcher | None:
        """The matcher of these strings; None for none."""
        if stops and stops not in self._made:
            self._made[stops] = StopMatcher(self._codec, stops)
        return self._made.get(stops)


@dataclass(frozen=True)
class Bounds:
    """What a model sets: its context and vocabulary, and the ids that end an answer."""

    context_limit: int
    vocabulary_size: int
    eos_ids: frozenset[int]

    def begin(
        self, stream: Stream, group: Group, sample: Sample, matcher: StopMatcher | None
    ) -> RunningTrajectory:
        """A sample of a group at its beginning."""
        room, prefix = self.context_limit - len(group.prompt_ids), sample.prefix
        return RunningTrajectory(
            stream,
            SlotKey(group.prompt_ordinal, sample.sample_index),
            sample.attempt,
            group.prompt_ids,
            prefix or Prefix([], [], []),
            min(stream.max_new_tokens, room),
            matcher,
            sample.greedy,
            len(prefix.token_ids) if prefix else 0,
            sample.cache if prefix else None,
            group.images,
        )

    def ended(self, trajectory: RunningTrajectory) -> Finish | None:
        """Why a sample is at its end before a token was sampled here."""
        tokens = trajectory.prefix.token_ids
        ids = trajectory.context_ids()
        if not trajectory.prompt_ids or min(ids) < 0 or max(ids) >= self.vocabulary_size:
            return Finish.ERROR
        if len(trajectory.prompt_ids) > self.context_limit - 1:
            return Finish.PROMPT_TOO_LONG
        if tokens and tokens[-1] in self.eos_ids:
            return Finish.EOS
        return Finish.LENGTH if len(tokens) >= trajectory.limit else None


@dataclass(eq=False)
class RunningTrajectory:
    """A sample of a stream; `limit` bounds its sampled tokens, the prefix included, of which `sent` have gone out."""

    stream: Stream
    key: SlotKey
    attempt: int
    prompt_ids: Sequence[int]
    prefix: Prefix
    limit: int
    matcher: StopMatcher | None
    greedy: bool = False
    sent: int = 0
    cache: CachedContext | None = None
    images: tuple[ImageAt, ...] = ()
    """Of the prompt."""

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
        tokens: Sequence[int],
        log_probs: Sequence[float],
        sent: int,
        policy: Policy,
        *,
        finish: Finish | None = None,
        stopped: bool = False,
        made: Sequence[tuple[int, int]] | None = None,
        cache: CachedContext | None = None,
        routes: Routes | None = None,
    ) -> TrajectoryUpdate:
        """The event that sends `tokens[sent:]`; an end or a stop carries the whole answer too.

        `made` says which versions made the tokens behind the prefix; None: `policy` alone. `routes` are those of the
        whole context, where the engine tells them.
        """
        ended = finish is not None or stopped
        sent = min(sent, len(tokens))
        return TrajectoryUpdate(
            key=self.key,
            attempt=self.attempt,
            offset=sent,
            token_ids=tokens[sent:],
            log_probs=log_probs[sent:],
            policy_number=policy.number,
            prompt_ids=self.prompt_ids,
            finish=finish,
            stopped=stopped,
            whole=self._whole(tokens, log_probs, made or [(policy.number, len(tokens))], routes)
            if ended
            else None,
            greedy=self.greedy,
            cache=cache,
            images=self.images if ended else (),
        )

    def untouched(self, policy: Policy, *, finish: Finish | None = None) -> TrajectoryUpdate:
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

    def so_far(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        sent: int,
        policy: Policy,
        routes: Routes | None = None,
    ) -> RunningTrajectory:
        """The sample with what it has as its prefix; `policy` made what is new."""
        prefix = self._whole(tokens, log_probs, [(policy.number, len(tokens))], routes)
        return replace(self, prefix=prefix, sent=sent, cache=None)

    def _whole(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        made: Sequence[tuple[int, int]],
        routes: Routes | None,
    ) -> Prefix:
        read = self.prefix.routes
        if routes is not None:
            read = routes.behind(read, len(self.prompt_ids) + len(tokens) - 1)
        return Prefix(tokens, log_probs, self._spans(len(tokens), made), read)

    def _spans(self, count: int, made: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
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


Scored = tuple[Sequence[int], int]
"""Ids, and from which of them on log-probs are wanted."""


def check_scored(
    sequences: Sequence[Scored], distribution: Distribution, context: int, vocabulary: int
) -> None:
    """Raises Refused(INVALID) on what cannot be scored."""
    if distribution.repetition_penalty != 1.0:
        raise Refused(
            "INVALID", "distribution.repetition_penalty: given tokens are scored without one; set 1"
        )
    for index, (ids, start) in enumerate(sequences):
        if not 1 <= start <= len(ids) or len(ids) > context:
            raise Refused(
                "INVALID",
                f"sequences[{index}]: {len(ids)} ids from {start}; start at 1 or later and at most {context}",
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise Refused("INVALID", f"sequences[{index}].token_ids: ids must lie below {vocabulary}")
