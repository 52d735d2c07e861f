"""The rules of one environment's operations: which runs, which is repeated, which is refused. No I/O.

An operation is keyed by (pool incarnation, environment, step index); the last reply is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import json_object
from headrace_servicekit.rpc.tensors import decode_tensor

from headrace_simulator.spaces import ArraySpace, action_fault, chunk_fault, in_shape

_MAX_ACTION_BYTES = 1024 * 1024
Operation = simulator_pb2.EnvironmentOperation
Outcome = simulator_pb2.EnvironmentOutcome
_OK, _LOST, _REFUSED = (
    simulator_pb2.OUTCOME_STATUS_OK,
    simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST,
    simulator_pb2.OUTCOME_STATUS_REFUSED,
)


@dataclass(frozen=True)
class Description:
    """What the environments of a pool have in common."""

    action_space: ArraySpace | None
    """None: the environments are conversations, which take turns."""
    init_state_count: int
    auto_reset: bool


def length_of(operation: Operation) -> int:
    """Number of actions of an admitted operation; 0 for a reset."""
    if operation.HasField("reset"):
        return 0
    return int(operation.action_chunk.shape[0]) if operation.HasField("action_chunk") else 1


class EnvironmentLedger:
    """What one environment has done and may do next.

    `generation` counts the processes that have held it: an episode begun in a past one is lost.
    """

    def __init__(self, environment: int, seed: int, description: Description) -> None:
        self.environment = environment
        self.generation = -1
        """Generation of the process that holds the running episode."""
        self._seed = seed
        self._description = description
        self._next_index = 0
        self._last: Callable[[], tuple[Operation, Outcome]] | None = None
        self._seeded_generation = -1
        self._waiting_for_reset = "it is new"
        self.gone = ""
        """Why the running episode is lost where no process ended."""

    @property
    def acting(self) -> bool:
        """Whether an episode goes on."""
        return not self._waiting_for_reset and self.generation >= 0

    def acts_at(self, step_index: int) -> bool:
        """Whether an action of that index is the next one of the episode that goes on."""
        return self.acting and step_index == self._next_index

    def begins_at(self, step_index: int) -> bool:
        """Whether a reset of that index is the next operation."""
        return step_index == self._next_index

    def abandon(self, why: str) -> None:
        """The running episode is lost, which its next action learns."""
        self.generation, self.gone = -1, why

    def admit(self, operation: Operation) -> Outcome | None:
        """The outcome, where it is known without running the operation; None where it has to run.

        A refusal changes nothing: the next operation has the same step index.
        """
        index = operation.step_index
        if self._last is not None and index == self._next_index - 1:
            same, outcome = self._last()
            if operation == same:
                return outcome
            return self._refuse(
                index, f"step index {index} was another operation; an operation keeps its index"
            )
        if index != self._next_index:
            return self._refuse(index, f"step index {index} where {self._next_index} is next")
        kind = operation.WhichOneof("operation")
        if kind is None:
            return self._refuse(index, "the operation names neither a reset nor an action")
        if kind != "reset" and self._waiting_for_reset:
            return self._refuse(index, f"the environment needs a reset: {self._waiting_for_reset}")
        fault = self._fault(operation)
        return self._refuse(index, fault) if fault else None

    def effective(self, operation: Operation, generation: int) -> Operation:
        """The operation with the seed that the environment gets: the first reset of a new environment has one."""
        if not operation.HasField("reset"):
            return operation
        reset = operation.reset
        seedless = not reset.HasField("seed")
        if seedless and self._seeded_generation == generation:
            return operation
        seed = _for_users(self._seed if seedless else reset.seed)
        if seedless or seed != reset.seed:
            operation = Operation.FromString(operation.SerializeToString())
            operation.reset.seed = seed
        return operation

    def record(self, operation: Operation, outcome: Outcome, generation: int) -> Outcome:
        """Notes how an admitted operation ended; returns the outcome."""
        if outcome.status == _OK:
            self.generation, self.gone = generation, ""
            self._note_success(operation, outcome)
        else:
            self._waiting_for_reset = "it was lost"
            self._seeded_generation = -1
        self._next_index += 1
        self._last = lambda: (operation, outcome)
        return outcome

    def record_row(self, ended: bool, last: Callable[[], tuple[Operation, Outcome]]) -> None:
        """Notes that a chunk of a batch ran here; `last` makes what it is as an operation, and its outcome."""
        if ended and not self._description.auto_reset:
            self._waiting_for_reset = "its episode has ended"
        self._next_index += 1
        self._last = last

    def lost(self, operation: Operation, detail: str) -> Outcome:
        """The outcome of an operation whose environment is gone; still to be recorded."""
        return Outcome(
            environment=self.environment, step_index=operation.step_index, status=_LOST, detail=detail
        )

    def _fault(self, operation: Operation) -> str | None:
        try:
            if operation.HasField("reset"):
                return self._reset_fault(operation.reset)
            space = self._description.action_space
            if (space is None) != (operation.WhichOneof("operation") in ("turn", "await_agent")):
                return "a conversation takes turns" if space is None else "turns are of conversations alone"
            if space is None:
                return None
            if operation.HasField("action_chunk"):
                return chunk_fault(space, in_shape(space, _decoded(operation.action_chunk), chunk=True))
            return action_fault(space, in_shape(space, _decoded(operation.action), chunk=False))
        except ServiceError as error:
            return error.message

    def _reset_fault(self, reset: simulator_pb2.ResetOperation) -> str | None:
        json_object("reset.options_json", reset.options_json)
        count = self._description.init_state_count
        if reset.HasField("init_state") and not 0 <= reset.init_state < count:
            has = f"{count} initial states, from 0 on" if count else "no initial states: name a seed"
            return f"reset.init_state: {reset.init_state}, and the environment has {has}"
        return None

    def _note_success(self, operation: Operation, outcome: Outcome) -> None:
        if operation.HasField("reset"):
            self._seeded_generation = self.generation
            self._waiting_for_reset = ""
        elif (outcome.terminated or outcome.truncated) and not self._description.auto_reset:
            self._waiting_for_reset = "its episode has ended"

    def _refuse(self, index: int, detail: str) -> Outcome:
        return Outcome(environment=self.environment, step_index=index, status=_REFUSED, detail=detail)


def _decoded(action: common_pb2.Tensor) -> np.ndarray:
    try:
        return decode_tensor(action, max_bytes=_MAX_ACTION_BYTES)
    except ServiceError as error:
        raise ServiceError(error.code, error.reason, f"the action: {error.message}") from error


def _for_users(seed: int) -> int:
    """Below 2^32, as numpy's and many environments' own generators want it; a smaller one stays itself."""
    return seed if 0 <= seed < 1 << 32 else (seed ^ seed >> 32) & (1 << 32) - 1
