"""Episodes of a robot policy in one process, as the rollout service sends them. Used by conftest and by hand.

Shapes: T chunks of an episode, C actions of a chunk, A numbers of an action, B environments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_robots.policies.policy import Observation
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.episodes import Episode, encode_episode

POLICY: dict[str, Any] = {
    "kind": "mlp",
    "state_size": 6,
    "bounds": {"low": [-1.0, -1.0], "high": [1.0, 1.0]},
}


class World(Protocol):
    """One environment, which a time limit cuts."""

    horizon: int

    def reset(self, seed: int) -> np.ndarray:
        """The first state of an episode."""

    def step(self, action_A: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """State, reward, success, and whether the episode ended by itself."""


@dataclass
class Reach:
    """A point that is pushed toward the seed's goal. A state: place, velocity, goal; reward: minus the distance."""

    horizon: int = 24
    ends_on_success: bool = False
    radius: float = 0.1
    _state: np.ndarray = field(default_factory=lambda: np.zeros(6))

    def reset(self, seed: int) -> np.ndarray:
        place, goal = np.split(np.random.default_rng(seed).uniform(-1, 1, 4), 2)
        self._state = np.concatenate([place, np.zeros(2), goal])
        return self._state

    def step(self, action_A: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        place, velocity, goal = np.split(self._state, 3)
        velocity = 0.5 * velocity + 0.15 * action_A
        self._state = np.concatenate([place + velocity, velocity, goal])
        distance = float(np.linalg.norm(place + velocity - goal))
        return self._state, -distance, distance < self.radius, self.ends_on_success and distance < self.radius


def noise_seed(*parts: int) -> int:
    """The seed of a draw."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


@dataclass
class _Track:
    """An episode that goes on."""

    world: World
    state: np.ndarray
    seen: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    executed: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    outcomes: list[list[tuple[float, bool]]] = field(default_factory=list)
    steps: int = 0
    terminated: bool = False

    @property
    def over(self) -> bool:
        return self.terminated or self.steps >= self.world.horizon


def play(
    policy: Any, worlds: Sequence[World], seeds: Sequence[int], draw: int, *, deterministic: bool = False
) -> list[Episode]:
    """One whole episode of each environment, which begins at its seed."""
    tracks = [
        _Track(world, np.asarray(world.reset(seed), np.float32))
        for world, seed in zip(worlds, seeds, strict=True)
    ]
    while going := [index for index, track in enumerate(tracks) if not track.over]:
        states = torch.tensor(np.stack([tracks[index].state for index in going]))
        noise = [noise_seed(draw, index, len(tracks[index].seen)) for index in going]
        chunk = policy.act(Observation(states), noise, deterministic=deterministic)
        for row, index in enumerate(going):
            _act(tracks[index], chunk, row)
    return [_episode(track, policy.chunk_length) for track in tracks]


def _act(track: _Track, chunk: Any, row: int) -> None:
    track.seen.append(track.state)
    track.sampled.append(chunk.sampled["actions"][row].numpy())
    track.executed.append(chunk.executed_BCA[row].numpy())
    track.log_probs.append(chunk.log_probs_BCA[row].numpy())
    track.outcomes.append([])
    for action_A in chunk.executed_BCA[row].double().numpy():
        if track.over:
            break
        state, reward, success, track.terminated = track.world.step(action_A)
        track.state = np.asarray(state, np.float32)
        track.outcomes[-1].append((reward, success))
        track.steps += 1


def _episode(track: _Track, length: int) -> Episode:
    def filled(place: int, dtype: type) -> np.ndarray:
        rows = [[each[place] for each in chunk] + [0] * (length - len(chunk)) for chunk in track.outcomes]
        return np.array(rows, dtype)

    executed = np.array([[place < len(chunk) for place in range(length)] for chunk in track.outcomes])
    return Episode(
        observation={"state": np.stack(track.seen)},
        sampled={"actions": np.stack(track.sampled)},
        executed_TCA=np.stack(track.executed),
        valid_TC=executed,
        log_probs_TCA=np.stack(track.log_probs),
        rewards_TC=filled(0, np.float32),
        successes_TC=filled(1, np.bool_),
        terminated=track.terminated,
        truncated=not track.terminated,
        final_observation={} if track.terminated else {"state": track.state},
    )


def settled(
    prompt: int,
    episodes: Sequence[Episode],
    version: common_pb2.PolicyVersion,
    reward: Callable[[Episode], float] = lambda episode: episode.total_reward,
    change: Callable[[common_pb2.Trajectory], None] = lambda trajectory: None,
) -> trainer_pb2.SettledGroup:
    """A group of episodes as the coordinator sends it; `change` spoils a trajectory before its digest is made."""
    group = trainer_pb2.SettledGroup(prompt_ordinal=prompt)
    for index, episode in enumerate(episodes):
        ended = "TERMINATED" if episode.terminated else "TRUNCATED"
        trajectory = common_pb2.Trajectory(
            sample=common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=index),
            attempt=1,
            finish_reason=common_pb2.FinishReason.Value(f"FINISH_REASON_{ended}"),
        )
        trajectory.branches.add().segments.add(policy_number=version.number, actions=encode_episode(episode))
        change(trajectory)
        trajectory.body_digest = trajectory_digest(trajectory)
        group.members.add(trajectory=trajectory, reward=reward(episode), oldest_version=version)
    return group
