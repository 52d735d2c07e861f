"""The server of openenv.yaml: `python openenv_guess.py [tools] PORT` in a Python that has the package openenv."""

from __future__ import annotations

import os
import random
import sys
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    """A guess."""

    said: str


class Heard(Observation):
    """What follows it."""

    text: str = ""


class Game(Environment):
    """The secret follows from the seed; a guess that is not "1", "2" or "3" is wrong."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._secret = State(episode_id=str(uuid4())), ""

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, secret: str = "", **kwargs: Any
    ) -> Heard:
        self._secret = secret or random.Random(seed).choice("123")
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Heard(text="?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self._state.step_count += 1
        if action.said == "raise":
            raise RuntimeError("the game fell over")
        if action.said == "exit":
            os._exit(1)
        right = action.said == self._secret
        hint = "+" if self._secret > action.said else "-"
        return Heard(text=hint, reward=float(right), done=right or self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


def tools() -> type[Environment]:
    """The environment whose actions are calls of tools."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    class Town(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            mcp = FastMCP("town")

            @mcp.tool
            def weather(town: str) -> str:
                """Tells the weather."""
                return f"rain in {town}"

            super().__init__(mcp)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            return Observation(metadata={"asked": "Ulm?"})

        def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return Observation()

        @property
        def state(self) -> State:
            return State()

    return Town


if __name__ == "__main__":
    if "tools" in sys.argv:
        app = create_app(tools(), Action, Observation, max_concurrent_envs=2)
    else:
        app = create_app(Game, Guess, Heard, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[-1]), log_level="warning")
