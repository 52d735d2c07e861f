"""A user's own environment of mixed actions and stacked frames: a lever to choose and a force to push it with."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIDE, LEVERS, STEPS = 20, 3, 4
Observation = dict[str, Any]


class Levers(gymnasium.Env[Observation, dict[str, Any]]):
    """The first step succeeds, and the last one does not. An action that is not in its space raises."""

    observation_space = spaces.Dict(
        {
            "frames": spaces.Box(0, 255, (2, SIDE, SIDE), np.uint8),
            "last": spaces.Discrete(LEVERS),
            "mission": spaces.Text(20),
        }
    )
    action_space = spaces.Dict(
        {"lever": spaces.Discrete(LEVERS), "force": spaces.Box(-1.0, 1.0, (1,), np.float32)}
    )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins at the first lever."""
        super().reset(seed=seed, options=options)
        self._count, self._last = 0, 0
        self._frames = self.np_random.integers(0, 255, (2, SIDE, SIDE)).astype(np.uint8)
        return self._seen(), {}

    def step(self, action: dict[str, Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pushes a lever; the reward is the force on the last one."""
        if not self.action_space.contains(action):
            raise ValueError(f"no action: {action}")
        self._count, self._last = self._count + 1, action["lever"]
        reward = float(action["force"][0]) if self._last == LEVERS - 1 else 0.0
        return self._seen(), reward, self._count >= STEPS, False, {"success": self._count == 1}

    def _seen(self) -> Observation:
        return {"frames": self._frames, "last": self._last, "mission": "push the last"}


def make_env() -> Levers:
    """What `levers.py:make_env` names."""
    return Levers()
