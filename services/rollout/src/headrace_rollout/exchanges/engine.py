"""An engine whose samples are exchanges between its own policy and a second one: on the same devices, or elsewhere.

The first engine makes answers, the second one replies; each turn is a sample of its own to them. Outputs of turns come
from the engines' threads and are handled in the event loop. Knows no gRPC and no run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from typing_extensions import override

from headrace_rollout.engines.base import Engine, Policy, Refused
from headrace_rollout.engines.beside import FROZEN_NUMBER, EngineBeside, Frozen
from headrace_rollout.engines.figures import BusyTime
from headrace_rollout.engines.samples import Finish, Group, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.exchanges.exchange import FIRST, Exchange, Rules, Turn


class Replies(Protocol):
    """What makes the replies to a stream's answers: an engine here, or instances elsewhere."""

    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """Asks for replies, as `Engine.submit`."""

    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        """Stops replies, as `Engine.abort`."""


@dataclass(eq=False)
class OtherSide:
    """The policy that replies to a stream's answers, and for how long some exchange was at either policy."""

    rules: Rules
    replies: Replies
    answering: BusyTime = field(default_factory=BusyTime)
    replying: BusyTime = field(default_factory=BusyTime)

    def at(self, turn: Turn) -> BusyTime:
        """The times of the policy whose turn it is."""
        return self.replying if turn.reply else self.answering

    def seconds(self) -> dict[str, float]:
        """Seconds until now in which some exchange was at either policy."""
        return {"answer": self.answering.seconds, "reply": self.replying.seconds}


@dataclass(eq=False)
class _StreamExchanges:
    """The exchanges of one stream, the streams of their turns at the engines, and submissions under way."""

    outer: Stream
    side: OtherSide
    live: dict[SlotKey, Exchange] = field(default_factory=dict)
    turns: dict[Turn, Stream] = field(default_factory=dict)
    submitting: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, exchange: Exchange) -> None:
        """Notes that an exchange is at the policy whose turn it is."""
        self.live[exchange.key] = exchange
        self.side.at(exchange.turn).begin()

    def drop(self, key: SlotKey) -> Exchange | None:
        """Takes out an exchange in the middle of a turn."""
        if (exchange := self.live.pop(key, None)) is not None:
            self.side.at(exchange.turn).end()
        return exchange

    def emit(self, outputs: list[TrajectoryUpdate]) -> None:
        """Sends what has ended."""
        if outputs:
            self.outer.sink(outputs)

    def submitted(self, task: asyncio.Task[None]) -> None:
        """A turn was submitted. Where that failed the stream fails, as nothing would come back for the turn."""
        self.submitting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.outer.failed(f"{type(error).__name__}: {error}")

    def stop(self, keys: Iterable[SlotKey]) -> int:
        """Ends exchanges: they begin anew elsewhere."""
        gone = [exchange for key in keys if (exchange := self.drop(key)) is not None]
        self.emit([exchange.output(self.outer.policy_number) for exchange in gone])
        return len(gone)


class ExchangeEngine(EngineBeside):
    """Two engines as one; without a second one the policy replies to itself."""

    def __init__(self, speaker: Engine, replier: Frozen | None, rules: Rules) -> None:
        super().__init__(speaker, [replier] if replier else [])
        self._replier = replier
        self._here = OtherSide(rules, replier.engine if replier else speaker)
        self._elsewhere: dict[Stream, OtherSide] = {}
        self._streams: dict[Stream, _StreamExchanges] = {}
        self.capabilities = replace(
            speaker.capabilities,
            deterministic=False,
            resume_from_prefix=False,
            resume_from_cache=False,
            inflight_update=False,
        )
        self.max_context_tokens = rules.context_limit

    # --- exchanges

    @override
    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """Every sample begins at token 0, also one that was begun elsewhere."""
        state = self._streams.setdefault(
            stream, _StreamExchanges(stream, self._elsewhere.get(stream, self._here))
        )
        fresh = [replace(group, samples=[replace(s, prefix=None) for s in group.samples]) for group in groups]
        for group in fresh:
            for sample in group.samples:
                key = SlotKey(group.prompt_ordinal, sample.sample_index)
                state.begin(Exchange(state.side.rules, group.prompt_ids, key, sample))
        try:
            await self._speaker.submit(self._stream(state, FIRST), fresh)
        except Refused:
            for group in fresh:
                for sample in group.samples:
                    state.drop(SlotKey(group.prompt_ordinal, sample.sample_index))
            raise

    def replied_to_by(self, stream: Stream, replies: Replies, context_limit: int) -> OtherSide:
        """Lets `replies` reply to a stream's answers until `leave`; `context_limit` is the tokens of their context."""
        limit = min(self._here.rules.context_limit, context_limit)
        side = self._elsewhere[stream] = OtherSide(replace(self._here.rules, context_limit=limit), replies)
        return side

    def leave(self, stream: Stream) -> None:
        """Ends what `replied_to_by` began, as the stream has ended."""
        self._elsewhere.pop(stream, None)

    def _engine(self, state: _StreamExchanges, turn: Turn) -> Replies:
        return state.side.replies if turn.reply else self._speaker

    def _stream(self, state: _StreamExchanges, turn: Turn) -> Stream:
        """The stream of a turn at the engine that makes it."""
        if found := state.turns.get(turn):
            return found
        loop, outer = asyncio.get_running_loop(), state.outer

        def sink(outputs: list[TrajectoryUpdate]) -> None:
            loop.call_soon_threadsafe(self._arrived, state, turn, outputs)

        made = replace(outer, seed=turn.seed(outer.seed), sink=sink, chunk_tokens=0)
        if turn.reply:
            rules, frozen = state.side.rules, self._replier is not None
            made = replace(
                made,
                policy_number=FROZEN_NUMBER if frozen else outer.policy_number,
                distribution=rules.distribution,
                max_new_tokens=rules.max_new_tokens,
                stop=rules.stop,
            )
        return state.turns.setdefault(turn, made)

    def _arrived(self, state: _StreamExchanges, turn: Turn, outputs: list[TrajectoryUpdate]) -> None:
        """Handles the ends of turns: each exchange goes on with the other policy, or ends."""
        done: list[TrajectoryUpdate] = []
        following: dict[Turn, list[Exchange]] = defaultdict(list)
        for output in outputs:
            exchange = state.live.get(output.key)
            if exchange is None or exchange.turn != turn or exchange.sample.attempt != output.attempt:
                continue  # It was stopped before.
            if output.finish is not None or output.stopped:
                state.side.at(turn).end()
            if (ended := self._taken(exchange, output)) is not None:
                del state.live[output.key]
                done.append(ended)
            elif output.finish is not None:
                state.begin(exchange)
                following[exchange.turn].append(exchange)
        state.emit(done)
        for next_turn, exchanges in following.items():
            task = asyncio.ensure_future(self._go_on(state, next_turn, exchanges))
            state.submitting.add(task)
            task.add_done_callback(state.submitted)

    def _taken(self, exchange: Exchange, output: TrajectoryUpdate) -> TrajectoryUpdate | None:
        """The update that ends the exchange, where the end of its turn does."""
        number = output.policy_number if not exchange.turn.reply else 0
        if output.stopped:
            return exchange.output(number)
        if output.finish is None:
            return None
        if output.finish in (Finish.ERROR, Finish.PROMPT_TOO_LONG):
            return exchange.output(number, finish=output.finish)
        finish = exchange.take(output)
        return None if finish is None else exchange.output(number, finish=finish)

    async def _go_on(self, state: _StreamExchanges, turn: Turn, exchanges: Sequence[Exchange]) -> None:
        live = [each for each in exchanges if state.live.get(each.key) is each]
        if not live:
            return
        try:
            groups = [exchange.group() for exchange in live]
            await self._engine(state, turn).submit(self._stream(state, turn), groups)
        except Refused as refused:
            if refused.reason == "INVALID":
                state.outer.failed(str(refused))
            state.stop(exchange.key for exchange in live)

    @override
    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        chosen = [state for state in self._streams.values() if stream is None or state.outer is stream]
        count = sum(state.stop(list(state.live) if keys is None else keys) for state in chosen)
        for state in chosen:
            await asyncio.gather(*state.submitting, return_exceptions=True)
            for turn, inner in state.turns.items():
                await self._engine(state, turn).abort(keys, stream=inner)
        if keys is None:
            for state in chosen:
                self._streams.pop(state.outer, None)
        return count

    @override
    async def pause(self) -> int:
        for engine in self._engines:
            await engine.pause()
        return await self.abort(None)

    @override
    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:
        """The second policy is installed, if it is not."""
        if in_flight:
            raise Refused("INVALID", "in_flight: an exchange is made with one version; pause first")
        living = sum(len(state.live) for state in self._streams.values())
        if living and policy != self.policy:
            raise Refused("POLICY_MISMATCH", f"{living} exchanges of the installed version live; pause first")
        return await super().check_install(policy)
