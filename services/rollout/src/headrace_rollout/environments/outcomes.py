"""What simulators answer, as arrays: of one environment, and of all environments of a batch. Knows no stream.

Shapes: N environments, C actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.episodes import Arrays, Bodies
from headrace_servicekit.rpc.tensors import decode_tensor

MAX_OBSERVATION_BYTES = 1 << 28
_MAX_BYTES = 1 << 20
Outcome = simulator_pb2.EnvironmentOutcome
Answer = Outcome | tuple["Shown", int]
"""Of one environment: an outcome, or a row."""
_FoundT = TypeVar("_FoundT", contravariant=True)


class Waiting(Protocol[_FoundT]):
    """What waits for an answer; a future does."""

    def done(self) -> bool:
        """Whether it waits no more."""

    def set_result(self, found: _FoundT, /) -> None:
        """Takes the answer."""

    def set_exception(self, error: Exception, /) -> None:
        """Takes the reason why there is none."""


@dataclass(slots=True)
class Shown:
    """How chunks of C actions went in N environments, and what is seen behind them: at an episode's end its last.

    `executed` says how many leading actions of each were; what is behind them counts nothing.
    """

    observation: Arrays
    """(N, …) by name."""
    rewards_NC: np.ndarray
    successes_NC: np.ndarray
    executed: Sequence[int]
    terminated: Sequence[bool]
    truncated: Sequence[bool]
    reported: Sequence[bool]
    """Whose environment said at any action whether it succeeded."""
    done_NCA: np.ndarray | None = None
    """What a person did; not a number where the policy's action was done."""
    author: str = ""
    viewed: Arrays | None = None
    """The observation as who acts reads it, once that is known."""


def shown_of(outcome: Outcome, bodies: Bodies) -> Shown:
    """What an outcome of a chunk says: one row."""
    ended = outcome.terminated or outcome.truncated
    rewards_K = decode_tensor(outcome.rewards, max_bytes=_MAX_BYTES)
    person = outcome.HasField("interventions")
    return Shown(
        {name: array[None] for name, array in arrays_of(outcome, bodies, final=ended).items()},
        rewards_K[None],
        decode_tensor(outcome.successes, max_bytes=_MAX_BYTES)[None],
        [len(rewards_K)],
        [outcome.terminated],
        [outcome.truncated],
        [outcome.success_reported],
        decode_tensor(outcome.interventions, max_bytes=_MAX_BYTES)[None] if person else None,
        outcome.author,
    )


def shown_of_batch(batch: simulator_pb2.OutcomeBatch) -> Shown:
    """What a batch's outcomes say, in their order."""
    return Shown(
        {
            name: decode_tensor(each, max_bytes=MAX_OBSERVATION_BYTES)
            for name, each in batch.observation.items()
        },
        decode_tensor(batch.rewards, max_bytes=_MAX_BYTES),
        decode_tensor(batch.successes, max_bytes=_MAX_BYTES),
        list(batch.executed_lengths),
        list(batch.terminated),
        list(batch.truncated),
        list(batch.success_reported),
    )


def arrays_of(outcome: Outcome, bodies: Bodies, *, final: bool = False) -> dict[str, np.ndarray]:
    """The observation by name; `final`: the ended episode's last, where the pool resets by itself.

    An array of a body of `bodies` lies in its memory.
    """
    tensors = outcome.final_observation if final and outcome.final_observation else outcome.observation
    return {
        name: decode_tensor(each, max_bytes=MAX_OBSERVATION_BYTES, body=bodies.get(each.blob.digest))
        for name, each in tensors.items()
    }
