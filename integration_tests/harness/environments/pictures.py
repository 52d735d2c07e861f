"""A user's own environment that shows pictures: a bright square to push right, on a floor that the seed paints."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

SIZE, SQUARE, GOAL = 48, 8, 0.5


class Pictures(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """Observations: a picture, and the square's place. Action: two numbers of -1 to 1, of which the first moves it."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    observation_space = spaces.Dict(
        {
            "front": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8),
            "place": spaces.Box(-1.0, 1.0, (1,), np.float32),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begins left of the middle."""
        super().reset(seed=seed, options=options)
        self._place = float(self.np_random.uniform(-0.8, -0.2))
        self._floor = self.np_random.integers(0, 100, 3)
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Moves it; right of GOAL is a success, which ends the episode."""
        moved = 0.25 * float(action[0])
        self._place = float(np.clip(self._place + moved, -1.0, 1.0))
        done = self._place >= GOAL
        return self._seen(), moved, done, False, {"success": done}

    def render(self) -> np.ndarray:
        """The picture."""
        return self._seen()["front"]

    def _seen(self) -> dict[str, np.ndarray]:
        picture = np.broadcast_to(self._floor.astype(np.uint8), (SIZE, SIZE, 3)).copy()
        left = round((self._place + 1) / 2 * (SIZE - SQUARE))
        picture[SIZE // 2 : SIZE // 2 + SQUARE, left : left + SQUARE] = 255
        return {"front": picture, "place": np.array([self._place], np.float32)}


def make_env() -> Pictures:
    """What `pictures.py:make_env` names."""
    return Pictures()
