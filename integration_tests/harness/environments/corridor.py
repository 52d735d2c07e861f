"""A user's own environment: walk to a goal that follows from the seed. A file beside it makes its steps stand still.

A file tells which simulator processes hold one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env[np.ndarray, np.ndarray]):
    """State: position and goal. Action: how far to walk, -1 to 1. `directory` is where `hold` and `held` lie."""

    observation_space = spaces.Box(-5.0, 5.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    @staticmethod
    def used(directory: Path, simulator: int) -> bool:
        """Whether an episode began in the simulator of a process id."""
        return (directory / f"used-{simulator}").exists()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins at 0."""
        super().reset(seed=seed, options=options)
        (self._directory / f"used-{os.getppid()}").touch()
        self._position, self._goal = 0.0, float(self.np_random.uniform(-1.0, 1.0))
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Walks; within 0.1 of the goal is a success, which ends the episode."""
        while (self._directory / "hold").exists():
            (self._directory / "held").touch()
            time.sleep(0.02)
        self._position += 0.3 * float(np.clip(action[0], -1.0, 1.0))
        distance = abs(self._position - self._goal)
        return self._seen(), -distance, distance < 0.1, False, {"success": distance < 0.1}

    def _seen(self) -> np.ndarray:
        return np.array([self._position, self._goal], np.float32)


def make_env(directory: str) -> Corridor:
    """What `corridor.py:make_env` names."""
    return Corridor(directory)
