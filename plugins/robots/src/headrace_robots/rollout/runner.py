"""Runs samples as episodes in the environments of a stream, in parts that take turns at the policy.

Knows no gRPC call of its own and no trajectory: samples in, ended episodes out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.environments.pool import (
    Environment,
    EnvironmentLost,
    Outcome,
    Pool,
    PoolLost,
    arrays_of,
)
from headrace_rollout.environments.runner import EnvironmentRunner
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.causes import cause_first, raised
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.episodes import Arrays, Episode
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import decode_tensor
from typing_extensions import override

from headrace_robots.rollout.model import Decision, NotFinite, Row, Views
from headrace_robots.rollout.turns import Decide, Turns


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


class EpisodeRunner(EnvironmentRunner[EpisodeSample, EndedEpisode]):
    """The episodes of one stream."""

    def __init__(self, plan: Plan, pools: Sequence[Pool], decide: Decide[Row, Decision]) -> None:
        self._plan = plan
        parts = [ActingTurns(decide) for _ in range(plan.environment.alternating)]
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
            recording, seen = await self._played(sample, environment, self._parts[environment])
            video = await environment.video() if sample.start.record else b""
            return EndedEpisode(
                sample,
                recording.episode(seen),
                video=video,
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

    async def _played(
        self, sample: EpisodeSample, environment: Environment, turns: ActingTurns
    ) -> tuple[Recording, Arrays]:
        """The episode as it was recorded, and what was seen at its end."""
        plan = self._plan
        recording = Recording()
        begun = await self._begun(sample, environment, turns)
        seen = plan.views(arrays_of(begun, environment.bodies))
        while not recording.ended:
            if not plan.holds():
                raise _NotHeld
            seed = chunk_seed(plan.seed, sample.key, recording.chunks)
            row = Row(seen, sample.prompt_ids, seed, sample.greedy)
            decision, outcome = await turns.take(row, environment)
            recording.add(seen, decision, outcome)
            seen = plan.views(arrays_of(outcome, environment.bodies, final=recording.ended))
        return recording, seen

    async def _begun(self, sample: EpisodeSample, environment: Environment, turns: ActingTurns) -> Outcome:
        until_success = self._until_success
        if not self._plan.environment.vectorized:
            return await environment.reset(sample.start, until_success=until_success)
        await environment.free()
        # Those that one call steps wait for each other's actions: one that begins outside of a turn would wait for it.
        return await turns.start(
            environment,
            lambda answered: environment.restart(sample.start, answered, until_success=until_success),
        )


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


_MAX_BYTES = 1 << 20


@dataclass
class Recording:
    """An episode that goes on."""

    terminated: bool = False
    truncated: bool = False
    success_reported: bool = False
    """Whether the environment said at any action whether it succeeded."""
    _observations: list[Arrays] = field(default_factory=list)
    _decisions: list[Decision] = field(default_factory=list)
    _rewards: list[np.ndarray] = field(default_factory=list)
    _successes: list[np.ndarray] = field(default_factory=list)
    _persons: dict[int, np.ndarray] = field(default_factory=dict)
    """By chunk, what a person did, (K, A); not a number where the policy's action was done."""
    _author: str = ""

    @property
    def chunks(self) -> int:
        """Chunks so far."""
        return len(self._decisions)

    @property
    def success(self) -> bool | None:
        """Whether any action succeeded; None where the environment never said."""
        return any(each.any() for each in self._successes) if self.success_reported else None

    @property
    def success_at_end(self) -> bool | None:
        """Whether the last action succeeded; None where the environment never said."""
        return bool(self._successes[-1][-1]) if self.success_reported else None

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
        if outcome.HasField("interventions"):
            self._persons[self.chunks] = decode_tensor(outcome.interventions, max_bytes=_MAX_BYTES)
            self._author = outcome.author
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
        executed_TCA = np.stack([decision.executed_CA for decision in decisions])
        intervened_TC = np.zeros(shape, np.bool_) if self._persons else None
        for row, done_KA in self._persons.items():
            theirs = np.flatnonzero(np.isfinite(done_KA).all(1))
            executed_TCA[row, theirs] = done_KA[theirs]
            intervened_TC[row, theirs] = True  # type: ignore[index]
        return Episode(
            observation=_stacked(self._observations),
            sampled=_stacked([decision.sampled for decision in decisions]),
            executed_TCA=executed_TCA,
            valid_TC=valid_TC,
            log_probs_TCA=np.stack([decision.log_probs_CA for decision in decisions]),
            rewards_TC=rewards_TC,
            successes_TC=successes_TC,
            terminated=self.terminated,
            truncated=self.truncated,
            values_T=np.stack([decision.value for decision in decisions]),
            final_observation=final_observation if self.truncated else {},
            intervened_TC=intervened_TC,
            author=self._author,
        )


def _stacked(arrays: list[Arrays]) -> dict[str, np.ndarray]:
    return {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}
