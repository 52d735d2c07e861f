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
        self._tell(f"used-{os.getppid()}")
        self._position, self._goal = 0.0, float(self.np_random.uniform(-1.0, 1.0))
        self._stands_still = True
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Walks; within 0.1 of the goal is a success, which ends the episode."""
        while self._stands_still and (self._directory / "hold").exists():
            self._tell("held")
            time.sleep(0.02)
        self._position += 0.3 * float(np.clip(action[0], -1.0, 1.0))
        distance = abs(self._position - self._goal)
        return self._seen(), -distance, distance < 0.1, False, {"success": distance < 0.1}

    def _tell(self, what: str) -> None:
        (self._directory / what).touch()

    def _seen(self) -> np.ndarray:
        return np.array([self._position, self._goal], np.float32)


class FilmedCorridor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """With a camera, whose pictures are large. Starts whose goal is on the left alone stand still; others say in a
    file that they have walked far.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(corridor := Corridor(directory))
        self._corridor = corridor
        camera = spaces.Box(0, 255, (256, 256, 3), np.uint8)
        self.observation_space = spaces.Dict({"place": corridor.observation_space, "front": camera})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begins at 0."""
        place, info = self._corridor.reset(seed=seed, options=options)
        self._walked = 0
        self._corridor._stands_still = bool(place[1] < 0)
        return self._filmed(place), info

    def step(self, action: np.ndarray) -> Any:
        """Walks."""
        place, *rest = self._corridor.step(action)
        self._walked += 1
        if rest[1] or self._walked == 8:
            self._corridor._tell("ended")
        return self._filmed(place), *rest

    @staticmethod
    def _filmed(place: np.ndarray) -> dict[str, np.ndarray]:
        bright = round(25 * (float(place[0]) + 5))
        return {"place": place, "front": np.full((256, 256, 3), bright, np.uint8)}


def make_filmed(directory: str) -> FilmedCorridor:
    """What `corridor.py:make_filmed` names."""
    return FilmedCorridor(directory)


def make_env(directory: str) -> Corridor:
    """What `corridor.py:make_env` names."""
    return Corridor(directory)
