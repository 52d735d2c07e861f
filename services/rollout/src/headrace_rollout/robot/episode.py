"""What happened in one episode, chunk by chunk, until it is an `Episode`. Knows no policy and no wire of its own.

Shapes: C actions of a chunk, A numbers of an action, K executed actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.episodes import Arrays, Episode
from headrace_servicekit.rpc.tensors import decode_tensor

from headrace_rollout.robot.model import Decision

_MAX_BYTES = 1 << 20


@dataclass
class Recording:
    """An episode that goes on; `stop_on_success` ends it with its first success, as if by itself."""

    stop_on_success: bool
    terminated: bool = False
    truncated: bool = False
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
