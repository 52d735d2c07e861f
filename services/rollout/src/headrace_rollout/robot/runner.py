"""Runs samples as episodes in the environments of a stream, in parts that take turns at the policy.

Knows no gRPC call of its own and no trajectory: samples in, ended episodes out.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.episodes import Arrays, Episode
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import decode_tensor

from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.robot.model import Decision, NotFinite, Row, Views
from headrace_rollout.robot.pool import Environment, EnvironmentLost, Outcome, Pool, PoolLost, arrays_of
from headrace_rollout.robot.turns import Decide, Turns


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
    success_reported: bool = False
    """Whether its environment said whether it succeeded."""


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


ActingTurns = Turns[Row, Decision, Outcome]


@dataclass
class _Queue:
    """Samples of one task that have no environment yet."""

    samples: deque[EpisodeSample] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, sample: EpisodeSample) -> None:
        self.samples.append(sample)
        self.filled.set()

    def take(self) -> EpisodeSample | None:
        found = self.samples.popleft() if self.samples else None
        if not self.samples:
            self.filled.clear()
        return found


class EpisodeRunner:
    """The episodes of one stream."""

    def __init__(self, plan: Plan, pools: Sequence[Pool], decide: Decide[Row, Decision]) -> None:
        self._plan = plan
        self._queues: dict[str, _Queue] = {pool.task: _Queue() for pool in pools}
        self._running: dict[asyncio.Task[EndedEpisode], EpisodeSample] = {}
        self._any_lost = False
        parts = [ActingTurns(decide) for _ in range(plan.environment.alternating)]
        self._tasks = [asyncio.create_task(self._watch(pool), name=f"watch {pool.name}") for pool in pools]
        for place, pool in enumerate(pools):
            for index, environment in enumerate(pool.environments):
                # A simulator's processes take every so manyth environment: a part is a block, so that it uses them all.
                part = (index * len(parts) // len(pool.environments) + place) % len(parts)
                self._tasks.append(asyncio.create_task(self._serve(pool, environment, parts[part])))

    @property
    def living(self) -> int:
        """Samples that run or wait."""
        return len(self._running) + sum(len(queue.samples) for queue in self._queues.values())

    def check(self, samples: Sequence[EpisodeSample]) -> None:
        """Raises Refused INVALID for a task that no pool has."""
        for sample in samples:
            if sample.start.task not in self._queues:
                have = ", ".join(sorted(self._queues))
                raise Refused(
                    "INVALID", f"episode.task: no pool has {sample.start.task!r}; pools have {have}"
                )

    def submit(self, samples: Sequence[EpisodeSample], *, accept: bool = True) -> None:
        """Queues samples in order; without `accept`, or after a pool was lost, they come back at once."""
        for sample in samples:
            if accept and not self._any_lost:
                self._queues[sample.start.task].put(sample)
            else:
                self._plan.sink(EndedEpisode(sample))

    def stop(self, keys: Sequence[SlotKey] | None) -> int:
        """Stops samples (None: all), which come back as stopped; returns how many."""
        wanted = None if keys is None else set(keys)
        running = [task for task, sample in self._running.items() if wanted is None or sample.key in wanted]
        for task in running:
            self._end(task)
        return len(running) + self._return_waiting(wanted)

    async def close(self) -> None:
        """Stops everything and ends."""
        self.stop(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._running, return_exceptions=True)

    def _return_waiting(self, wanted: set[SlotKey] | None) -> int:
        count = 0
        for queue in self._queues.values():
            waiting = [queue.take() for _ in range(len(queue.samples))]
            for sample in waiting:
                assert sample is not None
                if wanted is None or sample.key in wanted:
                    count += 1
                    self._plan.sink(EndedEpisode(sample))
                else:
                    queue.put(sample)
        return count

    async def _watch(self, pool: Pool) -> None:
        await pool.lost.wait()
        # What waits is assigned elsewhere; what runs in other pools ends.
        self._any_lost = True
        self._plan.pool_lost(pool)
        self._return_waiting(None)

    async def _serve(self, pool: Pool, environment: Environment, turns: ActingTurns) -> None:
        queue = self._queues[pool.task]
        while not pool.reason:
            await queue.filled.wait()
            async with environment.turn:
                sample = None if pool.reason else queue.take()
                if sample is not None:
                    await self._run(sample, environment, turns)

    async def _run(self, sample: EpisodeSample, environment: Environment, turns: ActingTurns) -> None:
        episode = asyncio.create_task(self._episode(sample, environment, turns))
        self._running[episode] = sample
        try:
            await asyncio.wait([episode])
        finally:
            self._end(episode)

    def _end(self, episode: asyncio.Task[EndedEpisode]) -> None:
        """Sends what a sample came to, once: its episode, or that it was stopped."""
        sample = self._running.pop(episode, None)
        if sample is not None:
            stopped = not episode.done() or episode.cancelled()
            episode.cancel()
            self._plan.sink(EndedEpisode(sample) if stopped else episode.result())

    async def _episode(
        self, sample: EpisodeSample, environment: Environment, turns: ActingTurns
    ) -> EndedEpisode:
        try:
            recording, seen = await self._played(sample, environment, turns)
            video = await environment.video() if sample.start.record else b""
            reported = recording.success_reported
            return EndedEpisode(sample, recording.episode(seen), video=video, success_reported=reported)
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

    async def _played(
        self, sample: EpisodeSample, environment: Environment, turns: ActingTurns
    ) -> tuple[Recording, Arrays]:
        """The episode as it was recorded, and what was seen at its end."""
        plan = self._plan
        recording = Recording(plan.environment.stop_on_success or plan.until_success)
        seen = plan.views(arrays_of(await environment.reset(sample.start)))
        while not recording.ended:
            if not plan.holds():
                raise _NotHeld
            seed = chunk_seed(plan.seed, sample.key, recording.chunks)
            row = Row(seen, sample.prompt_ids, seed, sample.greedy)
            decision, outcome = await turns.take(row, environment)
            recording.add(seen, decision, outcome)
            seen = plan.views(arrays_of(outcome, final=recording.ended))
        return recording, seen


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
    message = f"an episode of {sample.start.task!r} failed: {type(error).__name__}: {error}"
    return ServiceError(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", message)


_MAX_BYTES = 1 << 20


@dataclass
class Recording:
    """An episode that goes on; `stop_on_success` ends it with its first success, as if by itself."""

    stop_on_success: bool
    terminated: bool = False
    truncated: bool = False
    success_reported: bool = False
    """Whether the environment said at any action whether it succeeded."""
    _observations: list[Arrays] = field(default_factory=list)
    _decisions: list[Decision] = field(default_factory=list)
    _rewards: list[np.ndarray] = field(default_factory=list)
    _successes: list[np.ndarray] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Chunks so far."""
        return len(self._decisions)

    @property
    def ended(self) -> bool:
        """Whether nothing more happens in it."""
        return self.terminated or self.truncated

    def add(self, observation: Arrays, decision: Decision, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """What was seen, what was drawn, and how the chunk went."""
        rewards_K = decode_tensor(outcome.rewards, max_bytes=_MAX_BYTES)
        successes_K = decode_tensor(outcome.successes, max_bytes=_MAX_BYTES)
        self.terminated, self.truncated = outcome.terminated, outcome.truncated and not outcome.terminated
        self.success_reported |= outcome.success_reported
        if self.stop_on_success and successes_K.any():
            kept = int(successes_K.argmax()) + 1
            rewards_K, successes_K = rewards_K[:kept], successes_K[:kept]
            self.terminated, self.truncated = True, False
        self._observations.append(observation)
        self._decisions.append(decision)
        self._rewards.append(rewards_K)
        self._successes.append(successes_K)

    def episode(self, final_observation: Arrays) -> Episode:
        """The whole episode; `final_observation` is what came behind its last action, and is kept where it was cut."""
        decisions = self._decisions
        shape = (self.chunks, len(decisions[0].executed_CA))
        valid_TC, successes_TC = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        rewards_TC = np.zeros(shape, np.float32)
        for row, (rewards_K, successes_K) in enumerate(zip(self._rewards, self._successes, strict=True)):
            valid_TC[row, : len(rewards_K)] = True
            rewards_TC[row, : len(rewards_K)] = rewards_K
            successes_TC[row, : len(rewards_K)] = successes_K
        return Episode(
            observation=_stacked(self._observations),
            sampled=_stacked([decision.sampled for decision in decisions]),
            executed_TCA=np.stack([decision.executed_CA for decision in decisions]),
            valid_TC=valid_TC,
            log_probs_TCA=np.stack([decision.log_probs_CA for decision in decisions]),
            rewards_TC=rewards_TC,
            successes_TC=successes_TC,
            terminated=self.terminated,
            truncated=self.truncated,
            values_T=np.stack([decision.value for decision in decisions]),
            final_observation=final_observation if self.truncated else {},
        )


def _stacked(arrays: list[Arrays]) -> dict[str, np.ndarray]:
    return {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}
