"""The robot of this host as an environment: what a pool asks, the robot's process is asked. For child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.process.worker_pipes import MAX_FRAME_BYTES, frame, read_frame
from headrace_servicekit.registry import Options
from headrace_servicekit.rpc.tensors import decode_tensor, write_tensor
from headrace_simulator.backends.base import BackendError, Observation, Transition
from headrace_simulator.backends.options import parse, unknown
from headrace_simulator.pools.brokers import BROKER_VARIABLE
from headrace_simulator.spaces import from_message, picture
from pydantic import BaseModel, ConfigDict

from headrace_robots.simulator.robot.serving import connect
from headrace_robots.simulator.robot.setup import VARIABLE, task_name


class NoOptions(BaseModel):
    """What a run may say of a robot: nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RobotEnded(Exception):
    """The robot's process ended the episode; the message says why."""


class Robots:
    """The one robot of this host."""

    def environments(self) -> list[str]:
        """The task of the robot file. Raises BackendError where there is none."""
        if not (place := os.environ.get(VARIABLE)):
            raise BackendError("environment.backend", f"this host has no robot: {VARIABLE} is not set")
        return [task_name(place)]

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> RobotEnvironment:
        """Connects to the robot's process; reward and end are its setup's."""
        parse(NoOptions, options)
        made = RobotEnvironment(os.environ[BROKER_VARIABLE])
        if name != made.name:
            made.close()
            raise unknown("robot", name, [made.name])
        return made


class RobotEnvironment:
    """The robot, of which an episode of another pool may have the turn first."""

    init_state_count = 0

    def __init__(self, folder: str) -> None:
        self._connection = connect(folder)
        self._reader = self._connection.makefile("rb")
        told = simulator_pb2.OpenPoolResponse.FromString(self._read())
        self.name, self.instruction = told.pool, told.instruction
        self.observation_spaces = [from_message(space) for space in told.observation_spaces]
        self.action_space = from_message(told.action_space)
        self._shown: Observation = {}

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Begins an episode, once a person has confirmed it."""
        operation = simulator_pb2.EnvironmentOperation(reset=simulator_pb2.ResetOperation(seed=seed))
        return self._asked(operation)[1], {}

    def step(self, action: np.ndarray) -> Transition:
        """Acts for one period. Raises RobotEnded."""
        operation = simulator_pb2.EnvironmentOperation()
        write_tensor(operation.action, action)
        outcome, observation = self._asked(operation)
        done = None
        if outcome.HasField("interventions"):
            done = decode_tensor(outcome.interventions, max_bytes=MAX_FRAME_BYTES)
        return Transition(
            observation,
            outcome.reward,
            outcome.terminated,
            False,
            outcome.success,
            done=done,
            author=outcome.author,
        )

    def render(self) -> np.ndarray:
        """What the first camera shows. ValueError where there is none."""
        images = [array for array in self._shown.values() if array.ndim == 3]
        if not images:
            raise ValueError("the robot has no camera")
        return picture(images[0])

    def close(self) -> None:
        """Leaves the robot."""
        self._reader.close()
        self._connection.close()

    def _asked(self, operation: simulator_pb2.EnvironmentOperation) -> tuple[Any, Observation]:
        try:
            self._connection.sendall(frame(operation.SerializeToString()))
            outcome = simulator_pb2.EnvironmentOutcome.FromString(self._read())
        except OSError as error:
            raise RobotEnded(f"the robot's process ended: {error}; it is started again") from error
        if outcome.status != simulator_pb2.OUTCOME_STATUS_OK:
            raise RobotEnded(outcome.detail)
        self._shown = {
            name: decode_tensor(tensor, max_bytes=MAX_FRAME_BYTES)
            for name, tensor in outcome.observation.items()
        }
        return outcome, self._shown

    def _read(self) -> bytes:
        if (body := read_frame(self._reader)) is None:
            raise ConnectionResetError("it closed the connection")
        return body


def build(options: Options) -> Robots:
    """The backend."""
    return Robots()
