"""A child process: `python -m headrace_simulator.child`. Reads frames, runs its environments in turn.

Environments are other people's code and may raise anything: `_call` is the one place that catches it all.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.process.worker_pipes import MAX_FRAME_BYTES, become_worker, frame, read_frame
from headrace_servicekit.rpc.tensors import decode_tensor, encode_tensor

from headrace_simulator import backends
from headrace_simulator.backends.base import Backend, BackendError, Observation, SimulatedEnvironment
from headrace_simulator.pipes import Kind, Message, decode, encode
from headrace_simulator.spaces import to_message

_RESULT = TypeVar("_RESULT")
_MAX_INFO_TEXT = 1000


class Raised(Exception):
    """Other people's code raised; the message says what and where."""


class Host:
    """The environments of one child, by index. One that raised is made anew at its next reset."""

    def __init__(self) -> None:
        self._opening: dict[str, Any] = {}
        self._backend: Backend | None = None
        self._environments: dict[int, SimulatedEnvironment] = {}

    def open(self, opening: dict[str, Any]) -> simulator_pb2.OpenPoolResponse:
        """Makes the environments; BackendError or Raised where they cannot be made."""
        self._opening = opening
        self._backend = _call(lambda: backends.create(opening["backend"]))
        for index in opening["environments"]:
            self._environments[index] = self._make()
        first = self._environments[opening["environments"][0]]
        return simulator_pb2.OpenPoolResponse(
            observation_spaces=[to_message(space) for space in first.observation_spaces],
            action_space=to_message(first.action_space),
        )

    def operate(self, operation: simulator_pb2.EnvironmentOperation) -> simulator_pb2.EnvironmentOutcome:
        """Resets or steps one environment."""
        index = operation.environment
        outcome = simulator_pb2.EnvironmentOutcome(environment=index, step_index=operation.step_index)
        try:
            if operation.HasField("reset"):
                self._reset(index, operation.reset, outcome)
            else:
                self._step(index, decode_tensor(operation.action, max_bytes=MAX_FRAME_BYTES), outcome)
            outcome.status = simulator_pb2.OUTCOME_STATUS_OK
        except (Raised, BackendError) as error:
            self._environments.pop(index, None)
            outcome = simulator_pb2.EnvironmentOutcome(environment=index, step_index=operation.step_index)
            outcome.status = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
            outcome.detail = f"the environment raised {error}"
        return outcome

    def render(self, index: int) -> bytes:
        """A picture as a serialized Tensor; Raised where there is none."""
        environment = self._environments.get(index)
        if environment is None:
            raise Raised("the environment is new; reset it first")
        return encode_tensor(_call(environment.render)).SerializeToString()

    def _make(self) -> SimulatedEnvironment:
        opening, backend = self._opening, self._backend
        if backend is None:
            raise Raised("no backend is open")
        limit = bool(opening["own_time_limit"])
        return _call(lambda: backend.make(opening["name"], opening["options"], own_time_limit=limit))

    def _reset(
        self, index: int, reset: simulator_pb2.ResetOperation, outcome: simulator_pb2.EnvironmentOutcome
    ) -> None:
        if index not in self._environments:
            self._environments[index] = self._make()
        environment = self._environments[index]
        seed = reset.seed if reset.HasField("seed") else None
        options = json.loads(reset.options_json or "{}")
        observation, info = _call(lambda: environment.reset(seed, options))
        _fill(outcome, observation, info)

    def _step(self, index: int, action: np.ndarray, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        environment = self._environments.get(index)
        if environment is None:
            raise Raised("an action before its reset")
        transition = _call(lambda: environment.step(action))
        if not np.isfinite(transition.reward):
            raise Raised(f"a reward of {transition.reward}, which is not finite")
        _fill(outcome, transition.observation, transition.info)
        outcome.reward = transition.reward
        outcome.terminated, outcome.truncated = transition.terminated, transition.truncated
        outcome.success = transition.success


def main() -> None:
    """Serves until the parent closes the pipe."""
    reader, writer = become_worker()
    host = Host()
    while (body := read_frame(reader)) is not None:
        try:
            answer = _answer(host, *decode(body))
        except BackendError as error:
            answer = _fault(error.field, error.message)
        except Raised as error:
            answer = _fault("options_json", str(error))
        writer.write(frame(encode(answer)))
        writer.flush()


def _answer(host: Host, kind: Kind, payload: bytes) -> Message:
    if kind is Kind.OPERATE:
        operation = simulator_pb2.EnvironmentOperation.FromString(payload)
        return kind, host.operate(operation).SerializeToString()
    if kind is Kind.OPEN:
        return kind, host.open(json.loads(payload)).SerializeToString()
    if kind is Kind.RENDER:
        return kind, host.render(json.loads(payload)["environment"])
    return Kind.CATALOGUE, json.dumps(catalogue()).encode()


def catalogue() -> list[tuple[str, str]]:
    """Backend and name of every environment of the installed backends."""
    listed: list[tuple[str, str]] = []
    for name in backends.BACKENDS.names():
        try:
            listed += [(name, each) for each in _call(backends.create(name).environments)]
        except (BackendError, Raised) as error:
            # A backend whose extra is not installed is no fault: it is not offered.
            sys.stderr.write(f"backend {name} is left out: {error}\n")
    return listed


def _fault(field: str, message: str) -> Message:
    return Kind.FAULT, json.dumps({"field": field, "message": message}).encode()


def _fill(
    outcome: simulator_pb2.EnvironmentOutcome, observation: Observation, info: Mapping[str, Any]
) -> None:
    for name, array in observation.items():
        outcome.observation[name].CopyFrom(encode_tensor(array))
    figures = {str(key): _figure(value) for key, value in info.items()}
    outcome.info_json = json.dumps({key: value for key, value in figures.items() if value is not None})


def _figure(value: Any) -> bool | int | float | str | None:
    """A scalar as JSON holds it; None for everything else, and for what is not finite."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        value = value.item()
    if isinstance(value, str):
        return value[:_MAX_INFO_TEXT]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float) else None


def _call(function: Callable[[], _RESULT]) -> _RESULT:
    try:
        return function()
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        raise Raised(f"{type(error).__name__}: {str(error)[:500]}{where}") from error


if __name__ == "__main__":
    main()
