"""A robot's dictionaries as named arrays, and rows of numbers as its actions; what is wrong with either, by name.

A: numbers of an action, in the order of the robot's action_features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from headrace_simulator.backends.base import Observation
from headrace_simulator.spaces import ArraySpace

from headrace_robots.simulator.robot.setup import RobotSetup

STATE = "state"


class Fault(Exception):
    """Why an episode goes on no longer. The message names the key or the value, and what to do."""


class Body:
    """What a robot shows and does."""

    def __init__(self, setup: RobotSetup) -> None:
        self._setup = setup
        features = setup.robot.observation_features
        self._numbers = [name for name, kind in features.items() if not isinstance(kind, tuple | list)]
        self._images = {
            name: tuple(kind) for name, kind in features.items() if isinstance(kind, tuple | list)
        }
        self.names = list(setup.robot.action_features)
        low, high = (
            np.array([getattr(setup.limits[name], side) for name in self.names], np.float32)
            for side in ("low", "high")
        )
        self.action_space = ArraySpace("", np.dtype(np.float32), (len(self.names),), low, high)
        self.observation_spaces = [
            *([ArraySpace(STATE, np.dtype(np.float32), (len(self._numbers),))] if self._numbers else []),
            *(ArraySpace(name, np.dtype(np.uint8), shape) for name, shape in self._images.items()),
        ]

    def arrays(self, seen: Mapping[str, Any]) -> Observation:
        """The observation by name: all numbers as `state`, and each camera. Raises Fault."""
        if missing := [name for name in (*self._numbers, *self._images) if name not in seen]:
            raise Fault(
                f"observation {missing[0]!r}, which the robot's observation_features name, is missing"
            )
        numbers = [float(seen[name]) for name in self._numbers]
        for name, value in zip(self._numbers, numbers, strict=True):
            if not math.isfinite(value):
                raise Fault(f"observation {name!r} is {value}; look at the sensor and its cable")
        found: dict[str, np.ndarray] = {STATE: np.array(numbers, np.float32)} if numbers else {}
        for name, shape in self._images.items():
            image = np.asarray(seen[name])
            if image.shape != shape or image.dtype != np.uint8:
                raise Fault(
                    f"observation {name!r} is {image.dtype} of shape {image.shape}, not uint8 of {shape}"
                )
            found[name] = image
        return found

    def action(self, row_A: np.ndarray) -> dict[str, float]:
        """The robot's action of a row of numbers."""
        return dict(zip(self.names, map(float, row_A), strict=True))

    def row(self, action: Mapping[str, Any]) -> np.ndarray:
        """The row of an action of the robot's."""
        return np.array([action[name] for name in self.names], np.float32)

    def holding(self, seen: Mapping[str, Any]) -> dict[str, float]:
        """The action that holds the robot where it is, outside of its limits too: moving it inside would be a leap."""
        if self._setup.hold is not None:
            return dict(self._setup.hold)
        return {name: float(seen[name]) for name in self.names}

    def within(self, action: Mapping[str, float]) -> dict[str, float]:
        """The action nearest to one that lies within the limits."""
        limits = self._setup.limits
        return {name: min(max(action[name], limits[name].low), limits[name].high) for name in self.names}

    def slowed(self, action: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
        """An action that is no faster than the limits, coming from the one before."""
        found = {}
        for name in self.names:
            most = self._most(name)
            found[name] = before[name] + min(max(action[name] - before[name], -most), most)
        return found

    def check(
        self, action: Mapping[str, float], before: Mapping[str, float], seen: Mapping[str, Any]
    ) -> None:
        """Raises Fault for an action that is outside of the limits, too fast after the one before, or not allowed."""
        for name in self.names:
            value, limit = action[name], self._setup.limits[name]
            if not limit.low <= value <= limit.high:  # also what is no number
                raise Fault(
                    f"limits.{name}: {value:g} is outside of {limit.low:g} to {limit.high:g}; lower the policy's "
                    "bounds (model.policy), or widen the limit in the robot file"
                )
            if abs(value - before[name]) > self._most(name) * (1 + 1e-6):
                speed = abs(value - before[name]) * self._setup.rate_hz
                raise Fault(
                    f"limits.{name}.speed: {value:g} after {before[name]:g} is {speed:g} a second, above "
                    f"{limit.speed:g}; raise it, set slow_down=True in the robot file, or narrow the policy's actions"
                )
        if self._setup.workspace is not None and (why := self._setup.workspace(seen, action)):
            raise Fault(f"workspace: {why}; the action was {self._shown(action)}")

    def _most(self, name: str) -> float:
        speed = self._setup.limits[name].speed
        return math.inf if speed is None else speed / self._setup.rate_hz

    def _shown(self, action: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {action[name]:g}" for name in self.names)
