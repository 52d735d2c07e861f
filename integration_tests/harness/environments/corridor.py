"""A user's own environment: walk to a goal that follows from the seed. A file beside it makes its steps stand still.

It stands still from the first episode on, or behind as many episodes as the file says. A file tells which simulator
processes hold one.
"""

from __future__ import annotations

import math
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
        self._stands_still, self._number = True, 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Walks; within 0.1 of the goal is a success, which ends the episode."""
        self._number = self._number or self._begun()
        while self._stands_still and self._number > self._allowed():
            self._tell("held")
            time.sleep(0.02)
        self._position += 0.3 * float(np.clip(action[0], -1.0, 1.0))
        distance = abs(self._position - self._goal)
        return self._seen(), -distance, distance < 0.1, False, {"success": distance < 0.1}

    def _begun(self) -> int:
        """Which episode this one is, of all that have made a step."""
        counter = os.open(self._directory / "begun", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(counter, b".")
            return os.lseek(counter, 0, os.SEEK_CUR)
        finally:
            os.close(counter)

    def _allowed(self) -> float:
        try:
            return int((self._directory / "hold").read_text() or 0)
        except FileNotFoundError:
            return math.inf

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
