"""A hand brings a ball to a mark and sees both in a picture of 24 x 24 pixels: cheap, and nothing else to install.

Two numbers from -1 to 1 move the hand over a table that reaches from -1 to 1, by at most REACH each. A ball that it
comes near to goes with it; the episode ends, as a success, where the ball is near the mark. A step's reward is how much
shorter the way has become, times REWARD, and 1 for the success.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

SIDE, REACH, NEAR = 24, 0.15, 0.2
REWARD = 3.0
PLACES = np.linspace(-1, 1, SIDE, dtype=np.float32)
SHOWN = (("mark", 0.2, (60, 180, 75)), ("ball", 0.12, (200, 60, 40)), ("hand", 0.08, (40, 60, 200)))


class Bring(gymnasium.Env[dict[str, Any], np.ndarray]):
    """The camera's picture alone shows ball and mark; `place` is the hand's own, as a robot knows it.

    With `expert` there is `expert_action` too, which goes straight to the ball and then to the mark. Without `ends` a
    success neither ends an episode nor is rewarded.
    """

    def __init__(self, expert: bool = False, ends: bool = True) -> None:
        self.expert, self.ends = expert, ends
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "camera": gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
                "place": gymnasium.spaces.Box(-1, 1, (2,), np.float32),
                **({"expert_action": self.action_space} if expert else {}),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.hand, self.ball, self.mark = self.np_random.uniform(-0.9, 0.9, (3, 2))
        while np.linalg.norm(self.mark - self.ball) < 0.5:
            self.mark = self.np_random.uniform(-0.9, 0.9, 2)
        self.held = False
        self.way = self._way()
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.hand = np.clip(self.hand + REACH * np.clip(action, -1, 1), -1, 1)
        self.held = self.held or bool(np.linalg.norm(self.hand - self.ball) < NEAR)
        if self.held:
            self.ball = self.hand
        before, self.way = self.way, self._way()
        done = self.held and self.way < NEAR
        ended = done and self.ends
        return self._seen(), REWARD * (before - self.way) + float(ended), ended, False, {"success": done}

    def render(self) -> np.ndarray:
        image = np.full((SIDE, SIDE, 3), 230, np.float32)
        for name, radius, colour in SHOWN:
            x, y = getattr(self, name)
            outside = np.sqrt((PLACES[None] - x) ** 2 + (PLACES[:, None] + y) ** 2) - radius
            image += np.clip(0.5 - outside * SIDE / 2, 0, 1)[..., None] * (np.float32(colour) - image)
        return image.astype(np.uint8)

    def _way(self) -> float:
        """What is left: of the hand to the ball, and of the ball to the mark."""
        return float(np.linalg.norm(self.hand - self.ball) + np.linalg.norm(self.ball - self.mark))

    def _seen(self) -> dict[str, Any]:
        seen = {"camera": self.render(), "place": self.hand.astype(np.float32)}
        if self.expert:
            way = (self.mark if self.held else self.ball) - self.hand
            seen["expert_action"] = np.clip(way / REACH, -1, 1).astype(np.float32)
        return seen


make_env = Bring
