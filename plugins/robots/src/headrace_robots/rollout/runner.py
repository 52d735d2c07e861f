"""Runs samples as episodes in the environments of a stream, in parts that take turns at the policy.

Knows no gRPC call of its own and no trajectory: samples in, ended episodes out.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.environments.outcomes import Answer, Outcome, Shown, arrays_of, shown_of
from headrace_rollout.environments.pool import Environment, EnvironmentLost, Pool, PoolLost
from headrace_rollout.environments.runner import EnvironmentRunner
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.causes import cause_first, raised
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.episodes import Arrays, Episode
from headrace_servicekit.rpc.errors import ServiceError
from typing_extensions import override

from headrace_robots.rollout.model import Decisions, NotFinite, Rows, Seen, Views
from headrace_robots.rollout.recording import Recording
from headrace_robots.rollout.turns import Turns


@dataclass(frozen=True)
class EpisodeSample:
    """One episode to run."""

    key: SlotKey
    attempt: int
    start: rollout_pb2.EpisodeStart
    prompt_ids: tuple[int, ...] = ()
    greedy: bool = False


@dataclass(frozen=True)
class EndedEpisode:
    """A sample that ended: with its episode, with the reason for which it has none, or (neither) stopped."""

    sample: EpisodeSample
    episode: Episode | None = None
    failure: str = ""
    video: bytes = b""
    success: bool | None = None
    """Whether any action succeeded; None where its environment never said so, or that none did."""
    success_at_end: bool | None = None
    """Whether the last action did; None also where a success ends an episode."""
    before: float = 0.0
    """Rewards of the same episode in samples before."""


@dataclass(frozen=True)
class Plan:
    """What holds for all episodes of a stream. `sink` gets what ended, `failed` what ends the stream."""

    policy_number: int
    seed: int
    environment: EnvironmentSection
    views: Views
    sink: Callable[[EndedEpisode], None]
    failed: Callable[[ServiceError], None]
    pool_lost: Callable[[Pool], None]
    holds: Callable[[], bool]
    until_success: bool = False
    """Whether episodes end with their first success, also where the environment's section does not say so."""
    horizon: int = 0
    """Actions after which an episode goes on in the next sample; 0: a sample has a whole one."""


Decide = Callable[[Rows], Decisions | Awaitable[Decisions]]
"""The decisions for rows, at once or later."""


@dataclass(frozen=True)
class Kept:
    """An episode between two samples: what its environment shows, and its rewards so far."""

    seen: Seen
    rewards: float


class Playing:
    """An episode that goes on: takes what its environment answers, and waits for the next turn, until it has ended."""

    def __init__(
        self,
        sample: EpisodeSample,
        environment: Environment,
        turns: ActingTurns,
        views: Views,
        horizon: int = 0,
    ) -> None:
        self.sample, self.environment, self._turns, self._views = sample, environment, turns, views
        self.horizon, self._actions, self.cut = horizon, 0, False
        self.recording = Recording()
        self.seen: Seen = {}, 0
        self.begun = False
        """Whether it needs a decision: else its turn begins it."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drawn: tuple[Decisions, int] | None = None
        """What the chunk under way is of, and its row there."""
        self._fetching: asyncio.Task[None] | None = None

    def begin(self, observation: Arrays) -> None:
        """Begins with what its environment shows, and waits for a turn."""
        self.go_on(self._views.seen({name: array[None] for name, array in observation.items()}, 0))

    def go_on(self, seen: Seen) -> None:
        """Waits for a turn, with what its environment shows."""
        self.seen, self.begun = seen, True
        self._turns.join(self)

    def fail(self, error: Exception) -> None:
        """Ends it without an episode."""
        self._turns.leave(self)
        if not self.ended.done():
            self.ended.set_exception(error)

    set_exception = fail

    def done(self) -> bool:
        """Whether it waits no more."""
        return self.ended.done()

    def set_result(self, found: Answer) -> None:
        """Takes what its environment answers; what an answer refers to is fetched first."""
        try:
            if isinstance(found, tuple):
                self._take(*found)
                return
            self.environment.check(found)
            if not self.environment.pool.references(found):
                self._take_outcome(found)
                return
        except Exception as error:  # noqa: BLE001  # who waits for its end judges it
            self.fail(error)
            return
        self._fetching = asyncio.create_task(self._fetch(found))

    async def _fetch(self, outcome: Outcome) -> None:
        try:
            await self.environment.settled(outcome)
            if not self.done():  # it may have been stopped meanwhile
                self._take_outcome(outcome)
        except Exception as error:  # noqa: BLE001  # who waits for its end judges it
            self.fail(error)

    def _take_outcome(self, outcome: Outcome) -> None:
        bodies = self.environment.bodies
        if self.begun:
            self._take(shown_of(outcome, bodies), 0)
        else:
            self.begin(arrays_of(outcome, bodies))

    def _take(self, shown: Shown, row: int) -> None:
        assert self.drawn is not None
        self.recording.add(self.seen, *self.drawn, shown, row)
        self.seen = self._view(shown, row)
        self._actions += shown.executed[row]
        self.cut = not self.recording.ended and 0 < self.horizon <= self._actions
        self.recording.truncated |= self.cut
        if not self.recording.ended:
            self._turns.join(self)
            return
        self._turns.leave(self)
        if not self.ended.done():
            self.ended.set_result(None)

    def _view(self, shown: Shown, row: int) -> Seen:
        if shown.viewed is None:
            try:
                shown.viewed = self._views(shown.observation)
            except NotFinite:  # of one of them
                return self._views.seen(shown.observation, row)
        return shown.viewed, row


ActingTurns = Turns[Playing, Decisions]


class EpisodeRunner(EnvironmentRunner[EpisodeSample, EndedEpisode]):
    """The episodes of one stream."""

    def __init__(self, plan: Plan, pools: Sequence[Pool], decide: Decide) -> None:
        self._plan, self._acts = plan, decide
        parts = [ActingTurns(self._decide, self._act) for _ in range(plan.environment.alternating)]
        self._parts: dict[Environment, ActingTurns] = {}
        for place, pool in enumerate(pools):
            for index, environment in enumerate(pool.environments):
                # Simulators deal environments to processes in turn: a part is a block, so that it uses all of them.
                part = (index * len(parts) // len(pool.environments) + place) % len(parts)
                self._parts[environment] = parts[part]
        self._until_success = plan.environment.stop_on_success or plan.until_success
        super().__init__(pools, plan.pool_lost)

    @override
    def _stopped(self, sample: EpisodeSample) -> EndedEpisode:
        return EndedEpisode(sample)

    @override
    def _emit(self, ended: EndedEpisode) -> None:
        self._plan.sink(ended)

    @override
    async def _play(self, sample: EpisodeSample, environment: Environment) -> EndedEpisode:
        try:
            playing, before = await self._played(sample, environment)
            recording = playing.recording
            episode = recording.episode(playing.seen)
            environment.kept = Kept(playing.seen, before + episode.total_reward) if playing.cut else None
            video = await environment.video() if sample.start.record else b""
            return EndedEpisode(
                sample,
                episode,
                video=video,
                before=before,
                success=recording.success,
                success_at_end=None if self._until_success else recording.success_at_end,
            )
        except EnvironmentLost as lost:
            return EndedEpisode(sample, failure=str(lost))
        except NotFinite as error:
            return EndedEpisode(sample, failure=f"{environment.name}: {error}")
        except (PoolLost, Refused, _NotHeld):  # Refused: the policy was released meanwhile
            return EndedEpisode(sample)
        except ServiceError as error:
            self._plan.failed(error)
        except ValueError as error:
            self._plan.failed(_unfit(sample, error))
        except Exception as error:  # noqa: BLE001  # the stream would wait for this episode for ever
            self._plan.failed(_failed(sample, error))
        return EndedEpisode(sample)

    async def _played(self, sample: EpisodeSample, environment: Environment) -> tuple[Playing, float]:
        """What a sample has of an episode, once that has ended, and the episode's rewards before."""
        kept, environment.kept = environment.kept, None
        if kept is not None and self._plan.horizon:
            playing = self._playing(sample, environment)
            try:
                await self._ended(playing, kept)
                return playing, kept.rewards
            except EnvironmentLost:
                if playing.recording.chunks:
                    raise
                # It was lost between two samples: this one begins with its own start state.
        playing = self._playing(sample, environment)
        await self._ended(playing, None)
        return playing, 0.0

    def _playing(self, sample: EpisodeSample, environment: Environment) -> Playing:
        plan = self._plan
        return Playing(sample, environment, self._parts[environment], plan.views, plan.horizon)

    async def _ended(self, playing: Playing, kept: Kept | None) -> None:
        """Begins an episode, or goes on with one, and returns once it has ended."""
        environment, start, turns = (
            playing.environment,
            playing.sample.start,
            self._parts[playing.environment],
        )
        try:
            if kept is not None:
                playing.go_on(kept.seen)
            elif self._plan.environment.vectorized:
                # Those that one call steps wait for each other's actions: one that begins outside of a turn would wait.
                await environment.free()
                turns.join(playing)
            else:
                begun = await environment.reset(start, until_success=self._until_success)
                playing.begin(arrays_of(begun, environment.bodies))
            await playing.ended
        finally:
            turns.leave(playing)

    def _decide(self, asked: Sequence[Playing]) -> Decisions | Awaitable[Decisions]:
        if not self._plan.holds():
            raise _NotHeld
        samples = [each.sample for each in asked]
        return self._acts(
            Rows(
                [each.seen for each in asked],
                [each.prompt_ids for each in samples],
                [chunk_seed(self._plan.seed, each.sample.key, each.recording.chunks) for each in asked],
                [each.greedy for each in samples],
            )
        )

    def _act(self, asked: Sequence[Playing], decisions: Decisions | None, new: Sequence[Playing]) -> None:
        """Begins and goes on with a turn's episodes: of each pool in one message."""
        for playing in new:
            try:
                start = playing.sample.start
                playing.environment.restart(start, playing, until_success=self._until_success)
            except Exception as error:  # noqa: BLE001  # the one whose environment it is gets it
                playing.fail(error)
        by_pool: dict[Pool, list[int]] = {}
        for row, playing in enumerate(asked):
            if decisions is not None and not playing.done():  # who left the turn meanwhile acts no more
                playing.drawn = decisions, row
                by_pool.setdefault(playing.environment.pool, []).append(row)
        for pool, rows in by_pool.items():
            together, environments = [asked[row] for row in rows], [asked[row].environment for row in rows]
            chunks_NCA = decisions.executed_BCA[rows] if decisions is not None else np.empty(0)
            try:
                pool.act(environments, chunks_NCA, together, together=self._plan.environment.vectorized)
            except Exception as error:  # noqa: BLE001  # those whose pool it is get it
                for playing in together:
                    playing.fail(error)


class _NotHeld(Exception):
    """The stream's lease is not held: no further action is taken under it."""


def chunk_seed(seed: int, key: SlotKey, chunk: int) -> int:
    """What a chunk's noise is drawn from: of the run's seed and the place alone, 63 bits."""
    place = struct.pack("<4q", seed, key.prompt_ordinal, key.sample_index, chunk)
    return int(digest_bytes(place)[:16], 16) >> 1


def _unfit(sample: EpisodeSample, error: ValueError) -> ServiceError:
    message = f"the policy does not fit {sample.start.task!r}: {error}"
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


def _failed(sample: EpisodeSample, error: Exception) -> ServiceError:
    message = cause_first(raised(error), f"an episode of {sample.start.task!r} failed")
    return ServiceError(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", message)
