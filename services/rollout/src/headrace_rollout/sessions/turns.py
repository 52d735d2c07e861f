"""Who takes the turns of sessions, and the requests to its engine, to which each turn is a sample.

Turns that are asked for at once go to the engine together, those of one prompt as one group. Knows no session.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from headrace_rollout.engines.base import Engine
from headrace_rollout.engines.beside import FROZEN_NUMBER, Frozen
from headrace_rollout.engines.samples import (
    Distribution,
    Group,
    ImageAt,
    Prefix,
    Sample,
    SlotKey,
    Stream,
    TrajectoryUpdate,
)
from headrace_rollout.sessions.template import TurnTemplate

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec

SEED_BYTES = 8
TurnKey = tuple[int, SlotKey, int]
"""Turn, slot and attempt."""


@dataclass(frozen=True)
class Player:
    """The policy, or a `frozen` model, in a role: its engine and the form in which it reads messages.

    What is None is as the stream has it.
    """

    engine: Engine
    codec: TextCodec
    template: TurnTemplate
    frozen: Frozen | None = None
    adapter: str = ""
    """Which of its engine's adapters it is, where that has several."""
    learns: bool = True
    temperature: float | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] | None = None

    def greedy(self, sample: bool) -> bool:
        """Whether its turns are the likeliest tokens, in a sample that is so or not."""
        return sample and self.temperature is None

    def stream(self, outer: Stream) -> Stream:
        """What holds for its turns in a stream's sessions."""
        own = replace(outer, adapter=self.adapter)
        if self.frozen is not None:
            own = replace(own, policy_number=FROZEN_NUMBER)
        if self.temperature is not None:
            own = replace(own, distribution=Distribution(temperature=self.temperature))
        if self.max_new_tokens is not None:
            own = replace(own, max_new_tokens=self.max_new_tokens)
        if self.stop is not None:
            own = replace(own, stop=tuple(self.stop))
        return own


@dataclass(frozen=True)
class Draw:
    """How a turn is drawn: from what, by which seed, and which number of tokens and which texts end it.

    What is None or empty is as the stream has it. Turns of a sample that name the same `seed` draw alike.
    """

    distribution: Distribution | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Beside those of the stream."""
    seed: str = ""

    def most_tokens(self, stream: Stream) -> int:
        """The longest that the turn may be."""
        return min(self.max_new_tokens or stream.max_new_tokens, stream.max_new_tokens)


AS_STREAM = Draw()
"""As the stream says."""
Heard = Callable[[Sequence[int], Sequence[float]], None]
"""Is told new ids of a turn, with their log-probs, as they are made."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A turn that is wanted: what the policy reads, and whose turn it is, the `turn`-th of the sample.

    `heard` is told what is new until the turn's end, which carries the rest.
    """

    key: SlotKey
    attempt: int
    turn: int
    prompt_ids: Sequence[int]
    images: tuple[ImageAt, ...] = ()
    greedy: bool = False
    draw: Draw = AS_STREAM
    heard: Heard | None = None
    prefix: Prefix | None = None
    """What the turn begins with, of a stream that has ended."""

    @property
    def own_key(self) -> TurnKey:
        """What tells it from others."""
        return self.turn, self.key, self.attempt


class Says(Protocol):
    """What asks for the turns of a player; `stream` is what holds for them."""

    @property
    def player(self) -> Player: ...

    @property
    def stream(self) -> Stream: ...

    async def say(self, asked: Asked) -> TrajectoryUpdate:
        """The end of the turn, or its stop from outside."""


class Speaker:
    """Asks a player's engine for turns under the terms of a stream, each turn with a seed of its own."""

    def __init__(self, player: Player, outer: Stream) -> None:
        self.player, self.stream = player, player.stream(outer)
        self._engine = player.engine
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Asked] = []
        self._answers: dict[TurnKey, asyncio.Future[TrajectoryUpdate]] = {}
        self._streams: dict[tuple[Any, ...], Stream] = {}
        self._heard: dict[TurnKey, Heard] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def say(self, asked: Asked) -> TrajectoryUpdate:
        """The end of the turn, or its stop from outside. Raises what the engine refuses it with.

        Cancelled, it stops the turn at the engine.
        """
        key = asked.own_key
        answer: asyncio.Future[TrajectoryUpdate] = self._loop.create_future()
        self._answers[key] = answer
        if asked.heard is not None:
            self._heard[key] = asked.heard
        if not self._waiting:
            self._loop.call_soon(self._submit)
        self._waiting.append(asked)
        try:
            return await answer
        except asyncio.CancelledError:
            if asked in self._waiting:
                self._waiting.remove(asked)
            else:
                self._begin(self._stop(asked))
            raise
        finally:
            if self._answers.get(key) is answer:
                del self._answers[key]
                self._heard.pop(key, None)

    async def close(self) -> None:
        """Ends all turns; nothing comes back."""
        for task in list(self._tasks):
            await asyncio.wait({task})
        for stream in self._streams.values():
            await self._engine.abort(None, stream=stream)

    def _submit(self) -> None:
        """Hands over what has come together, in order."""
        waiting, self._waiting = self._waiting, []
        by_stream: dict[Stream, list[Asked]] = defaultdict(list)
        for asked in waiting:
            by_stream[self._stream_of(asked)].append(asked)
        for stream, several in by_stream.items():
            self._begin(self._ask(stream, several))

    async def _ask(self, stream: Stream, several: Sequence[Asked]) -> None:
        try:
            await self._engine.submit(stream, list(_groups(several)))
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            for asked in several:
                self._resolve(asked.own_key, error)

    async def _stop(self, asked: Asked) -> None:
        await self._engine.abort([asked.key], stream=self._stream_of(asked))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stream_of(self, asked: Asked) -> Stream:
        """That of the turn, with its seed, of its limits and its distribution."""
        turn, draw, each = asked.turn, asked.draw, 1 if asked.heard is not None else 0
        terms = (turn, draw, each)
        if terms not in self._streams:

            def sink(outputs: list[TrajectoryUpdate]) -> None:
                self._loop.call_soon_threadsafe(self._arrived, turn, outputs)

            self._streams[terms] = replace(
                self.stream,
                distribution=draw.distribution or self.stream.distribution,
                seed=_seed(self.stream.seed, draw.seed or turn),
                sink=sink,
                chunk_tokens=each,
                goes_on=True,
                max_new_tokens=draw.most_tokens(self.stream),
                stop=(*self.stream.stop, *draw.stop),
            )
        return self._streams[terms]

    def _arrived(self, turn: int, outputs: list[TrajectoryUpdate]) -> None:
        for output in outputs:
            key = (turn, output.key, output.attempt)
            if output.finish is not None or output.stopped:
                self._resolve(key, output)
            elif (heard := self._heard.get(key)) is not None:
                heard(output.token_ids, output.log_probs)

    def _resolve(self, key: TurnKey, result: TrajectoryUpdate | Exception) -> None:
        answer = self._answers.get(key)
        if answer is None or answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _seed(seed: int, turn: int | str) -> int:
    """The seed of a turn's tokens, so that no two turns draw alike; the first turn has the stream's own."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=SEED_BYTES).digest()) >> 1


def _groups(several: Sequence[Asked]) -> list[Group]:
    """One group for the turns that read the same ids, as those of a prompt's first turns do."""
    found: dict[tuple[int, tuple[int, ...], tuple[ImageAt, ...]], list[Sample]] = {}
    for asked in several:
        sample = Sample(asked.key.sample_index, asked.attempt, asked.prefix, greedy=asked.greedy)
        found.setdefault((asked.key.prompt_ordinal, tuple(asked.prompt_ids), asked.images), []).append(sample)
    return [Group(ordinal, ids, samples, images) for (ordinal, ids, images), samples in found.items()]
