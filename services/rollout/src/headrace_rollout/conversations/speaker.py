"""The policy's side of the conversations of one stream: each turn is a sample of its own to the engine.

Turns that are asked for at once go to the engine together, those of one prompt as one group. Knows no environment.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace_rollout.engines.base import Engine
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

SEED_BYTES = 8
Place = tuple[int, SlotKey, int]
"""Turn, slot and attempt."""


@dataclass(frozen=True)
class Limits:
    """What ends turns: a number of tokens, and texts."""

    max_new_tokens: int
    stop: tuple[str, ...]


Heard = Callable[[Sequence[int], Sequence[float]], None]
"""Is told new ids of a turn, with their log-probs, as they are made."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A turn that is wanted: what the policy reads, and whose turn it is, the `turn`-th of the sample.

    Without `limits` and `distribution` those of the stream hold. `heard` is told what is new until the turn's end,
    which carries the rest. Turns of a sample that name the same `seed` draw alike.
    """

    key: SlotKey
    attempt: int
    turn: int
    prompt_ids: Sequence[int]
    greedy: bool
    limits: Limits | None = None
    heard: Heard | None = None
    prefix: Prefix | None = None
    """What the turn begins with, of a stream that has ended."""
    distribution: Distribution | None = None
    seed: str = ""
    images: tuple[ImageAt, ...] = ()

    @property
    def place(self) -> Place:
        """What tells it from others."""
        return self.turn, self.key, self.attempt


class Speaker:
    """Asks an engine for turns under the terms of `outer`, each turn with a seed of its own."""

    def __init__(self, engine: Engine, outer: Stream) -> None:
        self._engine, self._outer = engine, outer
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Asked] = []
        self._answers: dict[Place, asyncio.Future[TrajectoryUpdate]] = {}
        self._streams: dict[tuple[Any, ...], Stream] = {}
        self._heard: dict[Place, Heard] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def say(self, asked: Asked) -> TrajectoryUpdate:
        """The end of the turn, or its stop from outside. Raises what the engine refuses it with.

        Cancelled, it stops the turn at the engine.
        """
        place = asked.place
        answer: asyncio.Future[TrajectoryUpdate] = self._loop.create_future()
        self._answers[place] = answer
        if asked.heard is not None:
            self._heard[place] = asked.heard
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
            if self._answers.get(place) is answer:
                del self._answers[place]
                self._heard.pop(place, None)

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
            by_stream[self._stream(asked)].append(asked)
        for stream, several in by_stream.items():
            self._begin(self._ask(stream, several))

    async def _ask(self, stream: Stream, several: Sequence[Asked]) -> None:
        try:
            await self._engine.submit(stream, list(_groups(several)))
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            for asked in several:
                self._resolve(asked.place, error)

    async def _stop(self, asked: Asked) -> None:
        await self._engine.abort([asked.key], stream=self._stream(asked))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stream(self, asked: Asked) -> Stream:
        """That of the turn, with its seed, of its limits and its distribution."""
        turn, limits = asked.turn, asked.limits or Limits(self._outer.max_new_tokens, self._outer.stop)
        each = 1 if asked.heard is not None else 0
        distribution = asked.distribution or self._outer.distribution
        terms = (turn, limits, each, distribution, asked.seed)
        if terms not in self._streams:

            def sink(outputs: list[TrajectoryUpdate]) -> None:
                self._loop.call_soon_threadsafe(self._arrived, turn, outputs)

            self._streams[terms] = replace(
                self._outer,
                distribution=distribution,
                seed=_seed(self._outer.seed, asked.seed or turn),
                sink=sink,
                chunk_tokens=each,
                goes_on=True,
                max_new_tokens=limits.max_new_tokens,
                stop=limits.stop,
            )
        return self._streams[terms]

    def _arrived(self, turn: int, outputs: list[TrajectoryUpdate]) -> None:
        for output in outputs:
            place = (turn, output.key, output.attempt)
            if output.finish is not None or output.stopped:
                self._resolve(place, output)
            elif (heard := self._heard.get(place)) is not None:
                heard(output.token_ids, output.log_probs)

    def _resolve(self, place: Place, result: TrajectoryUpdate | Exception) -> None:
        answer = self._answers.get(place)
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
