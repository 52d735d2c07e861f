"""The rules of one environment's operations: which runs, which is repeated, which is refused. No I/O.

An operation is keyed by (pool incarnation, environment, step index); the last reply is kept.
"""

from __future__ import annotations

from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import json_object
from headrace_servicekit.rpc.tensors import decode_tensor

from headrace_simulator.spaces import ArraySpace, action_fault

_MAX_ACTION_BYTES = 1024 * 1024
Operation = simulator_pb2.EnvironmentOperation
Outcome = simulator_pb2.EnvironmentOutcome
_OK, _LOST, _REFUSED = (
    simulator_pb2.OUTCOME_STATUS_OK,
    simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST,
    simulator_pb2.OUTCOME_STATUS_REFUSED,
)


class EnvironmentLedger:
    """What one environment has done and may do next.

    `generation` counts the processes that have held it: an episode begun in a past one is lost.
    """

    def __init__(self, environment: int, seed: int, action_space: ArraySpace, max_episode_steps: int) -> None:
        self.environment = environment
        self.generation = -1
        """Generation of the process that holds the running episode."""
        self._seed = seed
        self._action_space = action_space
        self._max_episode_steps = max_episode_steps
        self._next_index = 0
        self._last: tuple[bytes, Outcome] | None = None
        self._seeded_generation = -1
        self._steps = 0
        self._waiting_for_reset = "it is new"

    def admit(self, operation: Operation) -> Outcome | None:
        """The outcome, where it is known without running the operation; None where it has to run.

        A refusal changes nothing: the next operation has the same step index.
        """
        index = operation.step_index
        if self._last is not None and index == self._next_index - 1:
            body, outcome = self._last
            if body == operation.SerializeToString(deterministic=True):
                return outcome
            return self._refuse(
                index, f"step index {index} was another operation; an operation keeps its index"
            )
        if index != self._next_index:
            return self._refuse(index, f"step index {index} where {self._next_index} is next")
        kind = operation.WhichOneof("operation")
        if kind is None:
            return self._refuse(index, "the operation names neither a reset nor an action")
        if kind == "reset":
            fault = _options_fault(operation.reset.options_json)
            return self._refuse(index, fault) if fault else None
        return self._admit_action(operation)

    def effective(self, operation: Operation, generation: int) -> Operation:
        """The operation with the seed that it implies: the first reset of a new environment has one."""
        seedless = operation.HasField("reset") and not operation.reset.HasField("seed")
        if seedless and self._seeded_generation != generation:
            operation = Operation.FromString(operation.SerializeToString())
            operation.reset.seed = self._seed
        return operation

    def record(self, operation: Operation, outcome: Outcome, generation: int) -> Outcome:
        """Notes how an admitted operation ended; returns the outcome with the time limit applied."""
        if outcome.status == _OK:
            self.generation = generation
            self._note_success(operation, outcome)
        else:
            self._waiting_for_reset = "it was lost"
            self._seeded_generation = -1
        self._next_index += 1
        self._last = (operation.SerializeToString(deterministic=True), outcome)
        return outcome

    def lost(self, operation: Operation, detail: str) -> Outcome:
        """The outcome of an operation whose environment is gone; still to be recorded."""
        return Outcome(
            environment=self.environment, step_index=operation.step_index, status=_LOST, detail=detail
        )

    def _admit_action(self, operation: Operation) -> Outcome | None:
        index = operation.step_index
        if self._waiting_for_reset:
            return self._refuse(index, f"the environment needs a reset: {self._waiting_for_reset}")
        try:
            action = decode_tensor(operation.action, max_bytes=_MAX_ACTION_BYTES)
        except ServiceError as error:
            return self._refuse(index, f"the action: {error.message}")
        fault = action_fault(self._action_space, action)
        return self._refuse(index, fault) if fault else None

    def _note_success(self, operation: Operation, outcome: Outcome) -> None:
        if operation.HasField("reset"):
            self._steps = 0
            self._seeded_generation = self.generation
            self._waiting_for_reset = ""
            return
        self._steps += 1
        if self._steps == self._max_episode_steps and not outcome.terminated:
            outcome.truncated = True
        if outcome.terminated or outcome.truncated:
            self._waiting_for_reset = "its episode has ended"

    def _refuse(self, index: int, detail: str) -> Outcome:
        return Outcome(environment=self.environment, step_index=index, status=_REFUSED, detail=detail)


def _options_fault(options_json: str) -> str | None:
    try:
        json_object("reset.options_json", options_json)
    except ServiceError as error:
        return error.message
    return None
