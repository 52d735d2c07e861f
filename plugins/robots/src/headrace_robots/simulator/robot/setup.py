"""What a robot file says of a robot: how it is reached, how fast it is asked, and what it may never do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from headrace_servicekit.problems import explain
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.user_file import load_factory
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

VARIABLE = "HEADRACE_SIMULATOR_ROBOT"
_ROBOT = (
    "observation_features",
    "action_features",
    "connect",
    "get_observation",
    "send_action",
    "disconnect",
)
_TELEOPERATOR = ("action_features", "connect", "get_action", "disconnect")


class Verdict(NamedTuple):
    """What one action has come to."""

    reward: float = 0.0
    success: bool = False
    ended: bool = False


class Limit(BaseModel):
    """Where a number of an action may lie, in the robot's units, and how fast it may change, in units a second."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    low: float
    high: float
    speed: PositiveFloat | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


class RobotSetup(BaseModel):
    """A robot, its limits and its operator. Nothing of it can be changed from another host."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    robot: Any = Field(description="an object with LeRobot's interface of a Robot")
    limits: Mapping[str, Limit] = Field(description="of each of the robot's action_features")
    teleoperator: Any = Field(None, description="an object with LeRobot's interface of a Teleoperator")
    operator: str = Field(
        "operator",
        min_length=1,
        max_length=100,
        description="who intervenes, until another says so on the page",
    )
    instruction: str = Field("", description="the task in words")
    rate_hz: float = Field(20.0, gt=0, le=1000, description="observations and actions a second")
    watchdog_s: PositiveFloat = Field(
        0.1, description="without an action for so long the robot holds its position"
    )
    silence_s: PositiveFloat = Field(5.0, description="without an action for so long the episode fails")
    leap_s: PositiveFloat = Field(
        0.5, description="a clock that leaps by more ends the episode, and so does a tick that is so late"
    )
    slow_down: bool = Field(
        False,
        description="slow an action of the policy that is too fast down, in place of ending the episode",
    )
    workspace: Callable[[Mapping[str, Any], Mapping[str, float]], str | None] | None = Field(
        None, description="why an action may not be done, by what is seen and the action; None where it may"
    )
    hold: Mapping[str, float] | None = Field(
        None,
        description="the action that holds; default: the observations of the same names as the action's numbers",
    )
    home: Mapping[str, float] | None = Field(
        None, description="where a reset moves the robot first, at its limits' speeds"
    )
    confirm_reset: bool = Field(True, description="whether a person says when an episode may begin")
    judge: Callable[[Mapping[str, Any], Mapping[str, float]], Verdict | None] | None = Field(
        None, description="what an action has come to; default: success as the operator says it"
    )
    on_reset: Callable[[int | None], object] | None = Field(
        None, description="called with the seed as a reset begins, before the robot moves home"
    )
    on_stop: Callable[[], None] | None = Field(
        None,
        description="called once at an emergency stop, such as to cut the motors' power; default: the robot holds",
    )
    stop_file: Path | None = Field(
        None, description="while it exists the robot is stopped; default: ~/.headrace-stop-NAME"
    )
    page_port: int = Field(8490, ge=0, le=65535, description="port of the operator's page, on the loopback")

    @field_validator("robot")
    @classmethod
    def _is_robot(cls, robot: Any) -> Any:
        return _with_all(robot, _ROBOT, "a Robot")

    @field_validator("teleoperator")
    @classmethod
    def _is_teleoperator(cls, teleoperator: Any) -> Any:
        return None if teleoperator is None else _with_all(teleoperator, _TELEOPERATOR, "a Teleoperator")

    @model_validator(mode="after")
    def _of_one_robot(self) -> Self:
        if self.watchdog_s >= self.silence_s:
            raise ValueError("watchdog_s: the robot holds before its episode fails; give less than silence_s")
        names, seen = list(self.robot.action_features), set(self.robot.observation_features)
        if missing := [name for name in names if name not in self.limits]:
            raise ValueError(
                f"limits: {missing[0]!r} of the robot's action_features has none; give low and high"
            )
        if other := [name for name in self.limits if name not in names]:
            raise ValueError(
                f"limits: {other[0]!r} is none of the robot's action_features ({', '.join(names)})"
            )
        for key in ("hold", "home"):
            self._check_action(key, names)
        if self.hold is None and (unseen := [name for name in names if name not in seen]):
            raise ValueError(
                f"hold: the robot shows no {unseen[0]!r}, so that nobody knows which action holds it; give the action"
            )
        if self.teleoperator is not None:
            theirs = set(self.teleoperator.action_features)
            if unmoved := [name for name in names if name not in theirs]:
                raise ValueError(
                    f"teleoperator: its action_features have no {unmoved[0]!r}, which the robot's have; convert its "
                    "actions in a class of your own"
                )
        return self

    def _check_action(self, key: str, names: list[str]) -> None:
        given: Mapping[str, float] | None = getattr(self, key)
        if given is None:
            return
        if set(given) != set(names):
            raise ValueError(f"{key}: give a number for each of {', '.join(names)}")
        for name, value in given.items():
            if not self.limits[name].low <= value <= self.limits[name].high:
                raise ValueError(f"{key}: {name} {value:g} is outside of limits.{name}")


def _with_all(found: Any, names: tuple[str, ...], kind: str) -> Any:
    # A property is asked of the class: that of an object may need a connection.
    if missing := [name for name in names if not hasattr(type(found), name) and not hasattr(found, name)]:
        raise ValueError(
            f"{type(found).__name__} has no {missing[0]}, which LeRobot's interface of {kind} has"
        )
    return found


def task_name(place: str) -> str:
    """The task's name in a run: that of the robot file's function."""
    return place.rpartition(":")[2]


def read_setup(place: str) -> RobotSetup:
    """The setup that PATH.py:FUNCTION returns. Raises BackendError with the key, and whatever the file raises."""
    try:
        found = load_factory(place, "make_robot")()
    except BackendError as error:
        raise BackendError(VARIABLE, error.message) from error
    except ValidationError as error:
        first = explain(error, RobotSetup)[0]
        raise BackendError(VARIABLE, f"{place}: {first.key}: {first.problem}; {first.fix}") from error
    if not isinstance(found, RobotSetup):
        raise BackendError(VARIABLE, f"{place} returned a {type(found).__name__}; return a RobotSetup")
    return found


def stop_file_of(setup: RobotSetup, place: str) -> Path:
    """Where the stop of a robot is."""
    return setup.stop_file or Path(os.path.expanduser("~")) / f".headrace-stop-{task_name(place)}"
