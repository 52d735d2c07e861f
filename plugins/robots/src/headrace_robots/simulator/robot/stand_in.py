"""A Gymnasium environment of numbers with LeRobot's interface of a robot: to try a setup before the robot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace_robots.simulator.robot.setup import Limit, Verdict


class GymnasiumRobot:
    """Numbers `state.0`, … and `action.0`, …, of an environment whose spaces are rows of numbers.

    It moves by one step for each action that it is sent. `judge` goes into the setup, and `reset` is called as an
    episode begins.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._states = [f"state.{index}" for index in range(environment.observation_space.shape[0])]
        self._actions = [f"action.{index}" for index in range(environment.action_space.shape[0])]
        self._seen = np.zeros(len(self._states))
        self._verdict = Verdict()
        self.is_connected = False

    @property
    def observation_features(self) -> dict[str, Any]:
        """A number for each of the state's."""
        return dict.fromkeys(self._states, float)

    @property
    def action_features(self) -> dict[str, Any]:
        """A number for each of the action's."""
        return dict.fromkeys(self._actions, float)

    def limits(self) -> dict[str, Limit]:
        """Those of the action space."""
        space = self._environment.action_space
        return {
            name: Limit(low=float(low), high=float(high))
            for name, low, high in zip(self._actions, space.low, space.high, strict=True)
        }

    def connect(self, calibrate: bool = True) -> None:
        """Begins an episode."""
        self.is_connected = True
        self.reset(0)

    def reset(self, seed: int | None) -> None:
        """Begins an episode."""
        self._seen, _ = self._environment.reset(seed=seed)
        self._verdict = Verdict()

    def get_observation(self) -> dict[str, Any]:
        """What the last action led to."""
        return dict(zip(self._states, map(float, self._seen), strict=True))

    def send_action(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """One step."""
        numbers = np.array([action[name] for name in self._actions], self._environment.action_space.dtype)
        self._seen, reward, ended, _, info = self._environment.step(numbers)
        success = bool(info.get("success", info.get("is_success", False)))
        self._verdict = Verdict(float(reward), success, bool(ended))
        return dict(action)

    def judge(self, seen: Mapping[str, Any], action: Mapping[str, float]) -> Verdict:
        """What the last step came to."""
        return self._verdict

    def disconnect(self) -> None:
        """Closes it."""
        self.is_connected = False
        self._environment.close()
